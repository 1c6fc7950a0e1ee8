"""Work queues under faults: connections cut at every step, a deleted queue, a killed node, an alarm, a backlog."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest

from onward import Onward, Retry
from onward.brokers.base import Assigned, Fenced, Message, Ordering, State, Subscription
from onward.brokers.rabbitmq.amqp import Channel, Outbound
from onward.testing.failure_shop import eventually, until
from tests.brokers.rabbitmq.test_work_app import QUEUE, RETRY, Desk, is_empty, letters, publish
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]


MANY_RETRIES = Retry(attempts=50, first_delay_s=0.2, factor=1, jitter=0)
ONE = Retry(attempts=1)
EVENTS, CUTS = 40, 3
LETTERS = "onward.orders:billing:work.aside.0"


@pytest.fixture
def vhost(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    with rabbitmq_server.vhost() as vhost:
        yield vhost


@contextlib.contextmanager
def cutting(
    patch: pytest.MonkeyPatch, proxy: Proxy, chosen: Callable[[Outbound], bool], *, after: bool
) -> Iterator[list[int]]:
    """Cut the connection once, when such a message is sent: before it leaves, or when its confirm is on the way."""
    cuts: list[int] = []
    send = Channel.send

    def cut_once(channel: Channel, messages: Sequence[Outbound]) -> int:
        if not cuts and any(chosen(each) for each in messages):
            cuts.append(1)
            if after:
                proxy.mute()
                number = send(channel, messages)
                asyncio.get_running_loop().call_later(0.3, _cut, proxy)
                return number
            _cut(proxy)
        return send(channel, messages)

    with patch.context() as context:
        context.setattr(Channel, "send", cut_once)
        yield cuts


def _cut(proxy: Proxy) -> None:
    proxy.cut()
    proxy.mend()


@contextlib.asynccontextmanager
async def behind_proxy(
    server: RabbitMQServer, vhost: str, fails: Callable[[int], bool], retry: Retry = RETRY
) -> AsyncIterator[tuple[Desk, Proxy]]:
    with server.proxy() as proxy:
        desk = Desk(server.url_of(vhost, proxy.url), fails, lease_s=2.0, declared={"retry": retry})
        async with desk.open():
            yield desk, proxy


@pytest.mark.parametrize("after", [False, True], ids=["publish", "confirm"])
@pytest.mark.parametrize("where", [".rung.", ".aside."], ids=["rung", "dead letter"])
def test_a_cut_while_a_record_is_stored_loses_nothing(
    rabbitmq_server: RabbitMQServer, vhost: str, where: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        unsold = {0, 1, 2}
        retry = MANY_RETRIES if where == ".rung." else RETRY
        async with behind_proxy(rabbitmq_server, vhost, lambda n: n in unsold, retry) as (desk, proxy):
            with cutting(monkeypatch, proxy, lambda each: _is_record(each, where), after=after) as cuts:
                await publish_all(rabbitmq_server.url_of(vhost), 20)
                await until(lambda: set(desk.done) == set(range(3, 20)), "all others are handled")
                if where == ".rung.":
                    await until(lambda: bool(cuts), "a retry is sent to a rung")
                    unsold.clear()
                    await until(lambda: set(desk.done) == set(range(20)), "the retries are handled")
                else:
                    await eventually(lambda: _dead(desk, 3), "three events are dead letters")
                await eventually(lambda: is_empty(rabbitmq_server.url_of(vhost)), "all events are settled")
            assert cuts
        assert all(attempt <= retry.attempts for _, attempt, _ in desk.tried)

    asyncio.run(main())


def _is_record(message: Outbound, where: str) -> bool:
    """Whether it is a retry, or a dead letter. An aside has other entries too."""
    return where in message.routing_key and (where == ".rung." or b"exhausted" in message.body)


async def _dead(desk: Desk, count: int) -> bool:
    """Whether these are the events of the dead letters. An event may be there twice if an answer was lost."""
    return await _dead_are(desk, set(range(count)))


def test_cuts_do_not_multiply_the_attempts_of_failing_events(rabbitmq_server: RabbitMQServer, vhost: str) -> None:
    """An event has one message at any time, but for the moment in which a copy of it is stored."""

    async def main() -> None:
        retry = Retry(attempts=5, first_delay_s=0.2, factor=2, jitter=0)
        async with behind_proxy(rabbitmq_server, vhost, lambda n: True, retry) as (desk, proxy):
            await publish_all(rabbitmq_server.url_of(vhost), EVENTS)
            for _ in range(CUTS):
                before = len(desk.tried)
                await until(lambda: len(desk.tried) >= before + EVENTS, "events are tried")  # noqa: B023
                await asyncio.to_thread(_cut, proxy)
            at_last_cut = len(desk.tried)
            await eventually(lambda: _dead(desk, EVENTS), "all are dead letters")
            await eventually(lambda: is_empty(rabbitmq_server.url_of(vhost)), "all events are settled")
        assert EVENTS * retry.attempts <= len(desk.tried)
        assert len(desk.tried) - at_last_cut <= EVENTS * (retry.attempts + 1), "an event had several messages"

    asyncio.run(main())


def test_a_cut_while_events_are_acknowledged_runs_some_again_and_loses_none(
    rabbitmq_server: RabbitMQServer, vhost: str
) -> None:
    async def main() -> None:
        async with behind_proxy(rabbitmq_server, vhost, lambda n: False) as (desk, proxy):
            publishing = asyncio.create_task(publish_all(rabbitmq_server.url_of(vhost), 5_000))
            for _ in range(3):
                before = len(desk.done)
                await until(lambda: len(desk.done) > before + 200, "events are handled")  # noqa: B023
                await asyncio.to_thread(_cut, proxy)
            await publishing
            await until(lambda: set(desk.done) == set(range(5_000)), "all events are handled")
            await eventually(lambda: is_empty(rabbitmq_server.url_of(vhost)), "all events are settled")
            assert not await letters(desk.app)

    asyncio.run(main())


async def publish_all(url: str, count: int) -> None:
    async with Onward(url) as app:
        for start in range(0, count, 500):
            await publish(app, range(start, min(count, start + 500)))


@pytest.mark.parametrize("after", [False, True], ids=["publish", "confirm"])
def test_a_cut_while_a_letter_is_replayed_loses_nothing(
    rabbitmq_server: RabbitMQServer, vhost: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        broken = {0, 1, 2}
        async with behind_proxy(rabbitmq_server, vhost, lambda n: n in broken) as (desk, proxy):
            await desk.publish(range(3))
            await eventually(lambda: _dead(desk, 3), "three events are dead letters")
            broken.clear()
            with cutting(monkeypatch, proxy, lambda each: each.routing_key == QUEUE, after=after) as cuts:
                await desk.app.dead.replay()
                await until(lambda: set(desk.done) == {0, 1, 2}, "all events are handled")
                await eventually(lambda: _dead(desk, 0), "their records are removed")
            assert cuts

    asyncio.run(main())


def test_a_queue_that_is_deleted_while_it_is_consumed_is_declared_again(
    rabbitmq_server: RabbitMQServer, vhost: str
) -> None:
    async def main() -> None:
        async with Desk(rabbitmq_server.url_of(vhost)).open() as desk:
            await desk.publish(range(3))
            await until(lambda: set(desk.done) == {0, 1, 2}, "all events are handled")
            await asyncio.to_thread(rabbitmq_server.delete_queue, vhost, QUEUE)
            number = iter(range(3, 100_000))

            async def handled() -> bool:
                await desk.publish([next(number)])
                return max(desk.done) > 2

            await eventually(handled, "events are handled again")

    asyncio.run(main())


def test_when_the_stream_of_dead_letters_was_deleted_all_events_go_on_and_new_letters_are_stored(
    rabbitmq_server: RabbitMQServer, vhost: str
) -> None:
    bad = {0, 10, 20}

    async def main() -> None:
        async with Desk(rabbitmq_server.url_of(vhost), lambda n: n in bad, declared={"retry": ONE}).open() as desk:
            await desk.publish([0])
            await eventually(lambda: desk.has_dead(1), "the letter is stored")
            await asyncio.to_thread(rabbitmq_server.delete_queue, vhost, LETTERS)
            await desk.publish(range(10, 20))
            await until(lambda: set(desk.done) == set(range(11, 20)), "the other events are handled")
            await desk.publish(range(20, 30))
            await eventually(lambda: _dead_are(desk, bad), "the new letters are stored, and the old one again")
            await until(lambda: len(desk.done) == 18, "the other events are handled")
            await eventually(lambda: is_empty(rabbitmq_server.url_of(vhost)), "all events are settled")
            await until(lambda: desk.app.health().ready, "the member is ready")

    asyncio.run(main())


async def _dead_are(desk: Desk, numbers: set[int]) -> bool:
    return {letter.event.value for letter in await desk.records(State.DEAD)} == {b'{"n":%d}' % n for n in numbers}


@pytest.mark.slow
def test_a_killed_node_loses_no_event_and_no_retry(rabbitmq_server: RabbitMQServer, vhost: str) -> None:
    async def main() -> None:
        url = rabbitmq_server.url_of(vhost)
        async with Desk(url, lambda n: n % 50 == 0).open() as desk:
            await desk.publish(range(400))
            await eventually(lambda: desk.has_dead(8), "eight events are dead letters")
            await asyncio.to_thread(rabbitmq_server.until_durable, vhost)
            await desk.publish(range(400, 800))
            await asyncio.to_thread(rabbitmq_server.restart)
            await until(lambda: set(desk.done) >= {n for n in range(800) if n % 50}, "all others are handled", 90.0)
            await eventually(lambda: _has_letters(desk, 16), "the failing ones are dead letters", 60.0)

    asyncio.run(main())


async def _has_letters(desk: Desk, count: int) -> bool:
    return len({letter.event.id for letter in await desk.records(State.DEAD)}) == count


def test_under_a_memory_alarm_events_are_handled_and_retries_wait(rabbitmq_server: RabbitMQServer, vhost: str) -> None:
    async def main() -> None:
        url = rabbitmq_server.url_of(vhost)
        declared = {"concurrency": 1, "retry": MANY_RETRIES}
        desk = Desk(url, lambda n: n == 0 and not alarmed_over.is_set(), pause_s=0.2, declared=declared)
        async with desk.open():
            await desk.publish(range(30))
            await until(lambda: len(desk.tried) > 1, "events run")
            await asyncio.to_thread(rabbitmq_server.alarm, on=True)
            try:
                before = len(desk.done)
                await until(lambda: len(desk.done) >= before + 5, "events are handled during the alarm")
            finally:
                alarmed_over.set()
                await asyncio.to_thread(rabbitmq_server.alarm, on=False)
            await until(lambda: set(desk.done) == set(range(30)), "all events are handled")
            assert not await desk.records()

    alarmed_over = asyncio.Event()
    asyncio.run(main())


class AlarmedDesk(Desk):
    """The first event fails for good, when `alarmed` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url, lambda n: n == 0, declared={"concurrency": 1, "retry": Retry(attempts=1)})
        self.alarmed = asyncio.Event()

    async def handle(self, n: int) -> None:
        if n == 0:
            await self.alarmed.wait()


