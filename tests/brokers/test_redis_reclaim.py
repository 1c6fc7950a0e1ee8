"""Reclaiming on streams of another program: what its consumers have left is handled, whatever became of them.

The other program is plain redis-py with XADD, XREADGROUP and XACK. The checklists are those at the end of the source
designs: 000 (reclaimer) and 001 (integrity report)."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis

from onward import Event, Onward, Retry, settings
from onward.brokers import open_broker
from onward.brokers.base import AsideRecord, Broker, Delivery, Filter, Progress, Revoked, State, record_id
from onward.brokers.redis import Streams
from onward.brokers.redis.foreign.reclaim import TopicReclaimer
from onward.brokers.redis.keys import PartitionKeys
from onward.event import Partition, Tries
from onward.testing.scenario import LEASE_S, Member
from tests.brokers.redis_stage import own_server, play, until
from tests.servers.redis import RedisServer

GROUP = "eventrouter"
IDLE_S = 0.3


class OtherProgram:
    """A consumer of the group that is not ours, and the publisher of its stream."""

    def __init__(self, client: Redis, stream: str) -> None:
        self.client: Any = client
        self.stream = stream

    def publish(self, count: int, start: int = 0) -> list[str]:
        calls = self.client.pipeline(transaction=False)
        for n in range(start, start + count):
            calls.xadd(self.stream, {"key": f"key-{n % 3}", "value": str(n)})
        return [id_.decode() for id_ in calls.execute()]

    def create(self, at: str = "0") -> None:
        self.client.xgroup_create(self.stream, GROUP, at, mkstream=True)

    def read(self, count: int, consumer: str = "pod-1") -> list[str]:
        found = self.client.xreadgroup(GROUP, consumer, {self.stream: ">"}, count=count)
        return [id_.decode() for _, entries in found for id_, _ in entries]

    def ack(self, ids: Sequence[str]) -> None:
        self.client.xack(self.stream, GROUP, *ids)

    def deliver_again(self, id_: str, times: int, consumer: str = "pod-1") -> None:
        self.client.xclaim(self.stream, GROUP, consumer, 0, [id_], retrycount=times, justid=True)

    def pending(self) -> dict[str, tuple[str, int]]:
        """By id: the consumer and how often it was delivered."""
        rows = self.client.xpending_range(self.stream, GROUP, "-", "+", 10_000)
        return {row["message_id"].decode(): (row["consumer"].decode(), row["times_delivered"]) for row in rows}

    def consumers(self) -> dict[str, int]:
        """By name: how many entries each holds."""
        return {each["name"].decode(): each["pending"] for each in self.client.xinfo_consumers(self.stream, GROUP)}

    def fall_silent(self) -> None:
        """Until its consumers are as idle as a dead one."""
        while any(each["idle"] < IDLE_S * 1000 for each in self.client.xinfo_consumers(self.stream, GROUP)):
            time.sleep(0.02)


class StreamStage:
    """Topics on streams of their own, which another program writes and reads."""

    def __init__(self, server: RedisServer, client: Redis, shards: int | None, topics: int, **options: Any) -> None:
        self.url = server.url
        self.client = client
        self.topics = [f"scan-{uuid4().hex[:8]}" for _ in range(topics)]
        self.streams = {topic: Streams(f"{topic}:events", shards, "value", "key") for topic in self.topics}
        times = {"reclaim_idle_s": IDLE_S, "reclaim_every_s": 0.2, "lease_s": LEASE_S, "takeover_grace_s": 0.1}
        self.options: dict[str, Any] = {"streams": self.streams, **times, **options}
        self._brokers: list[Broker] = []

    @property
    def topic(self) -> str:
        return self.topics[0]

    def other(self, index: int = 0, topic: str | None = None) -> OtherProgram:
        return OtherProgram(self.client, self.streams[topic or self.topic].stream(index))

    async def broker(self, **options: Any) -> Broker:
        broker = await open_broker(settings.load(self.url, **(self.options | options)))
        self._brokers.append(broker)
        return broker

    async def member(self, broker: Broker | None = None, **options: Any) -> Member:
        return await Member.join(broker or await self.broker(), self.topic, GROUP, **options)

    async def member_of_all(self, broker: Broker) -> Member:
        subscription = await broker.subscribe(self.topics, group=GROUP, member="all", ordering="key", start="earliest")
        return Member(subscription, yields=True)

    async def close(self) -> None:
        for broker in self._brokers:
            await broker.close()


@asynccontextmanager
async def foreign(
    server: RedisServer, shards: int | None = 1, topics: int = 1, **options: Any
) -> AsyncIterator[StreamStage]:
    with server.client() as client:
        stage = StreamStage(server, client, shards, topics, **options)
        try:
            async with asyncio.timeout(100):
                yield stage
        finally:
            await stage.close()


def ids_of(deliveries: Sequence[Delivery]) -> list[str]:
    return [each.event.headers["onward-stream-id"] for each in deliveries]


def figure(broker: Broker, name: str, partition: Partition) -> float:
    (found,) = [each for each in broker.figures() if each.name == name]
    samples = [each.value for each in found.samples if each.labels == (partition.topic, str(partition.index))]
    return sum(samples)


async def dead_letters(broker: Broker, topic: str) -> list[AsideRecord]:
    page = await broker.aside(GROUP).scan(Filter(frozenset({State.DEAD}), topic), None, 1_000)
    return list(page.records)


def test_what_a_dead_consumer_has_left_comes_first_with_its_stream_and_id(redis_server: RedisServer) -> None:
    """Checklist 000: the id is there when an entry is handled again. Checklist 001: the reclaimer passes it on."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            ids = other.publish(10)
            other.create()
            read = other.read(6)
            other.ack([read[1], read[4]])
            other.fall_silent()
            broker = await stage.broker()
            member = await stage.member(broker)
            await member.take(8)
            await member.quiet(0.2)
            assert ids_of(member.deliveries) == [ids[n] for n in (0, 2, 3, 5, 6, 7, 8, 9)]
            assert {each.event.headers["onward-stream"] for each in member.deliveries} == {other.stream}
            assert figure(broker, "reclaim_messages", Partition(stage.topic, 0)) == 4
            await member.settle()
            assert other.pending() == {}

    play(scene())


