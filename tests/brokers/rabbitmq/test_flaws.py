"""Flaws of the seed's design, and traps of ours, that no other file tests.

`test_trap_table.py` says where each of them is tested."""

import asyncio
import contextlib
import copy
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import quote

import pytest

from onward import Onward, RetryLater
from onward.brokers.base import Fenced, Filter
from onward.brokers.rabbitmq import Binding, Exchange, Queue, ground, names
from onward.brokers.rabbitmq.amqp import Channel, ChannelClosed, Outbound, PublishAnswer, Received
from onward.brokers.rabbitmq.connecting import pauses
from onward.brokers.rabbitmq.ordered.token_channel import TokenChannel
from onward.brokers.rabbitmq.server_errors import is_missing, is_passing
from onward.brokers.rabbitmq.work import retrying
from onward.clock import now
from onward.errors import OnwardError, PublishError
from onward.testing.failure_shop import eventually, until
from onward.testing.scenario import Member
from onward.testing.shared_members import dead, set_aside
from tests.brokers.rabbitmq.fault_shop import GROUP, TOPIC, FaultShop
from tests.brokers.rabbitmq.harness import NOWHERE, RabbitHarness, harness
from tests.brokers.rabbitmq.stage import played
from tests.brokers.rabbitmq.test_seat import QUEUE as TOKENS
from tests.brokers.rabbitmq.test_seat import queue, settled
from tests.brokers.rabbitmq.test_work_app import QUEUE, Desk, publish, queue_state
from tests.brokers.rabbitmq.token_stage import LEASE_S, brokers, connected, event, joined

__all__ = ["harness"]

pytestmark = pytest.mark.servers


# -- work queues ------------------------------------------------------------------------------------------------------


@played
async def test_a_short_retry_does_not_wait_behind_a_long_one(
    harness: RabbitHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ expires messages only at the head of a queue, so each queue has one time for all its messages."""
    monkeypatch.setattr(retrying, "_YOUNG_S", 0.0)
    app, tried, done = Onward(harness.url, drain_timeout_s=5.0), set[int](), list[int]()

    @app.handler(TOPIC, group=GROUP, ordering="none", start="latest")
    async def bill(order: dict[str, int]) -> None:
        n = order["n"]
        if n in (0, 1) and n not in tried:
            tried.add(n)
            raise RetryLater(64.0 if n == 0 else 1.0)
        done.append(n)

    async def waits() -> bool:
        return await queue_state(harness.url, f"{QUEUE}.rung.64000") == 1

    async with app.running():
        await publish(app, [0])
        await eventually(lambda: _exists(harness, f"{QUEUE}.rung.64000"), "the long rung is declared")
        await eventually(waits, "the long retry is in its rung")
        await publish(app, range(1, 10))
        await until(lambda: sorted(done) == list(range(1, 10)), "the short retry is handled", 15.0)
        assert await waits()


async def _exists(harness: RabbitHarness, name: str) -> bool:
    return name in await asyncio.to_thread(harness.server.queues, harness.vhost)


class BusyDesk(Desk):
    """Its calls never end."""

    async def handle(self, n: int) -> None:
        await asyncio.Event().wait()


@played
async def test_a_member_gets_twice_as_many_events_as_it_runs_at_once(harness: RabbitHarness) -> None:
    """With as many as it runs, each call waits for the network. With all of them, a crash returns all."""
    desk = BusyDesk(harness.url, declared={"concurrency": 30}, drain_timeout_s=0.2)
    async with desk.open():
        await desk.publish(range(200))
        await until(lambda: len(desk.tried) == 30, "30 events run")
        await eventually(lambda: _has_ready(harness, 140), "60 events are delivered")
        await desk.publish([200])
        await eventually(lambda: _has_ready(harness, 141), "no more events are delivered")


async def _has_ready(harness: RabbitHarness, count: int) -> bool:
    return await queue_state(harness.url, QUEUE) == count


@played
async def test_a_dropped_group_loses_its_rungs_before_its_queue(
    harness: RabbitHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rung whose queue is gone keeps its messages, and sends them to the next queue of this name minutes later."""
    deleted: list[str] = []
    delete_queue = Channel.delete_queue

    async def noting(channel: Channel, name: str) -> Any:
        deleted.append(name)
        return await delete_queue(channel, name)

    async with Desk(harness.url).open():
        pass
    async with Onward(harness.url) as app:
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "delete_queue", noting)
            await app.broker.drop_group(TOPIC, GROUP)
    rungs = [at for at, name in enumerate(deleted) if ".rung." in name]
    assert rungs
    assert max(rungs) < deleted.index(QUEUE)