def test_under_a_memory_alarm_a_dead_letter_waits_and_other_events_do_not(
    rabbitmq_server: RabbitMQServer, vhost: str
) -> None:
    async def main() -> None:
        desk = AlarmedDesk(rabbitmq_server.url_of(vhost))
        async with desk.open():
            await desk.publish(range(60))
            await until(lambda: bool(desk.tried), "the first event runs")
            await asyncio.to_thread(rabbitmq_server.alarm, on=True)
            try:
                desk.alarmed.set()
                await until(lambda: set(desk.done) == set(range(1, 60)), "the other events are handled")
            finally:
                await asyncio.to_thread(rabbitmq_server.alarm, on=False)
            await eventually(lambda: desk.has_dead(1), "the dead letter is stored")
            await eventually(lambda: is_empty(rabbitmq_server.url_of(vhost)), "all events are settled")
            assert len(desk.tried) == 60

    asyncio.run(main())


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_an_unreachable_server_is_a_trouble_until_it_is_back(
    rabbitmq_server: RabbitMQServer, vhost: str, ordering: Ordering
) -> None:
    """A member that is not consuming never looks healthy, and the trouble says why it is not connected."""

    async def main() -> None:
        with rabbitmq_server.proxy() as proxy:
            async with Onward(rabbitmq_server.url_of(vhost)) as other:
                await publish(other, [0])
                app = Onward(rabbitmq_server.url_of(vhost, proxy.url), lease_s=2.0)
                async with app:
                    member = await app.broker.subscribe(
                        ["orders"], group="billing", member="a", ordering=ordering, start="latest"
                    )
                    await eventually(lambda: _receives(member, Assigned), "it is assigned")
                    assert not member.troubles()
                    await asyncio.to_thread(proxy.cut)
                    await until(lambda: member.sure_until() == 0.0, "the loss is noticed")
                    await eventually(lambda: _receives(member, Fenced), "it is fenced")
                    await until(lambda: "cannot be reached" in " ".join(member.troubles()), "the trouble says why")
                    await asyncio.to_thread(proxy.mend)
                    await eventually(lambda: _receives(member, Assigned), "it is assigned again")
                    await until(lambda: not member.troubles(), "the trouble has ended")

    asyncio.run(main())


async def _receives(member: Subscription, kind: type[Message]) -> bool:
    return any(type(each) is kind for each in await member.receive(10, 1 << 20, 0.5))


CONSUME = """
import asyncio, resource, sys
from onward import Onward, Retry
url, count = sys.argv[1], int(sys.argv[2])
app = Onward(url)
done = 0

@app.handler("orders", group="billing", ordering="none", start="latest")
async def bill(order: dict[str, int]) -> None:
    global done
    done += 1
    if done == count:
        app.stop()

asyncio.run(app.run())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_backlog(rabbitmq_server: RabbitMQServer) -> None:
    async def peak(count: int) -> int:
        with rabbitmq_server.vhost() as vhost:
            url = rabbitmq_server.url_of(vhost)
            async with Desk(url).open():
                pass
            await publish_all(url, count)
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CONSUME, url, str(count), stdout=asyncio.subprocess.PIPE
            )
            out, _ = await child.communicate()
            return int(out.split()[-1])

    async def main() -> None:
        few = await peak(1_000)
        many = await peak(100_000)
        assert many <= 1.2 * few, f"{few} kB with 1,000 ready events, {many} kB with 100,000"

    asyncio.run(main())