def test_entries_stay_pending_until_they_are_done(redis_server: RedisServer) -> None:
    """Checklist 000 and 001: no acknowledgement without success. XPENDING shows what is open, under our name."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            ids = other.publish(4)
            other.create()
            other.read(4)
            other.fall_silent()
            member = await stage.member()
            await member.take(4)
            assert {id_: consumer for id_, (consumer, _) in other.pending().items()} == dict.fromkeys(ids, "onward")
            await member.settle(member.deliveries[:3])
            assert list(other.pending()) == ids[3:]
            await member.subscription.close()
            again = await stage.member()
            await again.take(1)
            assert ids_of(again.deliveries) == ids[3:]
            await again.settle()
            assert other.pending() == {}

    play(scene())


def test_reclaiming_follows_the_pending_list_to_its_end(redis_server: RedisServer) -> None:
    """Trap 11: the first page does not hide the others."""

    async def scene() -> None:
        async with foreign(redis_server, reclaim_batch=7) as stage:
            other = stage.other()
            ids = other.publish(150)
            other.create()
            other.read(100, "pod-1")
            other.read(50, "pod-2")
            other.ack(ids[3:148:5])
            other.fall_silent()
            member = await stage.member()
            left = [id_ for id_ in ids if id_ not in ids[3:148:5]]
            await member.take(len(left))
            assert ids_of(member.deliveries) == left

    play(scene())


def test_the_group_goes_on_where_its_consumers_were_whatever_start_says(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            ids = other.publish(5)
            other.create()
            other.read(2)
            other.fall_silent()
            member = await stage.member(start="latest")
            await member.take(5)
            assert ids_of(member.deliveries) == ids

    play(scene())


def test_entries_that_were_trimmed_before_they_were_finished_leave_a_stub(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Traps 8 and 9: a trim, or a deletion, removes pending entries. They are counted and reported, never forgotten."""

    async def scene() -> None:
        async with foreign(redis_server, reclaim_batch=3) as stage:
            other = stage.other()
            ids = other.publish(12)
            other.create()
            other.read(10)
            other.ack(ids[1:2])
            stage.client.xdel(other.stream, ids[7])
            stage.client.xtrim(other.stream, minid=ids[4], approximate=False)
            other.fall_silent()
            broker = await stage.broker()
            member = await stage.member(broker)
            await member.take(7)
            assert ids_of(member.deliveries) == [ids[n] for n in (4, 5, 6, 8, 9, 10, 11)]
            letters = await dead_letters(broker, stage.topic)
            assert [each.event.headers["onward-stream-id"] for each in letters] == [ids[n] for n in (0, 2, 3, 7)]
            failure = letters[0].failure
            assert failure is not None
            assert (failure.reason, failure.error) == ("lost", "TrimmedUnread")
            assert ids[0] in failure.message
            assert other.stream in failure.message
            assert (letters[0].event.value, letters[0].event.topic) == (None, stage.topic)
            assert figure(broker, "stream_lost", Partition(stage.topic, 0)) == 4
            await member.until(lambda: list(other.pending()) == [ids[n] for n in (4, 5, 6, 8, 9, 10, 11)])

    with caplog.at_level(logging.ERROR, "onward"):
        play(scene())
    assert "were removed before group" in caplog.text


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (1, r"/0: 1 entry of stream \S+ was removed before group \w+ had finished it, \d+-\d+; the stubs"),
        (2, r"/0: 2 entries of stream \S+ were removed before group \w+ had finished them, from \S+ to \S+; the stubs"),
    ],
)
def test_one_lost_entry_and_several_read_well_in_the_log(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, count: int, says: str
) -> None:
    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            other.create()
            other.publish(count)
            other.read(count)
            other.client.xtrim(other.stream, maxlen=0, approximate=False)
            other.fall_silent()
            await (await stage.member()).hold(1)
            assert re.search(says, caplog.text)

    play(scene())


