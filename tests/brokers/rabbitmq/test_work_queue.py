"""Work queues: which messages are acknowledged together, what a message says when it arrives, and how it is sent on."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.brokers.base import Asks
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import (
    Channel,
    Connection,
    Properties,
    Received,
    encoded_properties,
    properties_of,
)
from onward.brokers.rabbitmq.work.ack_ledger import AckLedger
from onward.brokers.rabbitmq.work.prefetch import Prefetch
from onward.brokers.rabbitmq.work.retrying import RungDeck, WorkCourier, WorkParcel
from onward.brokers.rabbitmq.work.rungs import Retrying, headers_of
from onward.brokers.rabbitmq.work.work_message import SUSPECT_HEADER, Fate, arrived, is_special, resent
from onward.brokers.rabbitmq.work.work_place import SUSPECTS, WorkPlace, check_asks, place_of, rungs
from onward.brokers.rabbitmq.work.work_queue import (
    Acknowledger,
    TierConsumers,
    WorkBuffers,
    WorkChannel,
    tier_of_message,
)
from onward.errors import BadSetting
from onward.event import Partition, Tries
from tests.servers.rabbitmq import RabbitMQServer

# -- acknowledgements ------------------------------------------------------------------------------------------------


class UnackedQueue:
    """The unacknowledged deliveries of a channel, as the server has them: it closes the channel for an unknown tag."""

    def __init__(self, count: int) -> None:
        self.tags = list(range(1, count + 1))

    def ack(self, tag: int, *, multiple: bool) -> None:
        assert tag in self.tags, f"unknown delivery tag {tag}"
        self.tags = [each for each in self.tags if (each > tag if multiple else each != tag)]


STEPS = st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 40), max_size=30)), max_size=12)


@given(STEPS)
def test_exactly_what_is_done_is_acknowledged(steps: list[tuple[bool, list[int]]]) -> None:
    """Some tags are done, others are given back, in any order and also twice."""
    ledger, server = AckLedger(), UnackedQueue(40)
    gone: set[int] = set()
    for is_done, tags in steps:
        if is_done:
            plan = ledger.finish(tags)
            if plan.up_to:
                server.ack(plan.up_to, multiple=True)
            for tag in plan.singles:
                server.ack(tag, multiple=False)
        else:
            fresh = set(tags) - gone
            server.tags = [each for each in server.tags if each not in fresh]
            ledger.forget(fresh)
        gone |= set(tags)
        assert server.tags == [tag for tag in range(1, 41) if tag not in gone]
        assert ledger.floor == min(set(range(1, 42)) - gone)


def test_everything_below_the_lowest_open_tag_is_one_acknowledgement() -> None:
    ledger = AckLedger()
    assert ledger.finish(range(1, 1_001)) == (1_000, [])
    assert ledger.finish([1_003, 1_005]) == (0, [1_003, 1_005])
    assert ledger.finish([1_001, 1_002, 1_004]) == (1_004, [])
    assert ledger.finish([1_005, 7]) == (0, [])


# -- prefetch --------------------------------------------------------------------------------------------------------


def test_the_prefetch_follows_from_the_concurrency() -> None:
    prefetch = Prefetch(50, 58, max_in_flight=1_000, max_bytes=32 << 20)
    assert prefetch.count == 20, "the size of messages is unknown"
    prefetch.received(10, 2_000)
    assert prefetch.count == 100


def test_a_fast_handler_gets_a_larger_prefetch_and_a_slow_one_a_smaller_one_again() -> None:
    prefetch = Prefetch(50, 58, max_in_flight=1_000, max_bytes=32 << 20)
    prefetch.received(10, 2_000)
    for step in range(10):
        prefetch.settled(prefetch.count, step * 0.05)
    assert prefetch.count == 4_000
    for step in range(40):
        prefetch.settled(3, 10.0 + step)
    assert prefetch.count == 100


def test_large_messages_make_the_prefetch_small_at_once() -> None:
    prefetch = Prefetch(None, 1, max_in_flight=1_000, max_bytes=32 << 20)
    prefetch.received(100, 20_000)
    assert prefetch.count == 1_000
    prefetch.received(1, 16 << 20)
    assert prefetch.count == 2
    assert prefetch.differs(1_000)


def test_the_prefetch_stays_small_after_messages_came_back() -> None:
    prefetch = Prefetch(10, 58, max_in_flight=1_000, max_bytes=32 << 20)
    prefetch.received(10, 2_000)
    prefetch.came_back(0.0)
    prefetch.settled(20, 1.0)
    assert prefetch.count == 20
    prefetch.settled(20, 11.0)
    assert prefetch.count == 80


def test_messages_that_we_gave_back_ourselves_do_not_make_the_prefetch_small() -> None:
    prefetch = Prefetch(10, 58, max_in_flight=1_000, max_bytes=32 << 20)
    prefetch.received(10, 2_000)
    prefetch.settled(20, 0.0)
    prefetch.gave_back(2, 1.0)
    for _ in range(2):
        prefetch.came_back(2.0)
    assert prefetch.count == 80
    prefetch.came_back(2.0)
    assert prefetch.count == 20, "one more came back than we gave back"


def test_messages_that_we_gave_back_are_expected_for_a_limited_time() -> None:
    prefetch = Prefetch(10, 58, max_in_flight=1_000, max_bytes=32 << 20)
    prefetch.received(10, 2_000)
    prefetch.settled(20, 0.0)
    prefetch.gave_back(2, 1.0)
    prefetch.came_back(60.0)
    assert prefetch.count == 20


def test_calls_that_may_take_long_leave_no_message_waiting_for_too_long() -> None:
    """consumer_timeout counts from the delivery, not from the start of the call."""
    prefetch = Prefetch(2, 1, max_in_flight=1_000, max_bytes=32 << 20)
    prefetch.received(1, 100)
    assert prefetch.count == 2


@pytest.mark.parametrize("timeout_s", [None, 1_501.0, 7_200.0])
def test_a_call_that_may_take_longer_than_consumer_timeout_is_refused(timeout_s: float | None) -> None:
    place = place_of("orders", "billing", None, None, None)
    with pytest.raises(BadSetting, match=r"consumer_timeout.* 1800 s"):
        check_asks(Asks(timeout_s=timeout_s), place)
    check_asks(Asks(timeout_s=1_500.0), place)
    check_asks(None, place)


# -- messages --------------------------------------------------------------------------------------------------------


def message(
    headers: dict[str, Any] | None = None, *, redelivered: bool = False, tag: int = 1, **properties: Any
) -> Received:
    raw = encoded_properties(Properties(headers=headers, **properties))
    return Received(tag, redelivered, "onward.orders", "0.Placed", raw, b"{}", "normal-1")


def test_a_first_delivery_needs_no_reading_of_headers() -> None:
    assert not is_special(message({"onward-key": "a", "x-delivery-count": 0}))
    assert is_special(message(redelivered=True))
    assert is_special(message(headers_of(Retrying(Tries(failed=1)))))


def test_a_message_that_came_back_once_is_handed_out_and_one_that_came_back_twice_is_a_suspect() -> None:
    once, twice = (message({"x-delivery-count": count}, redelivered=True) for count in (1, 2))
    assert arrived(once).fate(0.0, is_counted=True) is Fate.HAND_OUT
    assert arrived(twice).fate(0.0, is_counted=True) is Fate.SUSPECT


def test_a_classic_queue_does_not_count_so_one_return_makes_a_suspect() -> None:
    assert arrived(message(redelivered=True)).fate(0.0, is_counted=False) is Fate.SUSPECT


def test_a_retry_that_is_not_due_waits_on_and_one_that_had_crashed_is_a_suspect() -> None:
    early = message(headers_of(Retrying(Tries(failed=1), due=100.0, left_ms=50_000)))
    assert arrived(early).fate(60.0, is_counted=True) is Fate.WAIT
    assert arrived(early).fate(100.0, is_counted=True) is Fate.HAND_OUT
    crashed = message(headers_of(Retrying(Tries(failed=1, crashes=1))))
    assert arrived(crashed).fate(0.0, is_counted=True) is Fate.SUSPECT


def test_a_message_is_sent_again_with_all_that_belongs_to_it() -> None:
    sent = message(
        {
            "onward-key": "a",
            "mine": "x",
            "x-mine": 7,
            "CC": ["elsewhere"],
            "x-death": [{"count": 1}],
            "x-delivery-count": 3,
            "x-first-death-queue": "q",
            "onward-suspect": "old",
            **headers_of(Retrying(Tries(failed=1))),
        },
        correlation_id="c",
        reply_to="r",
        priority=5,
        expiration="60000",
        user_id="another-user",
        message_id="id",
        type="Placed",
        timestamp=12,
        app_id="shop",
    )
    found = properties_of(resent(sent, Retrying(Tries(failed=2)), id_="other", type_="other", suspect="new"))
    headers = found.headers or {}
    assert {name: headers[name] for name in ("onward-key", "mine", "x-mine")} == {
        "onward-key": "a",
        "mine": "x",
        "x-mine": 7,
    }
    assert headers["onward-tries"] == "2,0,0"
    assert headers[SUSPECT_HEADER] == "new"
    assert not {"CC", "x-death", "x-delivery-count", "x-first-death-queue"} & set(headers)
    kept = (found.correlation_id, found.reply_to, found.priority, found.message_id, found.type, found.app_id)
    assert kept == ("c", "r", 5, "id", "Placed", "shop")
    assert (found.delivery_mode, found.expiration, found.user_id) == (2, None, None)


def test_a_message_of_another_program_keeps_the_id_and_type_that_it_got() -> None:
    found = properties_of(resent(message(), None, id_="ours", type_="comparison.process"))
    assert (found.message_id, found.type) == ("ours", "comparison.process")


# -- buffers ---------------------------------------------------------------------------------------------------------


def test_a_suspect_is_taken_first_and_the_tiers_in_turns() -> None:
    buffers = WorkBuffers()
    for tier in ("bulk", "normal", "critical"):
        buffers.put(tier, [message(tag=n)._replace(consumer=f"{tier}-1") for n in range(100)])
    buffers.put(SUSPECTS, [message()._replace(consumer=f"{SUSPECTS}-1")])
    taken = buffers.take(121)
    assert tier_of_message(taken[0]) == SUSPECTS
    assert Counter(map(tier_of_message, taken[1:])) == {"critical": 80, "normal": 30, "bulk": 10}
    assert len(buffers) == 180
    assert len(buffers.clear(keep=5)) == 165


# -- on the server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def link(
    rabbitmq_server: RabbitMQServer,
) -> Iterator[Callable[[Callable[[Connection], Coroutine[Any, Any, None]]], None]]:
    """Runs a coroutine with a connection to an empty virtual host."""
    with rabbitmq_server.vhost() as vhost:

        async def main(play: Callable[[Connection], Coroutine[Any, Any, None]]) -> None:
            connection = await Connection.open(rabbitmq_server.host, rabbitmq_server.port, vhost=vhost)
            try:
                async with asyncio.timeout(60):
                    await play(connection)
            finally:
                await connection.close()

        yield lambda play: asyncio.run(main(play))


PLACE = place_of("orders", "billing", None, None, None)


async def declared(connection: Connection, place: WorkPlace = PLACE) -> Channel:
    channel = await connection.channel()
    for queue in (*place.queues.values(), place.suspects):
        await channel.declare_queue(queue, arguments=names.WORK_ARGUMENTS)
    return channel


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def consuming(
    connection: Connection, place: WorkPlace = PLACE
) -> AsyncIterator[tuple[WorkChannel, list[Received]]]:
    """A channel that consumes, and the messages that need a closer look."""
    special: list[Received] = []
    channel = await connection.channel()
    prefetch = Prefetch(None, 1, max_in_flight=1_000, max_bytes=32 << 20)
    work = WorkChannel(channel, prefetch, special=lambda _, message: special.append(message), rang=lambda: None)
    consumers = TierConsumers(channel, place, work.arrived, lambda queue: None)
    await consumers.start(500)
    try:
        yield work, special
    finally:
        await channel.close()


def parcels(count: int, tier: str = "normal", rung_ms: int | None = None) -> list[WorkParcel]:
    properties = encoded_properties(Properties(delivery_mode=2))
    return [WorkParcel(tier, rung_ms, properties, b"%d" % n) for n in range(count)]


def test_open_messages_come_back_and_no_others(link: Any) -> None:
    async def play(connection: Connection) -> None:
        await declared(connection)
        courier = WorkCourier(connection, PLACE, RungDeck())
        assert await courier.send(parcels(10)) == [None] * 10
        async with consuming(connection) as (work, _):
            await eventually(lambda: len(work.buffers) == 10)
            deliveries = work.take(10, Partition("orders", 0), 1, "log")
            assert [each.position for each in deliveries] == list(range(1, 11))
            work.done([1, 2, 3, 6, 8])
            work.done([4, 4, 99])
        async with consuming(connection) as (work, special):
            await eventually(lambda: len(special) == 4)
            assert sorted(each.body for each in special) == [b"4", b"6", b"8", b"9"]
            assert {arrived(each).returns for each in special} == {1}

    link(play)


def test_a_rung_brings_messages_back_to_their_queue(link: Any) -> None:
    async def play(connection: Connection) -> None:
        await declared(connection)
        courier = WorkCourier(connection, PLACE, RungDeck())
        await courier.declare("normal", 200)
        async with consuming(connection) as (work, _):
            before = asyncio.get_running_loop().time()
            assert await courier.send(parcels(500, rung_ms=200)) == [None] * 500
            await eventually(lambda: len(work.buffers) == 500)
            assert asyncio.get_running_loop().time() - before >= 0.2

    link(play)


def test_a_rung_that_was_deleted_is_declared_again(link: Any) -> None:
    async def play(connection: Connection) -> None:
        channel = await declared(connection)
        courier = WorkCourier(connection, PLACE, RungDeck())
        await courier.declare("normal", 50)
        await channel.delete_queue(PLACE.rung("normal", 50))
        (why,) = await courier.send(parcels(1, rung_ms=50))
        assert why is not None
        assert PLACE.rung("normal", 50) in why
        assert not courier.is_ready("normal", 50)
        assert courier.trouble == why
        await courier.declare("normal", 50)
        assert await courier.send(parcels(3, rung_ms=50)) == [None] * 3
        assert not courier.trouble

    link(play)


def test_a_rung_of_another_program_is_a_trouble_that_names_it(link: Any) -> None:
    async def play(connection: Connection) -> None:
        channel = await declared(connection)
        await channel.declare_queue(PLACE.rung("normal", 50))
        courier = WorkCourier(connection, PLACE, RungDeck())
        await courier.declare("normal", 50)
        assert not courier.is_ready("normal", 50)
        assert PLACE.rung("normal", 50) in courier.trouble
        assert "delete it" in courier.trouble
        assert await courier.send(parcels(1)) == [None]

    link(play)


def test_a_rung_that_refuses_a_message_is_left_alone_and_a_trouble_until_it_stores_one() -> None:
    deck = RungDeck()
    deck.declared("rung")
    deck.refused("rung", "no answer")
    assert deck.has("rung")
    assert not deck.is_ready("rung")
    assert deck.trouble == "no answer"
    deck.stored("rung")
    assert not deck.trouble


def test_a_missing_work_queue_is_no_silent_success(link: Any) -> None:
    async def play(connection: Connection) -> None:
        courier = WorkCourier(connection, PLACE, RungDeck())
        (why,) = await courier.send(parcels(1))
        assert why is not None
        assert PLACE.queues["normal"] in why

    link(play)


def test_a_new_rung_is_not_trusted_at_once(link: Any) -> None:
    """The server may forget a queue that it has just declared, if it is killed."""

    async def play(connection: Connection) -> None:
        await declared(connection)
        courier = WorkCourier(connection, PLACE, RungDeck())
        await courier.declare("normal", 50)
        assert not courier.is_ready("normal", 50)
        await eventually(lambda: courier.is_ready("normal", 50))

    link(play)


def test_consumers_are_replaced_without_losing_or_repeating_a_message(link: Any) -> None:
    async def play(connection: Connection) -> None:
        await declared(connection)
        courier = WorkCourier(connection, PLACE, RungDeck())
        channel = await connection.channel()
        got: list[Received] = []
        consumers = TierConsumers(channel, PLACE, lambda _, messages: got.extend(messages), lambda queue: None)
        await consumers.start(10)
        sending = asyncio.create_task(courier.send(parcels(500)))
        for prefetch in (20, 5, 700):
            await consumers.start(prefetch)
        await sending
        await eventually(lambda: len(got) >= 500)
        assert sorted(int(each.body) for each in got) == list(range(500))
        await consumers.stop()
        await courier.send(parcels(3))
        state = await channel.declare_queue(PLACE.queues["normal"], passive=True)
        assert state.messages == 3

    link(play)


def test_consumers_that_have_ended_never_start_again(link: Any) -> None:
    async def play(connection: Connection) -> None:
        await declared(connection)
        channel = await connection.channel()
        got: list[Received] = []
        consumers = TierConsumers(channel, PLACE, lambda _, messages: got.extend(messages), lambda queue: None)
        await consumers.start(10)
        await asyncio.gather(consumers.end(), consumers.start(20))
        await WorkCourier(connection, PLACE, RungDeck()).send(parcels(3))
        state = await channel.declare_queue(PLACE.queues["normal"], passive=True)
        assert (state.messages, state.consumers, got) == (3, 0, [])

    link(play)


def test_a_growing_prefetch_returns_no_message(link: Any) -> None:
    async def play(connection: Connection) -> None:
        await declared(connection)
        courier = WorkCourier(connection, PLACE, RungDeck())
        channel = await connection.channel()
        acks, got = Acknowledger(channel), list[Received]()

        def take(_: str, messages: list[Received]) -> None:
            got.extend(messages)
            acks.ack([each.tag for each in messages])

        consumers = TierConsumers(channel, PLACE, take, lambda queue: None)
        await courier.send(parcels(3_000))
        for prefetch in (20, 80, 320, 1_280):
            await consumers.start(prefetch)
        await eventually(lambda: len(got) >= 3_000)
        assert not [each for each in got if each.redelivered]
        assert sorted(int(each.body) for each in got) == list(range(3_000))

    link(play)


def test_every_rung_has_a_name_that_fits() -> None:
    assert all(len(name) <= 255 for name in rungs("t" * 200, "g" * 200))
    assert PLACE.rung("normal", 1_000) in set(rungs("orders", "billing"))