@played
async def test_two_members_keep_their_dead_letters_apart(harness: RabbitHarness) -> None:
    """Each of them counts its positions from 1."""
    async with brokers(harness) as opened:
        first, second = [await joined(await opened(), ordering="none", start="latest") for _ in range(2)]
        broker = await opened()
        while not first.deliveries or not second.deliveries:
            await broker.publish([event("orders", 0)])
            await asyncio.gather(first.receive(wait_s=0.01), second.receive(wait_s=0.01))
        letters = [dead(each.deliveries[0]) for each in (first, second)]
        assert [each.position for each in letters] == [1, 1]
        for member, letter in zip((first, second), letters, strict=True):
            await set_aside(member, [letter])
        assert (await broker.aside("group").count(Filter())).records == 2


# -- exchanges and queues of the application --------------------------------------------------------------------------


@asynccontextmanager
async def shop(harness: RabbitHarness, *objects: object) -> AsyncIterator[Onward]:
    app = Onward(harness.url)
    app.topology(*objects)
    async with app:
        yield app


async def bodies(harness: RabbitHarness, queue: str, count: int) -> list[Any]:
    """Take so many messages from the queue, which has no more."""
    async with connected(harness) as connection:
        channel, found = await connection.channel(), list[Received]()
        await channel.consume(queue, found.extend)
        await until(lambda: len(found) >= count, f"{count} messages are in {queue}")
        await channel.qos(1)  # its answer comes after the deliveries
    return [json.loads(each.body) for each in found]


@played
async def test_a_full_queue_refuses_new_events_and_keeps_the_old_ones(harness: RabbitHarness) -> None:
    objects = [Exchange("stats"), Queue("totals", max_length=3), Binding("stats", "totals", "#")]
    accepted: list[int] = []
    async with shop(harness, *objects) as app:
        with contextlib.suppress(PublishError):
            while len(accepted) < 100:
                await app.publish("stats", len(accepted), type="total")
                accepted.append(len(accepted))
    assert 3 <= len(accepted) < 20, "a quorum queue notices a little late that it is full"
    assert await bodies(harness, "totals", len(accepted)) == accepted


@played
async def test_an_event_that_no_queue_takes_is_refused_or_goes_to_the_alternate_exchange(
    harness: RabbitHarness,
) -> None:
    bound = [Queue("slack"), Binding("notifications", "slack", "notification.slack.*")]
    strays = [Exchange("strays", "fanout"), Queue("strays"), Binding("strays", "strays")]
    async with shop(harness, Exchange("notifications", alternate="strays"), *bound, *strays) as app:
        await app.publish("notifications", 1, type="notification.slack.critical")
        await app.publish("notifications", 2, type="notification.fax.critical")
    assert await bodies(harness, "slack", 1) == [1]
    assert await bodies(harness, "strays", 1) == [2]


# -- replays ----------------------------------------------------------------------------------------------------------


LETTERS = {0, 5, 10, 15}


def fails_some(n: int) -> str:
    return "never" if n in LETTERS else "fine"