def test_entries_that_are_trimmed_between_adoption_and_reading_leave_a_stub(redis_server: RedisServer) -> None:
    """Trap 8."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            ids = other.publish(6)
            other.create()
            other.read(5)
            other.fall_silent()
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)  # it reads with the next receive
            stage.client.xtrim(other.stream, minid=ids[2], approximate=False)
            stage.client.xdel(other.stream, ids[3])
            await member.take(3)
            assert ids_of(member.deliveries) == [ids[2], ids[4], ids[5]]
            letters = await dead_letters(broker, stage.topic)
            assert [each.event.headers["onward-stream-id"] for each in letters] == [ids[0], ids[1], ids[3]]
            assert figure(broker, "stream_lost", Partition(stage.topic, 0)) == 3
            await member.settle()
            await member.until(lambda: other.pending() == {})

    play(scene())


def test_entries_that_are_trimmed_while_we_have_them_open_leave_a_stub_for_the_next_owner(
    redis_server: RedisServer,
) -> None:
    """Trap 8."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            ids = other.publish(6)
            broker = await stage.broker()
            member = await stage.member(broker)
            await member.take(6)
            await member.settle(member.deliveries[:1])
            assert list(other.pending()) == ids[1:]
            member.handled = 0
            await member.subscription.close()
            stage.client.xtrim(other.stream, minid=ids[3], approximate=False)
            again = await stage.member(broker)
            await again.take(3)
            assert ids_of(again.deliveries) == ids[3:]
            letters = await dead_letters(broker, stage.topic)
            assert [each.event.headers["onward-stream-id"] for each in letters] == ids[1:3]

    play(scene())


