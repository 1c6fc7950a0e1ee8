"""Applications with ordering="none" on work queues: failures, replays, types, tiers, and events that kill a process."""

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import aio_pika
import pytest

from onward import Event, Onward, Retry
from onward.brokers.base import Filter, State
from onward.brokers.rabbitmq.amqp import Connection
from onward.context import current
from onward.errors import BadSetting, BrokerError
from onward.event import Partition
from onward.testing import Process
from onward.testing.failure_shop import eventually, until
from onward.testing.scenario import whole_lines
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

RETRY = Retry(attempts=3, first_delay_s=0.2, factor=2, jitter=0)
QUEUE = "onward.orders:billing:work"
SUSPECTS = "onward.orders:billing:suspects"


@pytest.fixture
def url(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    with rabbitmq_server.vhost() as vhost:
        yield rabbitmq_server.url_of(vhost)


class Desk:
    """An application with one handler. `tried`: number, attempt and time of each call. `done`: the handled events."""

    def __init__(
        self,
        url: str,
        fails: Callable[[int], bool] = lambda n: False,
        group: str = "billing",
        *,
        declared: dict[str, Any] | None = None,
        pause_s: float = 0.0,
        **settings: Any,
    ) -> None:
        self.app = Onward(url, **({"drain_timeout_s": 5.0} | settings))
        self.tried: list[tuple[int, int, float]] = []
        self.done: list[int] = []
        self.types: list[str] = []
        self.pause_s = pause_s
        options: dict[str, Any] = {"ordering": "none", "start": "latest", "retry": RETRY} | (declared or {})

        @self.app.handler("orders", group=group, **options)
        async def bill(order: dict[str, int], event: Event) -> None:
            n = order["n"]
            self.tried.append((n, current().attempt, time.monotonic()))
            await self.handle(n)
            if fails(n):
                raise ValueError(f"no stock for {n}")
            self.done.append(n)
            self.types.append(event.type)

    async def handle(self, n: int) -> None:
        await asyncio.sleep(self.pause_s)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Desk"]:
        """Run the application until the end of the block."""
        async with self.app:
            before = await members(self.app)
            running = asyncio.create_task(self.app.run())
            try:
                await eventually(lambda: has_joined(self.app, before), "it has joined")
                yield self
            finally:
                self.app.stop()
                await running

    async def publish(self, numbers: Sequence[int], type_: str = "") -> None:
        await publish(self.app, numbers, type_)

    async def records(self, *states: State) -> list[Any]:
        where = Filter(states=frozenset(states or State))
        return list((await self.app.broker.aside("billing").scan(where, None, 1_000)).records)

    async def has_dead(self, count: int) -> bool:
        return len(await self.records(State.DEAD)) == count


class HeldDesk(Desk):
    """Its calls never end, and a stop does not wait for them."""

    def __init__(self, url: str) -> None:
        super().__init__(url, declared={"concurrency": 2}, drain_timeout_s=0.2)

    async def handle(self, n: int) -> None:
        await asyncio.Event().wait()


async def publish(app: Onward, numbers: Sequence[int], type_: str = "") -> None:
    for n in numbers if type_ else ():
        await app.publish("orders", {"n": n}, key=f"key-{n % 3}", type=type_)
    if not type_:
        await app.publish_many("orders", [(f"key-{n % 3}", {"n": n}) for n in numbers])


async def members(app: Onward) -> set[str]:
    found = [await app.broker.owners("orders", group) for group in ("billing", "shipping")]
    return {member.name for each in found for member in each}


async def has_joined(app: Onward, before: set[str]) -> bool:
    """Whether there is a member that is not in `before`."""
    return bool(await members(app) - before)


# -- failures and replays ---------------------------------------------------------------------------------------------


def test_an_event_that_always_fails_is_retried_and_becomes_a_dead_letter(url: str) -> None:
    async def main() -> None:
        before = time.time()
        async with Desk(url, lambda n: n == 3).open() as desk:
            await desk.publish(range(10))
            await eventually(lambda: desk.has_dead(1), "the event is a dead letter")
            (letter,) = await desk.records()
        assert sorted(desk.done) == [n for n in range(10) if n != 3]
        attempts = {attempt: at for n, attempt, at in desk.tried if n == 3}
        assert list(attempts) == [1, 2, 3]
        assert attempts[2] - attempts[1] >= 0.15
        assert attempts[3] - attempts[2] >= 0.35
        assert attempts[3] - attempts[1] < 3.0, "it waited much longer than its rungs"
        assert (letter.state, letter.event.key, letter.tries.failed) == (State.DEAD, "key-0", 3)
        failure = letter.failure
        assert (failure.reason, failure.attempts, failure.message) == ("exhausted", 3, "no stock for 3")
        assert before <= failure.first <= failure.last - 0.5, "the time of the first failure is kept over its retries"

    asyncio.run(main())


def test_members_share_events_and_count_the_attempts_of_each_together(url: str) -> None:
    async def main() -> None:
        one, two = (Desk(url, lambda n: n % 10 == 0) for _ in range(2))
        async with one.open(), two.open():
            await one.publish(range(200))
            await eventually(lambda: one.has_dead(20), "20 events are dead letters")
        assert sorted(one.done + two.done) == [n for n in range(200) if n % 10]
        assert one.done
        assert two.done
        for n in range(0, 200, 10):
            assert sorted(attempt for each, attempt, _ in one.tried + two.tried if each == n) == [1, 2, 3]

    asyncio.run(main())


def test_a_replay_runs_again_in_its_group_only(url: str) -> None:
    async def main() -> None:
        broken = {1, 2}
        desk, other = Desk(url, lambda n: n in broken), Desk(url, group="shipping")
        async with desk.open(), other.open():
            await desk.publish(range(3))
            await eventually(lambda: desk.has_dead(2), "two events are dead letters")
            broken.clear()
            tried = len(desk.tried)
            replayed = await desk.app.dead.replay()
            assert (replayed.replayed, replayed.failed, replayed.left) == (2, 0, 0)
            await until(lambda: sorted(desk.done) == [0, 1, 2], "all events are handled")
            await eventually(lambda: desk.has_dead(0), "their records are removed")
        assert sorted((n, attempt) for n, attempt, _ in desk.tried[tried:]) == [(1, 1), (2, 1)]
        assert sorted(other.done) == [0, 1, 2]

    asyncio.run(main())


def test_the_next_member_handles_the_events_and_retries_of_a_stopped_one(url: str) -> None:
    async def main() -> None:
        first, second = Desk(url, lambda n: n < 5), Desk(url)
        async with first.open():
            await first.publish(range(20))
            await until(lambda: len(first.tried) >= 20, "each event was tried")
        async with second.open():
            await until(lambda: len(second.done) == 5, "the retries are handled")
            assert not await second.records()
        assert sorted(first.done + second.done) == list(range(20))
        assert {attempt for _, attempt, _ in second.tried} <= {2, 3}

    asyncio.run(main())


def test_stopping_again_and_again_charges_nothing(url: str) -> None:
    """Each stop returns the events that were delivered and did not run. None of them becomes a suspect by that."""

    async def main() -> None:
        for turn in range(4):
            held = HeldDesk(url)
            async with held.open():
                if turn == 0:
                    await held.publish(range(50))
                await until(lambda: len(held.tried) == 2, "two events run")  # noqa: B023
        async with Desk(url).open() as desk:
            await until(lambda: sorted(desk.done) == list(range(50)), "all events are handled")
            assert {attempt for _, attempt, _ in desk.tried} == {1}
            assert not await desk.records()

    asyncio.run(main())


async def queue_state(url: str, queue: str) -> int:
    """How many messages are ready in the queue."""
    place = urlsplit(url)
    connection = await Connection.open(place.hostname or "", place.port or 0, vhost=place.path[1:])
    try:
        return (await (await connection.channel()).declare_queue(queue, passive=True)).messages
    finally:
        await connection.close()


# -- crashes ----------------------------------------------------------------------------------------------------------

WORKER = """
import asyncio, json, os, sys
from onward import Onward

url, count, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
app = Onward(url, lease_s=1.0)

@app.handler("orders", group="billing", ordering="none", start="latest", timeout_s=30.0)
async def bill(order: dict[str, int]) -> None:
    n = order["n"]
    if n in POISON:
        os._exit(9)
    if n >= count:
        await asyncio.Event().wait()
    await asyncio.sleep(PAUSE_S)
    with open(path, "a") as file:
        file.write(f"{n}\\n")
    print(json.dumps({"done": n}), flush=True)

asyncio.run(app.run())
"""


def worker_source(poison: set[int], pause_s: float = 0.0) -> str:
    return WORKER.replace("POISON", repr(poison)).replace("PAUSE_S", repr(pause_s))


def test_a_crash_of_a_member_loses_no_event(url: str, tmp_path: Path) -> None:
    """It is killed while it runs some events, has read others, and has not settled all events that are done."""

    async def main() -> None:
        child = Process(["-c", worker_source(set()), url, "30", str(tmp_path / "done")])
        try:
            async with Onward(url) as publisher:
                await eventually(lambda: has_joined(publisher, set()), "it has joined")
                await publish(publisher, range(60))
                done = [(await child.line())["done"] for _ in range(30)]
            child.kill()
            assert sorted(done) == list(range(30))
            async with Desk(url).open() as desk:
                await until(lambda: set(desk.done) >= set(range(30, 60)), "the events that it ran are handled")
                assert not await desk.records()
        finally:
            child.end()

    asyncio.run(main())


def test_an_event_that_kills_its_process_becomes_a_dead_letter_and_no_other_event_does(
    url: str, tmp_path: Path
) -> None:
    """A supervisor starts the process again each time. It runs alone in three processes, which is crash_limit."""
    poison, count = 7, 40

    async def main() -> None:
        async with Onward(url) as publisher, supervised(url, tmp_path / "done", poison) as deaths:
            await eventually(lambda: has_joined(publisher, set()), "it has joined")
            await publish(publisher, range(count))
            await until(lambda: len(lines(tmp_path / "done")) == count - 1, "all others are handled", 100.0)
            await eventually(lambda: has_letter(publisher), "it is a dead letter")
            (letter,) = await letters(publisher)
        assert (json.loads(letter.event.value), letter.failure.reason) == ({"n": poison}, "crashed")
        assert letter.tries.crashes == 3
        assert lines(tmp_path / "done") == set(range(count)) - {poison}
        assert len(deaths) == 5, "two deaths among others, three alone"

    asyncio.run(main())


@contextlib.asynccontextmanager
async def supervised(url: str, done: Path, poison: int) -> AsyncIterator[list[int]]:
    """A process that is started again whenever it dies. Yields the exit codes."""
    deaths: list[int] = []

    async def run() -> None:
        while True:
            arguments = ["-c", worker_source({poison}, 0.01), url, "1000000", str(done)]
            child = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.DEVNULL)
            try:
                deaths.append(await child.wait())
            except asyncio.CancelledError:
                child.kill()
                await child.wait()
                raise

    supervisor = asyncio.create_task(run())
    try:
        yield deaths
    finally:
        supervisor.cancel()
        await asyncio.wait([supervisor])