@pytest.mark.parametrize("kind", ["ordered", "work"])
@played
async def test_a_replay_that_the_server_refuses_loses_nothing_and_runs_once_when_it_can(
    harness: RabbitHarness, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with FaultShop(harness.url, kind, fails_some).open() as shop:
        await shop.publish(20)
        await shop.settled()
        shop.cured = True
        with caplog.at_level(logging.WARNING, "onward"):
            if kind == "ordered":
                with diverted(".aside."), pytest.raises(OnwardError, match="NO_ROUTE"):
                    await shop.app.dead.replay()
            else:
                with diverted(":work"):
                    assert (await shop.app.dead.replay()).replayed == 4
                    await until(lambda: "a dead letter cannot be replayed" in caplog.text, "the refusal is logged")
                    assert "NO_ROUTE" in caplog.text
                    assert len(await shop.records(GROUP)) == 4
        assert not shop.handled & LETTERS
        if kind == "ordered":
            assert await shop.letters() == LETTERS
            assert (await shop.app.dead.replay()).replayed == 4
        await until(lambda: shop.handled == set(range(20)), "the letters are handled")
        await eventually(lambda: _no_records(shop), "their records are removed")
    assert len(shop.runs) == 20, "an event ran twice"


@contextmanager
def diverted(part: str) -> Iterator[None]:
    """Messages to the work queue (":work"), or to queues with this in their names, are sent to a missing queue. The
    server returns them."""
    send = Channel.send

    def changed(each: Outbound) -> Outbound:
        name = each.routing_key
        is_meant = name.endswith(part) if part == ":work" else part in name
        return each._replace(routing_key=NOWHERE) if is_meant else each

    def diverting(channel: Channel, messages: Sequence[Outbound]) -> int:
        return send(channel, [changed(each) for each in messages])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "send", diverting)
        yield


async def _no_records(shop: FaultShop) -> bool:
    return not await shop.records(GROUP)


# -- tokens -----------------------------------------------------------------------------------------------------------


class DeafChannel(TokenChannel):
    """While `is_deaf`, it keeps what the server delivers in `unheard`. `confirmed`: how many messages the server has
    confirmed."""

    is_deaf = False
    confirmed = 0
    unheard: tuple[Received, ...] = ()

    def _arrived(self, messages: list[Received]) -> None:
        self.unheard += tuple(messages)
        if not self.is_deaf:
            self.hear()

    def hear(self) -> None:
        unheard, self.unheard, self.is_deaf = self.unheard, (), False
        super()._arrived(list(unheard))

    def _answered(self, answers: list[PublishAnswer]) -> None:
        self.confirmed += sum(each.last - each.first + 1 for each in answers if each.why is None)
        super()._answered(answers)


@played
async def test_a_token_that_is_confirmed_and_not_delivered_back_is_not_stored(harness: RabbitHarness) -> None:
    """The server also confirms the token of a former owner whose connection it has not closed yet."""
    async with queue(harness) as connection:
        desk = await DeafChannel.open(connection, TOKENS, tenure="me:1", lease_s=5.0)
        assert isinstance(desk, DeafChannel)
        newest = await desk.newest()
        assert newest is not None
        await desk.write(newest.claimed("me:1"))
        before, sure_until, desk.is_deaf = desk.confirmed, desk.sure_until, True
        writing = asyncio.ensure_future(desk.write(settled(desk, 9)))
        await until(lambda: desk.confirmed > before and bool(desk.unheard), "the token is confirmed, and delivered")
        assert not writing.done()
        assert (desk.held.watermark, desk.sure_until) == (0, sure_until)
        desk.hear()
        await writing
        assert desk.held.watermark == 9
        assert desk.sure_until > sure_until
        await desk.close()


@played
async def test_a_partition_that_is_renewed_does_not_speak_for_another(harness: RabbitHarness) -> None:
    """Each token queue has a leader of its own."""
    async with brokers(harness, partitions=2) as opened:
        member = await (await Member.join(await opened(), "orders", "group")).hold(2)
        silent, other = (names.token_queue("orders", index, "group") for index in (0, 1))
        renewed: list[str] = []
        send = Channel.send

        def dropping(channel: Channel, messages: Sequence[Outbound]) -> int:
            renewed.extend([each.routing_key for each in messages])
            return send(channel, [each for each in messages if each.routing_key != silent])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "send", dropping)
            last = now() + LEASE_S  # a token that is sent before this moment can come back
            while not any(isinstance(each, Fenced) for each in member.history):
                assert member.subscription.sure_until() <= last
                await member.receive(wait_s=0.02)
        assert renewed.count(other) >= 2
        await member.until(lambda: member.subscription.sure_until() > now())


