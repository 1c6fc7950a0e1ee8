"""Publishing: accepted events arrive unchanged and in order, and an error names the events that were not accepted."""

import asyncio
import math
import sqlite3
import time
from contextlib import closing
from typing import Any, Protocol, cast

import msgspec
import pytest

from onward.brokers.base import Broker
from onward.brokers.core.partitioner import partition_of
from onward.errors import PublishError, RelayFenced, Unserialisable
from onward.event import Event, new_id
from onward.testing.scenario import BrokerUnderTest, Kit, Member, event, first_times, scenario

_VALID = {
    "plain": Event(new_id(), "", "k", b'{"n": 1}', {"trace": "abc", "empty": ""}, "OrderPlaced", 1_700_000_000.125),
    "no key": Event(new_id(), "", None, b"x", {}, "", 1.0),
    "empty key": Event(new_id(), "", "", b"x", {}, "", 1.0),
    "unicode": Event(new_id(), "", "주문-1 ☃", "값".encode(), {"이름": "값"}, "유형", 1.0),
    "empty value": Event(new_id(), "", "k", b"", {}, "", 1.0),
    "tombstone": Event(new_id(), "", "k", None, {}, "", 1.0),
    "binary": Event(new_id(), "", "k", bytes(range(256)), {}, "", 1.0),
    "NUL": Event(new_id(), "", "a\x00b", b"\x00", {"h": "a\x00b\n", "nul": "\x00"}, "", 1.0),
    "first year": Event(new_id(), "", "k", b"x", {}, "", -62_135_596_800.0),
    "last year": Event(new_id(), "", "k", b"x", {}, "", 253_402_300_799.5),
    "1 MB": Event(new_id(), "", "k", b"\x00\xff" * 500_000, {}, "", 1.0),
}

_INVALID = {
    **{
        f"name {name!r}": Event(new_id(), "", "c", b"x", {name: "forged"})
        for name in ("ce_id\x00x", "\x00", "", "a\nb", "a\x7f", "a\x9f")
    },
    **{
        f"time {time_}": Event(new_id(), "", "c", b"x", {}, "", time_)
        for time_ in (math.nan, math.inf, -math.inf, 1e300, 253_402_300_800.0, -62_135_596_801.0)
    },
    "bytearray": Event(new_id(), "", "c", bytearray(b"x")),  # type: ignore[arg-type]
    "memoryview": Event(new_id(), "", "c", memoryview(b"x")),  # type: ignore[arg-type]
    "str": Event(new_id(), "", "c", "x"),  # type: ignore[arg-type]
}


class DatabaseUnderTest(BrokerUnderTest, Protocol):
    """A broker with `features.append_in`."""

    def connect(self) -> Any:
        """A new DB-API connection to the database of its log."""