def lines(path: Path) -> set[int]:
    return set(map(int, whole_lines(path)))


async def letters(app: Onward) -> list[Any]:
    return list((await app.broker.aside("billing").scan(Filter(), None, 100)).records)


async def has_letter(app: Onward) -> bool:
    return bool(await letters(app))


def test_cut_connections_charge_nothing(url: str, rabbitmq_server: RabbitMQServer) -> None:
    """After two cuts the events are suspects and run alone, and the connections are cut while they do."""
    vhost = url.rsplit("/", 1)[1]

    async def main() -> None:
        with rabbitmq_server.proxy() as proxy:
            desk = Desk(rabbitmq_server.url_of(vhost, proxy.url), pause_s=0.3, lease_s=2.0)
            async with desk.open():
                await desk.publish(range(10))
                before = 0
                for _ in range(6):
                    await until(lambda: len(desk.tried) > before, "events run")  # noqa: B023
                    before = len(desk.tried)
                    await asyncio.to_thread(proxy.cut)
                    await asyncio.to_thread(proxy.mend)
                await until(lambda: set(desk.done) == set(range(10)), "all events are handled")
                await eventually(lambda: is_empty(url), "all events are settled")
                assert not await letters(desk.app)
        assert {attempt for _, attempt, _ in desk.tried} == {1}
        assert len(desk.tried) > 20, "the cuts were in the middle of runs"

    asyncio.run(main())