def test_delivery_counts_become_attempts_so_a_poison_entry_ends_as_a_dead_letter(redis_server: RedisServer) -> None:
    """Trap 10."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            ids = other.publish(3)
            other.create()
            other.read(3)
            other.deliver_again(ids[1], 5)
            other.fall_silent()
            app = Onward(stage.url, **stage.options, retry=Retry(attempts=5, first_delay_s=0.01))
            calls: list[str] = []

            @app.handler(stage.topic, group=GROUP)
            async def handle(event: Event) -> None:
                calls.append(event.headers["onward-stream-id"])
                if event.headers["onward-stream-id"] == ids[1]:
                    raise ValueError("poison")

            async with app.running():
                await until(lambda: len(calls) == 3 and other.pending() == {})
                (letter,) = (await app.dead.list(topic=stage.topic, limit=10)).letters
            assert letter.event.headers["onward-stream-id"] == ids[1]
            assert letter.failure is not None
            assert (letter.failure.reason, letter.failure.attempts) == ("exhausted", 5)
            assert sorted(calls) == ids

    play(scene())


def test_a_live_consumer_in_the_group_is_a_trouble_and_adoption_waits_for_it(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with foreign(redis_server, reclaim_idle_s=1.0) as stage:
            other = stage.other()
            ids = other.publish(4)
            other.create()
            other.read(2, "pod-7")
            member = await stage.member()
            await until_troubled(member, "pod-7")
            assert not member.assigned
            other.read(1, "pod-7")
            other.ack(ids[:1])
            assert other.consumers()["pod-7"] == 2
            await member.take(3)
            assert ids_of(member.deliveries) == ids[1:]
            assert list(member.subscription.troubles()) == []

    play(scene())


def test_a_partition_that_waits_says_for_whom_and_how_long(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with foreign(redis_server, reclaim_idle_s=60.0) as stage:
            other = stage.other()
            other.create()
            other.publish(2)
            other.read(1, "old-1")
            member = await stage.member()
            place = rf"^{stage.topic}/0 of group {GROUP} waits: "
            one = rf"{place}consumer old-1 of another program was active \d+ s ago; .* in (60|5\d) s \(reclaim_idle_s\)"
            await member.until(lambda: any(re.search(one, why) for why in member.subscription.troubles()))
            other.read(1, "old-2")
            two = rf"{place}consumers of another program were active: old-1 \d+ s ago, old-2 \d+ s ago; .* they stay"
            await member.until(lambda: any(re.search(two, why) for why in member.subscription.troubles()))
            assert len([each for each in caplog.records if stage.topic in each.message]) == 1

    play(scene())


def test_a_stopped_consumer_that_has_finished_everything_delays_by_a_lease_only(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with foreign(redis_server, reclaim_idle_s=300.0) as stage:
            other = stage.other()
            other.create()
            other.publish(2)
            other.ack(other.read(2, "old-1"))
            (added,) = other.publish(1)
            member = await stage.member()
            await until_troubled(member, "(lease_s)")
            await member.take(1)
            assert ids_of(member.deliveries) == [added]
            assert list(member.subscription.troubles()) == []

    play(scene())


def test_another_reader_is_one_error_and_its_end_one_line(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onward")

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            other.publish(4)
            member = await stage.member()
            await member.take(4)
            await member.settle()
            with_gap = other.client.pipeline(transaction=True)  # before we can have read it
            with_gap.xadd(other.stream, {"key": "a", "value": "4"})
            with_gap.xreadgroup(GROUP, "intruder", {other.stream: ">"})
            with_gap.execute()
            other.publish(1, start=5)
            async with kept_alive(other, "intruder"):
                await until_troubled(member, "waits: consumer intruder")
                await member.quiet(3 * IDLE_S)
            await member.until(lambda: "goes on" in caplog.text and "reclaimed" in caplog.text)
            lines = [each for each in caplog.records if f"{stage.topic}/0 of group {GROUP}" in each.message]
            assert [each.levelname for each in lines] == ["ERROR", "INFO"]
            assert "consumer intruder of another program" in lines[0].message
            assert "goes on" in lines[1].message
            (line,) = [each.message for each in caplog.records if "reclaimed" in each.message]
            assert "reclaimed 1 entry of other consumers" in line

    play(scene())


async def until_troubled(member: Member, text: str) -> None:
    await member.until(lambda: any(text in why for why in member.subscription.troubles()))


def test_a_consumer_that_reads_beside_us_stops_the_partition_until_it_is_idle(redis_server: RedisServer) -> None:
    """Design, scenario 14: nothing is lost, and what it left comes with a new ownership."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            other.publish(4)
            member = await stage.member()
            await member.take(4)
            await member.settle()
            (first,) = member.assigned.values()
            with_gap = other.client.pipeline(transaction=True)  # before we can have read it
            with_gap.xadd(other.stream, {"key": "a", "value": "4"})
            with_gap.xreadgroup(GROUP, "intruder", {other.stream: ">"})
            with_gap.execute()
            other.publish(3, start=5)
            await member.until(
                lambda: (
                    any(each.epoch > first.epoch for each in member.assigned.values())
                    and {int(each.event.value or b"") for each in member.deliveries} == set(range(8))
                )
            )
            assert any(isinstance(each, Revoked) for each in member.history)
            await member.settle()
            await member.until(lambda: other.pending() == {})
            assert set(other.consumers()) == {"onward"}
            assert list(member.subscription.troubles()) == []

    play(scene())