@played
async def test_an_owner_that_is_cut_off_is_not_sure_any_more_when_the_next_one_begins(harness: RabbitHarness) -> None:
    """The server gives the token on at once. The owner does not learn that its connection has ended."""
    with harness.server.proxy() as proxy:
        through = copy.copy(harness)
        through.url = harness.server.url_of(harness.vhost, proxy.url)
        async with brokers(harness) as opened, brokers(through) as opened_through:
            owner = await joined(await opened_through())
            connections = await asyncio.to_thread(_connections, harness)
            await asyncio.to_thread(proxy.stall)
            for name in connections:
                await asyncio.to_thread(harness.server.ask, "DELETE", f"/api/connections/{quote(name)}")
            began, sure_until = now(), owner.subscription.sure_until()
            assert began < sure_until, "it knows of the loss"
            successor = await joined(await opened())
            assert now() > max(sure_until, owner.subscription.sure_until())
            assert now() > began + LEASE_S, "it did not wait for the lease of the owner"
            assert next(iter(successor.assigned.values())).unclean
            await asyncio.to_thread(proxy.mend)


def _connections(harness: RabbitHarness) -> list[str]:
    """The names of all connections, once the server lists that of the group's member."""
    deadline = time.monotonic() + 20
    while True:
        found = harness.server.ask("GET", f"/api/vhosts/{harness.vhost}/connections")
        if any(each.get("client_properties", {}).get("connection_name") == "onward group group" for each in found):
            return [each["name"] for each in found]
        assert time.monotonic() < deadline, "the server does not list the connection"
        time.sleep(0.05)


# -- streams ----------------------------------------------------------------------------------------------------------

SEGMENT = {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": 20_000}
REMOVED = "removed by retention before they were read"


async def fill(broker: Any, start: int, end: int) -> None:
    for first in range(start, end, 100):
        await broker.publish([event("orders", n) for n in range(first, first + 100)])


@played
async def test_a_group_reads_over_the_offsets_that_segments_leave_out(
    harness: RabbitHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ground, "stream_arguments", lambda _: SEGMENT)
    async with brokers(harness) as opened:
        broker = await opened()
        await fill(broker, 0, 1_000)
        member = await joined(broker)
        await member.take(1_000)
        await fill(broker, 1_000, 2_000)
        await member.take(2_000)
        assert member.values == list(range(2_000))
        assert member.deliveries[-1].position > 2_001, "no offset is left out, so the test tests nothing"
        assert not await member.settle()
        await member.release(list(member.assigned))
        again = await joined(broker)
        await fill(broker, 2_000, 2_100)
        await again.take(100)
        assert again.values == list(range(2_000, 2_100))
    assert REMOVED not in caplog.text


@played
async def test_events_that_were_removed_before_they_were_read_are_reported_and_the_others_are_handled(
    harness: RabbitHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ground, "stream_arguments", lambda _: {**SEGMENT, "x-max-length-bytes": 40_000})
    async with brokers(harness) as opened:
        broker = await opened()
        await fill(broker, 0, 100)
        member = await joined(broker)
        await member.take(100)
        assert not await member.settle()
        (before,) = member.assigned.values()
        await member.release(list(member.assigned))
        await member.subscription.close()
        await fill(broker, 100, 3_000)
        again = await joined(broker)
        await again.until(lambda: again.values[-1:] == [2_999])
        (after,) = again.assigned.values()
        assert again.values[0] > 100, "nothing was removed, so the test tests nothing"
        assert again.values == list(range(again.values[0], 3_000))
        assert (after.log_id, after.unclean) == (before.log_id, False)
        assert REMOVED in caplog.text


def test_pauses_grow_to_five_seconds_never_end_and_differ() -> None:
    """So that many clients do not connect at once after the server was away."""
    one, two = (list(itertools.islice(pauses(), 1_000)) for _ in range(2))
    assert max(one[:2]) <= 0.1
    assert all(2.5 <= each <= 5.0 for each in one[10:])
    assert not set(one) & set(two)


@pytest.mark.parametrize(
    ("text", "is_there"),
    [
        (
            "NOT_FOUND - home node 'rabbit@a' of durable queue 'q' in vhost '/' is down or inaccessible",
            True,
        ),
        ("NOT_FOUND - no queue 'q' in vhost '/'", False),
    ],
)
def test_a_stream_whose_node_is_down_is_not_missing(text: str, is_there: bool) -> None:
    error = ChannelClosed("closed", code=404, text=text)
    assert (is_passing(error), is_missing(error)) == (is_there, not is_there)