async def is_empty(url: str) -> bool:
    counts = [await queue_state(url, name) for name in (QUEUE, SUSPECTS)]
    return counts == [0, 0]


# -- types and tiers --------------------------------------------------------------------------------------------------


def test_a_handler_with_types_gets_only_those(url: str) -> None:
    async def main() -> None:
        desk = Desk(url, declared={"types": ["order.placed", "notification.*"]})
        async with desk.open():
            for type_ in (
                "order.placed",
                "order.paid",
                "notification.slack.critical",
                "notificationx",
                "notification.",
            ):
                await desk.publish([1], type_)
            await until(lambda: len(desk.done) == 3, "three events are handled")
            await asyncio.sleep(0.3)
            assert sorted(desk.types) == ["notification.", "notification.slack.critical", "order.placed"]
            assert await queue_state(url, QUEUE) == 0

    asyncio.run(main())


def test_the_routing_key_is_the_type_of_a_message_that_has_none(url: str) -> None:
    """Another program publishes to the exchange of the topic. A type that it gives counts, not the routing key."""

    async def main() -> None:
        retry = Retry(attempts=2, first_delay_s=5, jitter=0)  # long enough to wait on a rung
        broken = {1}
        desk = Desk(url, lambda n: n in broken, declared={"types": ["order.*"], "retry": retry})
        async with desk.open():
            async with await aio_pika.connect(url) as connection:
                exchange = await (await connection.channel()).get_exchange("onward.orders")
                await exchange.publish(aio_pika.Message(b'{"n": 1}'), "order.a")
                await exchange.publish(aio_pika.Message(b'{"n": 2}', type="OrderPlaced"), "order.b")
                await exchange.publish(aio_pika.Message(b'{"n": 3}', type="order.c"), "order.d")
            await eventually(lambda: desk.has_dead(1), "the event is a dead letter")
            assert [(n, attempt) for n, attempt, _ in desk.tried if n == 1] == [(1, 1), (1, 2)]
            broken.clear()
            await desk.app.dead.replay()
            await until(lambda: len(desk.done) == 2, "the replay is handled")
            assert dict(zip(desk.done, desk.types, strict=True)) == {1: "order.a", 3: "order.c"}
            assert await queue_state(url, QUEUE) == 0

    asyncio.run(main())