def test_entries_that_another_consumer_took_from_us_come_back_in_the_next_round(redis_server: RedisServer) -> None:
    """Its last-delivered id is still ours, so only a round can find them."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            ids = other.publish(3)
            member = await stage.member()
            await member.take(3)
            await member.settle(member.deliveries[:1])
            member.handled = 1
            (first,) = member.assigned.values()
            client: Any = stage.client
            client.xclaim(other.stream, GROUP, "thief", 0, ids[1:], justid=True)
            await member.until(lambda: any(each.epoch > first.epoch for each in member.assigned.values()))
            await member.take(5)
            assert ids_of(member.deliveries[3:]) == ids[1:]
            assert {consumer for consumer, _ in other.pending().values()} == {"onward"}

    play(scene())


def test_orphan_consumers_are_removed_only_when_they_hold_nothing(redis_server: RedisServer) -> None:
    """Trap 13: to remove a consumer is to forget its entries."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            ids = other.publish(4)
            other.create()
            for n in range(4):
                other.read(1, f"pod-{n}")
            other.ack(ids[:2])
            other.fall_silent()
            member = await stage.member()
            await member.take(2)
            assert ids_of(member.deliveries) == ids[2:]
            assert set(other.consumers()) == {"onward"}
            other.client.xgroup_createconsumer(other.stream, GROUP, "late")
            assert "late" in other.consumers()
            await member.until(lambda: "late" not in other.consumers())
            assert list(other.pending()) == ids[2:]

    play(scene())


