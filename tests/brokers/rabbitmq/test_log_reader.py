"""Reading streams: where a group starts, prefetch by size, waiting for room, and a log that was cut."""

import asyncio
import time
from typing import Any

import pytest

from onward.brokers.core.bell import Bell
from onward.brokers.core.holdings import Holdings
from onward.brokers.rabbitmq.ordered import log_reader
from onward.brokers.rabbitmq.ordered.log_anchors import LogVerdict
from onward.brokers.rabbitmq.ordered.log_reader import fitting_prefetch
from onward.brokers.rabbitmq.ordered.log_start import checked, newest_of, start_of
from onward.brokers.rabbitmq.ordered.token import Anchor, Token
from onward.event import Event, new_id
from tests.brokers.rabbitmq.harness import RabbitHarness, harness
from tests.brokers.rabbitmq.stage import played
from tests.brokers.rabbitmq.token_stage import brokers, connected, event, joined

__all__ = ["harness"]

STREAM = "onward.orders.0"


def test_the_prefetch_depends_on_the_size_of_the_events() -> None:
    assert fitting_prefetch(200) == 500
    assert 20 < fitting_prefetch(50_000) < 100
    assert fitting_prefetch(50_000_000) == 20
    assert fitting_prefetch(0) == 500


@pytest.mark.servers
@played
async def test_a_start_is_an_offset_with_the_event_before_it(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        broker = await opened()
        await broker.publish([event("orders", n) for n in range(5)])
        await asyncio.sleep(0.05)
        between = time.time()
        await asyncio.sleep(0.05)
        await broker.publish([event("orders", n) for n in range(5, 9)])
        newest = await newest_of(connection, STREAM)
        assert newest is not None
        assert newest.anchor.offset == 9  # the founding message has 0
        assert await start_of(connection, STREAM, "earliest") == (0, ())
        assert await start_of(connection, STREAM, "latest") == (10, (newest.anchor,))
        position, anchors = await start_of(connection, STREAM, between)
        assert position == 6
        assert [anchor.offset for anchor in anchors] == [5]
        assert await start_of(connection, STREAM, time.time() + 3_600) == (10, (newest.anchor,))
        assert (await start_of(connection, STREAM, 5.0))[0] <= 1


@pytest.mark.servers
@played
async def test_a_reader_to_which_the_server_sends_nothing_more_asks_again(
    harness: RabbitHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server sends nothing beyond the prefetch, because the reader acknowledges nothing."""
    monkeypatch.setattr(log_reader, "_SILENT_S", 0.3)
    monkeypatch.setattr(log_reader.ReadWindow, "acked", lambda _: 0)
    async with brokers(harness) as opened:
        broker = await opened()
        await broker.publish([event("orders", n) for n in range(700)])
        member = await joined(broker)
        await member.take(700)
        assert member.values == list(range(700))
    assert "has stopped sending events" in caplog.text


@pytest.mark.servers
@played
async def test_a_check_knows_the_same_log_and_one_that_lost_its_end(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        await (await opened()).publish([event("orders", n) for n in range(5)])
        newest = await newest_of(connection, STREAM)
        assert newest is not None
        token = Token(1, 1, "x:1", "t", "t", 6, anchors=(newest.anchor,))
        assert (await checked(connection, STREAM, token)).verdict is LogVerdict.SAME
        for offset, mark in ((5, 1), (6, 1), (4_000, 1)):
            cut = Token(1, 1, "x:1", "t", "t", offset + 1, anchors=(Anchor(offset, mark), newest.anchor))
            found = await checked(connection, STREAM, cut)
            assert found.verdict is LogVerdict.CUT
            assert found.token.log_id != "t"
            assert found.token.watermark == 6
            assert found.note


@pytest.mark.servers
@played
async def test_large_and_small_events_arrive_once_and_in_order(harness: RabbitHarness) -> None:
    """The reader changes its prefetch several times."""
    async with brokers(harness) as opened:
        broker = await opened()
        sizes = [10] * 300 + [400_000] * 60 + [10] * 900
        for at in range(0, len(sizes), 100):
            await broker.publish(
                [Event(new_id(), "orders", "k", b"%06d" % n + b"x" * sizes[n]) for n in range(at, at + 100) if n < 1260]
            )
        member = await joined(broker)
        await member.take(len(sizes))
        assert [int((each.event.value or b"")[:6]) for each in member.deliveries] == list(range(len(sizes)))


@pytest.mark.servers
@played
async def test_a_stream_that_was_deleted_is_one_error_with_its_name_and_the_cure(
    harness: RabbitHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async with brokers(harness) as opened:
        broker = await opened()
        await broker.publish([event("orders", 0)])
        member = await joined(broker)
        await member.take(1)
        harness.server.delete_queue(harness.vhost, STREAM)
        await member.until(lambda: "await app.broker.drop_topic('orders')" in "".join(member.subscription.troubles()))
        errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
        assert len(errors) == 1
        assert f"stream {STREAM} does not exist: it was deleted, with its events" in errors[0]
        await member.subscription.close()
        await broker.drop_topic("orders")
        await broker.publish([event("orders", 1)])
        again = await joined(broker)
        await again.take(1)


@pytest.mark.servers
@played
async def test_a_reader_waits_for_room_and_goes_on(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened:
        broker = await opened()
        for _ in range(6):
            await broker.publish([event("orders", n) for n in range(1_000)])
        member = await joined(broker)
        (partition,) = member.assigned
        await member.subscription.pause([partition])
        await member.receive(wait_s=0.0)
        subscription: Any = member.subscription
        ahead = subscription._holdings.held[partition].ahead
        await asyncio.sleep(1.0)
        assert ahead.events < 3_000, "it read everything while it was paused"
        await member.subscription.resume([partition])
        await member.take(6_000)


def test_holdings_know_when_there_is_room() -> None:
    """The reader relies on this: an empty member is hungry."""
    holdings: Holdings[None] = Holdings(Bell())
    holdings.collect(10, 100, 0.0, sure=True)
    assert holdings.hungry.is_set()