def test_other_types_do_not_enter_the_queue_and_new_types_replace_the_old(url: str) -> None:
    async def main() -> None:
        first = Desk(url, declared={"types": ["a.*"]})
        async with first.open():
            pass
        async with Onward(url) as app:
            await publish(app, range(5), "b.x")
            await publish(app, range(3), "a.x")
        assert await queue_state(url, QUEUE) == 3
        second = Desk(url, declared={"types": ["b.*"]})
        async with second.open():
            await until(lambda: not second.done, "events of the old type are filtered")
        async with Onward(url) as app:
            await publish(app, range(5), "a.x")
            await publish(app, range(2), "b.x")
        assert await queue_state(url, QUEUE) == 2, "the old binding is gone, the new one is there"

    asyncio.run(main())


def test_tiers_are_one_queue_each_and_urgent_events_overtake_others(url: str) -> None:
    tiers = {"critical": "*.critical", "bulk": "stats.*"}

    async def main() -> None:
        async with Desk(url, declared={"tiers": tiers}).open():
            pass
        async with Onward(url) as app:
            await app.publish_many("orders", [(None, {"n": 0}) for _ in range(40)], type="stats.daily")
            await app.publish_many("orders", [(None, {"n": 1}) for _ in range(40)], type="order.placed")
            await app.publish_many("orders", [(None, {"n": 2}) for _ in range(40)], type="order.critical")
        counts = [await queue_state(url, f"{QUEUE}{tier}") for tier in (".bulk", "", ".critical")]
        assert counts == [40, 40, 40], "each event is in one queue"
        desk = Desk(url, declared={"tiers": tiers, "concurrency": 1}, receive_batch=12, pause_s=0.005)
        async with desk.open():
            await until(lambda: len(desk.done) == 120, "all events are handled")
        early = Counter(desk.done[:60])
        assert early[2] >= 30, "critical events come first"
        assert early[1] > early[0] >= 1, "no tier starves"

    asyncio.run(main())