class PublishScenarios:
    @scenario()
    async def test_events_arrive_unchanged(self, kit: Kit) -> None:
        broker = await kit.broker()
        sent = [msgspec.structs.replace(valid, topic=kit.topic) for valid in _VALID.values()]
        await broker.publish(sent)
        member = await kit.member(broker)
        await member.take(len(sent))
        got = {delivery.event.id: delivery.event for delivery in member.deliveries}
        for name, each in zip(_VALID, sent, strict=True):
            for field in ("topic", "key", "value", "type", "time"):
                assert getattr(got[each.id], field) == getattr(each, field), f"{name}: {field}"
            assert dict(got[each.id].headers) == dict(each.headers), name
        assert {delivery.attempt for delivery in member.deliveries} == {1}

    @scenario()
    async def test_an_invalid_event_is_refused_and_nothing_of_its_call_is_stored(self, kit: Kit) -> None:
        """Every broker refuses the header names, times and values that some broker could not store unchanged."""
        broker = await kit.broker()
        await broker.publish([event(kit.topic, "a", 0)])
        for name, invalid in _INVALID.items():
            bad = msgspec.structs.replace(invalid, topic=kit.topic)
            with pytest.raises(Unserialisable) as raised:
                await broker.publish([event(kit.topic, "a", 1), bad, event(kit.topic, "b", 2)])
            assert not bad.headers or repr(next(iter(bad.headers))) in str(raised.value), name
        await broker.publish([event(kit.topic, "a", 3), event(kit.topic, "b", 4)])
        member = await kit.member(broker)
        await member.take(3)
        await member.quiet()
        assert sorted(member.values) == [0, 3, 4]

    @scenario()
    async def test_concurrent_publishes_keep_the_order_of_each_key(self, kit: Kit) -> None:
        broker = await kit.broker()
        calls = [[event(kit.topic, f"key-{k}", n) for k in range(10)] for n in range(50)]
        await asyncio.gather(*(broker.publish(call) for call in calls))
        member = await kit.member(broker)
        await member.take(500)
        done = [(delivery.event.key or "", int(delivery.event.value or b"")) for delivery in member.deliveries]
        assert first_times(done) == {f"key-{k}": list(range(50)) for k in range(10)}

    @scenario()
    async def test_no_event_is_accepted_after_a_refused_one_of_its_key(self, kit: Kit) -> None:
        """The error names the refused event and every later event of its key in the call."""
        broker = await kit.broker()
        await broker.publish([event(kit.topic, "a", 0)])
        call = [event(kit.topic, key, n) for n in range(1, 4) for key in ("a", "b")]
        bad = call[2]  # the second of key a
        with kit.harness.refuse(bad), pytest.raises(PublishError) as raised:
            await broker.publish(call)
        not_accepted = {each.id for each in (*raised.value.refused, *raised.value.unknown)}
        assert {each.id for each in call if each.key == "a" and each in call[2:]} <= not_accepted
        member = await kit.member(broker)
        accepted = [each for each in call if each.id not in not_accepted]
        await member.take(1 + len(accepted))
        await member.quiet()
        got = [delivery.event.id for delivery in member.deliveries]
        for key in ("a", "b"):
            of_key = [each.id for each in call if each.key == key]
            arrived = [id_ for id_ in of_key if id_ in got]
            assert arrived == of_key[: len(arrived)], "an event was accepted after a refused one of its key"
            assert {each.id for each in accepted if each.key == key} <= set(arrived)

    @scenario()
    async def test_a_refusal_stops_its_key_in_calls_already_entered_but_not_in_later_calls(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish([event(kit.topic, "a", 0)])
        first, second = event(kit.topic, "a", 1), event(kit.topic, "a", 2)
        with kit.harness.refuse(first):
            answers = await asyncio.gather(broker.publish([first]), broker.publish([second]), return_exceptions=True)
        assert isinstance(answers[0], PublishError)
        assert isinstance(answers[1], PublishError), "a later event of the key overtook the refused one"
        await broker.publish([first])
        await broker.publish([second])
        member = await kit.member(broker)
        await member.take(3)
        assert list(dict.fromkeys(member.values)) == [0, 1, 2]

    @scenario()
    async def test_a_relay_with_a_lower_fence_is_refused(self, kit: Kit) -> None:
        broker, other = await kit.broker(), await kit.broker()
        if not broker.features.fenced_publish:
            pytest.skip("this broker does not compare the fences of relays")
        shard = f"{new_id()}/0"
        await broker.publish([event(kit.topic, "a", 0)], relay=(shard, 3))
        await other.publish([event(kit.topic, "a", 1)], relay=(shard, 4))
        with pytest.raises(RelayFenced, match="4") as raised:
            await broker.publish([event(kit.topic, "a", 2), event(kit.topic, "b", 2)], relay=(shard, 3))
        assert len(raised.value.refused) == 2
        assert raised.value.seen == 4
        await broker.publish([event(kit.topic, "a", 2)], relay=(shard, 4))
        await broker.publish([event(kit.topic, "a", 3)], relay=(f"{shard}1", 1))
        await broker.publish([event(kit.topic, "a", 4)])
        member = await kit.member(broker)
        await member.take(5)
        await member.quiet()
        assert member.values == [0, 1, 2, 3, 4]

    @scenario()
    async def test_a_refusal_stops_no_other_key_in_calls_already_entered(self, kit: Kit) -> None:
        broker = await kit.broker()
        if not broker.features.fenced_publish:
            pytest.skip("this broker does not compare the fences of relays")
        shard = f"{new_id()}/0"
        await broker.publish([event(kit.topic, "a", 0)], relay=(shard, 2))
        calls = [
            broker.publish([event(kit.topic, "a", 1)], relay=(shard, 1)),
            broker.publish([event(kit.topic, "a", 2), event(kit.topic, "c", 2)]),
            broker.publish([event(kit.topic, "b", 3)]),
            broker.publish([event(kit.topic, None, 4)]),
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], RelayFenced)
        assert answers[0].seen == 2
        assert isinstance(answers[1], PublishError), "a later event of the key overtook the refused one"
        assert "a" in {each.key for each in answers[1].refused}
        assert answers[2:] == [None, None], "a refusal stopped an event of another key"
        member = await kit.member(broker)
        await member.until(lambda: {0, 3, 4} <= {*member.values})
        assert not {1, 2} & {
            n for n, each in zip(member.values, member.deliveries, strict=True) if each.event.key == "a"
        }

    @scenario()
    async def test_a_call_of_a_fenced_relay_in_several_slices_names_the_fence_that_was_seen(self, kit: Kit) -> None:
        broker = await kit.broker()
        if not broker.features.fenced_publish:
            pytest.skip("this broker does not compare the fences of relays")
        shard = f"{new_id()}/0"
        await broker.publish([event(kit.topic, "a", 0)], relay=(shard, 7))
        with pytest.raises(RelayFenced) as raised:
            await broker.publish(kit.events(2_500, keys=50), relay=(shard, 6))
        assert raised.value.seen == 7
        assert len(raised.value.refused) == 2_500

    @scenario()
    async def test_append_in_stores_events_with_the_commit_and_none_after_a_rollback(self, kit: Kit) -> None:
        broker = await kit.broker()
        member = await kit.member(broker)
        await member.hold(4)
        with _connected(kit, broker) as connection:
            assert broker.append_in(connection, [event(kit.topic, "a", 0), event(kit.topic, "b", 0)])
            connection.rollback()
            wake = broker.append_in(connection, [event(kit.topic, "a", 1), event(kit.topic, "b", 1)])
            assert broker.append_in(connection, [event(kit.topic, "a", 2)])
            await member.quiet()
            connection.commit()
        assert wake is not None
        await asyncio.to_thread(wake)  # any thread may wake the members
        await member.take(3)
        await member.quiet()
        done = [(delivery.event.key or "", int(delivery.event.value or b"")) for delivery in member.deliveries]
        assert first_times(done) == {"a": [1, 2], "b": [1]}

    @scenario()
    async def test_append_in_and_publish_keep_the_order_of_the_commits(self, kit: Kit) -> None:
        broker, other = await kit.broker(), await kit.broker()
        with _connected(kit, broker) as connection:
            for n in range(0, 60, 3):
                await broker.publish([event(kit.topic, "a", n)])
                for appends, at in ((broker, n + 1), (other, n + 2)):
                    appends.append_in(connection, [event(kit.topic, "a", at)])
                    connection.commit()
        member = await kit.member(broker)
        await member.take(60)
        assert member.values == list(range(60))

    @scenario()
    async def test_append_in_refuses_a_whole_call_and_leaves_the_transaction_open(self, kit: Kit) -> None:
        broker = await kit.broker()
        keys = [f"key-{n}" for n in range(20)]
        await broker.publish([event(kit.topic, key, 0) for key in keys])
        call = [event(kit.topic, key, 1) for key in keys]
        bad = next(each for each in call if partition_of(each.key or "", 4) == 3)  # others can be stored before it
        with _connected(kit, broker) as connection, kit.harness.refuse(bad):
            with pytest.raises(PublishError) as raised:
                broker.append_in(connection, call)
            with pytest.raises(Unserialisable):
                broker.append_in(connection, [Event(new_id(), kit.topic, "a", "text")])  # type: ignore[arg-type]
            broker.append_in(connection, [event(kit.topic, key, 2) for key in keys])
            connection.commit()
        assert {each.id for each in raised.value.refused} == {each.id for each in call}
        member = await kit.member(broker)
        await member.take(2 * len(keys))
        await member.quiet()
        assert {key: _of_key(member, key) for key in keys} == {key: [0, 2] for key in keys}

    @scenario()
    async def test_append_in_does_nothing_in_another_database(self, kit: Kit) -> None:
        broker = await kit.broker()
        with closing(sqlite3.connect(":memory:")) as connection:
            assert broker.append_in(connection, [event(kit.topic, "a", 0)]) is None
            assert not connection.in_transaction
        assert broker.append_in(object(), [event(kit.topic, "a", 1)]) is None
        await broker.publish([event(kit.topic, "a", 2)])
        member = await kit.member(broker)
        await member.take(1)
        assert member.values == [2]

    @scenario()
    async def test_a_cancelled_publish_disturbs_no_later_publish(self, kit: Kit) -> None:
        broker = await kit.broker()
        for n in range(20):
            call = asyncio.create_task(broker.publish([event(kit.topic, "a", 2 * n)]))
            await asyncio.sleep(0)
            call.cancel()
            await broker.publish([event(kit.topic, "a", 2 * n + 1)])
        member = await kit.member(broker)
        await member.until(lambda: 39 in member.values)
        assert member.values == sorted(member.values)
        assert set(range(1, 40, 2)) <= set(member.values)

    @scenario()
    async def test_accepted_events_survive_the_kill_of_their_publisher(self, kit: Kit) -> None:
        child = kit.child("flood", count=50, batch=20)
        await child.line()
        assert (await child.line())["batches"] == 50
        child.kill()
        member = await kit.member(await kit.broker())
        await member.take(1000)
        done = [(delivery.event.key or "", int(delivery.event.value or b"")) for delivery in member.deliveries]
        assert first_times(done) == {f"flood-{i}": list(range(50)) for i in range(20)}

    @pytest.mark.slow
    @scenario(publish_timeout_s=4.0)
    async def test_a_suspended_publisher_does_not_block_other_publishers_for_ever(self, kit: Kit) -> None:
        """Wherever the stop hits, another publisher succeeds or is refused in time. It succeeds after the kill."""
        broker = await kit.broker()
        await broker.publish([event(kit.topic, "a", 0)])
        for n in range(1, 4):
            child = kit.child("flood")
            await child.line()
            await asyncio.sleep(0.2)
            child.stop()
            started = time.monotonic()
            refused: tuple[Event, ...] = ()
            try:
                await broker.publish([event(kit.topic, "a", n)])
            except PublishError as error:
                refused = error.refused
            assert time.monotonic() - started < 30
            child.kill()
            if refused:
                await broker.publish(refused)
        member = await kit.member(broker)
        await member.until(lambda: 3 in _of_key(member, "a"))
        assert _of_key(member, "a") == [0, 1, 2, 3]


def _connected(kit: Kit, broker: Broker) -> "closing[Any]":
    """A connection of the application to the database of the log."""
    if not broker.features.append_in:
        pytest.skip("the log of this broker is not in a database of the application")
    return closing(cast("DatabaseUnderTest", kit.harness).connect())


def _of_key(member: Member, key: str) -> list[int]:
    return [int(delivery.event.value or b"") for delivery in member.deliveries if delivery.event.key == key]