def test_what_waits_in_the_aside_stays_pending_and_is_not_delivered_again(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            ids = other.publish(3)
            other.create()
            other.read(2)
            other.fall_silent()
            broker = await stage.broker()
            member = await stage.member(broker)
            await member.take(3)
            waiting = member.deliveries[0]
            (progress,) = member.progress(member.deliveries[:1])
            assert not await member.subscription.settle([progress], aside=[waits(waiting)])
            assert list(other.pending()) == ids
            await member.subscription.close()
            again = await stage.member(broker)
            await again.take(2)
            await again.quiet(0.2)
            assert ids_of(again.deliveries) == ids[1:]
            await again.settle()
            assert list(other.pending()) == ids[:1]

    play(scene())


def waits(delivery: Delivery) -> AsideRecord:
    id_ = record_id(GROUP, delivery.log_id, delivery.partition, delivery.position)
    place = (id_, GROUP, delivery.partition, delivery.position)
    return AsideRecord(*place, State.WAITING, time.time() + 1_000, delivery.event, Tries(1), None)


def test_all_topics_and_all_their_streams_are_reclaimed_with_one_line_in_the_log(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Checklist 000: all domains are included, and readers and reclaimer have the same ones. Checklist 001: several
    domains in parallel. The line has the total."""

    async def scene() -> None:
        async with foreign(redis_server, shards=2, topics=2) as stage:
            for topic in stage.topics:
                for index in range(2):
                    other = stage.other(index, topic)
                    other.create()
                    other.publish(5)
                    other.read(5)
            for topic in stage.topics:
                stage.other(1, topic).fall_silent()
            broker = await stage.broker()
            member = await stage.member_of_all(broker)
            await member.take(20)
            assert sum(figure(broker, "reclaim_messages", each) for each in member.assigned) == 20
            assert {figure(broker, "reclaim_messages", each) for each in member.assigned} == {5}
            await until(lambda: sum(map(entries_in, reclaimed())) == 20)

    def reclaimed() -> list[str]:
        return [each.getMessage() for each in caplog.records if "reclaimed" in each.getMessage()]

    def entries_in(line: str) -> int:
        return int(line.split(" reclaimed ")[1].split()[0])

    with caplog.at_level(logging.INFO, "onward"):
        play(scene())
    assert len(reclaimed()) <= 2, "one for each topic, or one for both"


def test_a_reclaimer_that_looks_at_once_finds_what_the_member_holds(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = TopicReclaimer.claimed

    def slowly(reclaimer: TopicReclaimer, holds: Any) -> None:
        claimed(reclaimer, holds)
        time.sleep(0.3)  # its thread runs meanwhile

    async def scene() -> None:
        async with foreign(redis_server, shards=2) as stage:
            for index in range(2):
                stage.other(index).publish(2)
            member = await stage.member(await stage.broker())
            await member.take(4)

    monkeypatch.setattr(TopicReclaimer, "claimed", slowly)
    play(scene())


def test_a_topic_with_a_live_consumer_does_not_delay_another_one(redis_server: RedisServer) -> None:
    """Checklist 001: domains are apart."""

    async def scene() -> None:
        async with foreign(redis_server, topics=2) as stage:
            busy, idle = (stage.other(0, topic) for topic in stage.topics)
            for other in (busy, idle):
                other.create()
                other.publish(3)
                other.read(3)
            async with kept_alive(busy):
                member = await stage.member_of_all(await stage.broker())
                await member.take(3)
                assert {each.partition.topic for each in member.deliveries} == {stage.topics[1]}
                await until_troubled(member, stage.topics[0])
            await member.take(6)

    play(scene())


@asynccontextmanager
async def kept_alive(other: OtherProgram, consumer: str = "pod-1") -> AsyncIterator[None]:
    """Its consumer is active. To ask for new entries is not enough: before 7.2 that counts only if there are some."""
    ids = list(other.pending())

    async def read() -> None:
        while True:
            await asyncio.to_thread(other.client.xclaim, other.stream, GROUP, consumer, 0, ids, justid=True)
            await asyncio.sleep(0.05)

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        reading.cancel()
        await asyncio.wait([reading])


def test_a_topic_whose_pending_list_is_damaged_does_not_stop_another_one(redis_server: RedisServer) -> None:
    """Checklist 001: an error in one domain is not one of the others. The id fits into no position."""

    async def scene() -> None:
        async with foreign(redis_server, topics=2) as stage:
            damaged, sound = (stage.other(0, topic) for topic in stage.topics)
            stage.client.xadd(damaged.stream, {"key": "a", "value": "0"}, id="9999999999999-0")
            sound.publish(3)
            for other in (damaged, sound):
                other.create()
                other.read(3)
            sound.fall_silent()
            member = await stage.member_of_all(await stage.broker())
            await member.take(3)
            assert {each.partition.topic for each in member.deliveries} == {stage.topics[1]}
            await until_troubled(member, "9999999999999-0")

    play(scene())


def test_a_stream_and_a_group_that_are_missing_are_normal(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with foreign(redis_server, shards=2) as stage:
            stage.other(0).publish(2)
            member = await (await stage.member()).hold(2)
            await member.take(2)
            stage.other(1).publish(1, start=2)
            await member.take(3)
            assert list(member.subscription.troubles()) == []

    play(scene())


def test_a_group_that_was_set_back_runs_nothing_again(redis_server: RedisServer) -> None:
    """Trap 7: our own progress decides, not an id that another program has written."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            other.publish(3)
            member = await stage.member()
            await member.take(3)
            await member.settle()
            (first,) = member.assigned.values()
            other.client.xgroup_setid(other.stream, GROUP, "0")
            (fresh,) = other.publish(1, start=3)
            await member.until(lambda: any(each.epoch > first.epoch for each in member.assigned.values()))
            await member.until(lambda: fresh in ids_of(member.deliveries))
            await member.quiet(0.2)
            assert sorted({*member.values}) == [0, 1, 2, 3]
            assert member.values[:3] == [0, 1, 2]
            assert set(member.values[3:]) == {3}
            await member.settle()
            (group,) = other.client.xinfo_groups(other.stream)
            assert group["last-delivered-id"].decode() == fresh

    play(scene())


def test_a_new_owner_adopts_what_the_owner_before_had_open(redis_server: RedisServer) -> None:
    """Trap 12: what is pending under our own name comes first. What is done above it is known, so it does not run."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            ids = other.publish(5)
            broker = await stage.broker()
            member = await stage.member(broker)
            deliveries = await member.take(5)
            epoch = deliveries[0].epoch
            partition, places = deliveries[0].partition, [each.position for each in deliveries]
            above = [(places[2], places[3] + 1)]
            done = Progress(partition, epoch, places[1], above, (places[0], places[2], places[3]))
            await member.subscription.settle([done])
            assert list(other.pending()) == [ids[1], ids[4]]
            await member.subscription.close()
            again = await stage.member(broker)
            await again.take(4)
            assert ids_of(again.deliveries) == ids[1:]
            (assigned,) = again.assigned.values()
            assert assigned.stored is not None
            assert (assigned.stored.watermark, list(assigned.stored.done_above)) == (places[1], above)

    play(scene())


def test_a_member_that_has_lost_the_partition_adopts_nothing(redis_server: RedisServer) -> None:
    """Another member owns it while this one waits for a live consumer. Its own next renewal is far away."""

    async def scene() -> None:
        async with foreign(redis_server, lease_s=60) as stage:
            other = stage.other()
            other.publish(3)
            other.create()
            other.read(3)
            async with kept_alive(other):
                member = await stage.member()
                await until_troubled(member, "pod-1")
                key = PartitionKeys.foreign(other.stream).group(GROUP)
                stage.client.hset(key, "owner", f"{10**15}:another:member")
            await until(lambda: not member.subscription.troubles())
            assert {consumer for consumer, _ in other.pending().values()} == {"pod-1"}
            await member.quiet(IDLE_S)
            assert not member.assigned

    play(scene())


@pytest.mark.servers
def test_adoption_goes_on_after_a_restart_of_the_server() -> None:
    async def scene() -> None:
        with own_server() as server:
            async with foreign(server) as stage:
                other = stage.other()
                ids = other.publish(3)
                other.create()
                other.read(3)
                async with kept_alive(other):
                    member = await stage.member()
                    await until_troubled(member, "pod-1")
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                await member.take(3)
                assert ids_of(member.deliveries) == ids

    play(scene())


def test_a_failing_handler_leaves_its_entry_pending_until_it_succeeds(redis_server: RedisServer) -> None:
    """Checklists 000 and 001: a failure does not acknowledge, for fresh entries and for reclaimed ones."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            other.create()
            reclaimed, *_ = other.publish(1)
            other.read(1)
            other.fall_silent()
            fresh, *_ = other.publish(1, start=1)
            app = Onward(stage.url, **stage.options, retry=Retry(attempts=100, first_delay_s=0.01, factor=1))
            calls: list[str] = []
            healed = asyncio.Event()

            @app.handler(stage.topic, group=GROUP)
            async def handle(event: Event) -> None:
                calls.append(event.headers["onward-stream-id"])
                if not healed.is_set():
                    raise ConnectionError("the gateway is away")

            async with app.running():
                await until(lambda: min(calls.count(reclaimed), calls.count(fresh)) > 3)
                assert list(other.pending()) == [reclaimed, fresh]
                healed.set()
                await until(lambda: other.pending() == {})

    play(scene())


def test_nothing_is_lost_or_out_of_order_while_another_consumer_comes_and_goes(redis_server: RedisServer) -> None:
    """It reads some entries now and then and dies with them. First runs of a key stay in order."""

    async def scene() -> None:
        async with foreign(redis_server) as stage:
            other = stage.other()
            app = Onward(stage.url, **stage.options)
            handled: dict[str, list[int]] = {}
            published: set[int] = set()

            @app.handler(stage.topic, group=GROUP)
            async def handle(value: int, event: Event) -> None:
                handled.setdefault(event.key or "", []).append(value)

            def values() -> set[int]:
                return {value for each in handled.values() for value in each}

            async with app.running():
                for burst in range(4):
                    other.publish(50, start=50 * burst)
                    published.update(range(50 * burst, 50 * burst + 50))
                    other.read(5, f"pod-{burst}")
                    await until(lambda: values() == published)
                await until(lambda: other.pending() == {})
                assert set(other.consumers()) == {"onward"}
            firsts = {key: list(dict.fromkeys(each)) for key, each in handled.items()}
            assert all(each == sorted(each) for each in firsts.values())

    play(scene())


def test_the_metrics_have_the_names_and_labels_of_the_event_router(redis_server: RedisServer) -> None:
    """Checklists 000 and 001: domain and shard are labels of their own, as its queries need them."""

    async def scene() -> None:
        async with foreign(redis_server, shards=2) as stage:
            other = stage.other(1)
            other.publish(3)
            other.create()
            other.read(3)
            other.fall_silent()
            app = Onward(stage.url, **stage.options, metrics_prefix="event_router")

            @app.handler(stage.topic, group=GROUP)
            async def handle(event: Event) -> None:
                pass

            labels = f'{{domain="{stage.topic}",shard="1"}}'
            async with app.running():
                await until(lambda: f"event_router_reclaim_messages_total{labels} 3.0" in app.metrics())
                assert f"event_router_reclaim_latency_seconds_count{labels}" in app.metrics()

    play(scene())