def test_a_group_can_get_tiers_and_lose_them_again(url: str) -> None:
    async def main() -> None:
        numbers = iter(range(1_000))
        handled: list[int] = []
        for tiers in ({}, {"critical": "a.*"}, {"critical": "b.*", "bulk": "a.*"}, {}):
            desk = Desk(url, declared={"tiers": tiers} if tiers else {})
            async with desk.open():
                for type_ in ("a.x", "b.x", "c"):
                    await desk.publish([next(numbers)], type_)
                await until(lambda: len(desk.done) >= 3, "all events are handled")  # noqa: B023
            handled += desk.done
            async with Onward(url) as app:  # while no member is there
                for type_ in ("a.x", "b.x"):
                    await publish(app, [next(numbers)], type_)
        last = Desk(url)
        async with last.open():
            expected = next(numbers)
            await until(lambda: len(set(handled + last.done)) == expected, "events of former tiers are handled too")
        assert sorted(handled + last.done) == list(range(expected))

    asyncio.run(main())


def test_a_member_of_a_work_group_has_nothing_to_own(
    url: str, rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Desk(url).open():
            await asyncio.to_thread(rabbitmq_server.close_connections, url.rsplit("/", 1)[1])
            await until(lambda: "no longer receives events of orders" in caplog.text, "the loss is logged")
        assert "no longer owns" not in caplog.text

    asyncio.run(main())


# -- leaving ----------------------------------------------------------------------------------------------------------


def test_a_member_that_has_left_is_no_trouble(url: str) -> None:
    """Readiness would warn about each stop that waits for another handler."""

    async def main() -> None:
        async with Onward(url) as app:
            subscription = await app.broker.subscribe(
                ["orders"], group="billing", member="m-1", ordering="none", start="latest"
            )
            while not await subscription.receive(1, 1 << 20, 1.0):
                pass
            await subscription.release([Partition("orders", 0)], drained=True)
            for _ in range(20):
                assert not subscription.troubles()
                await asyncio.sleep(0.02)

    asyncio.run(main())


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_handler_without_a_time_limit_is_refused(url: str) -> None:
    async def main() -> None:
        with pytest.raises(BadSetting, match="consumer_timeout"):
            async with Desk(url, declared={"timeout_s": None}).app as app:
                await app.run()

    asyncio.run(main())


def test_a_start_in_the_past_is_refused(url: str) -> None:
    async def main() -> None:
        with pytest.raises(BadSetting, match="has no history"):
            async with Desk(url, declared={"start": 1_700_000_000.0}).app as app:
                await app.run()

    asyncio.run(main())


def test_a_group_keeps_its_kind(url: str) -> None:
    async def main() -> None:
        async with Desk(url).open():
            pass
        with pytest.raises(BrokerError, match="without order"):
            async with Desk(url, declared={"ordering": "key"}).app as app:
                await app.run()

    asyncio.run(main())


def test_a_member_of_the_wrong_kind_creates_nothing(
    rabbitmq_server: RabbitMQServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its queues would stay, because `onward groups drop` knows only those of the group's own kind."""
    vhost = unquote(urlsplit(url).path[1:])

    async def main() -> None:
        async with Desk(url, declared={"ordering": "key"}).open():
            pass
        before = await asyncio.to_thread(rabbitmq_server.queues, vhost)
        with pytest.raises(BrokerError, match="with order"):
            async with Desk(url).app as app:
                await app.run()
        assert set(await asyncio.to_thread(rabbitmq_server.queues, vhost)) == set(before)
        assert "was missing" not in caplog.text

    asyncio.run(main())
