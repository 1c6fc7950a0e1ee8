"""The aside on Kafka: how much memory it uses, and foreign or missing entries in its topic."""

import asyncio
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from onward.brokers.base import AsideRecord, Failure, Filter, State, Tries, record_id
from onward.brokers.kafka.aside_log import AsideLog
from onward.brokers.kafka.aside_topics import AsideTopics, topic_name
from onward.brokers.kafka.record_bodies import RecordBodies
from onward.brokers.kafka.topics import Cluster, KafkaTopic, KafkaTopics
from onward.errors import AsideError
from onward.event import Event, Partition
from onward.failure.dead import DeadLetters
from onward.settings import load
from onward.testing.aside import GROUP, Owner, scanned
from onward.testing.scenario import Kit, scenario
from tests.brokers.kafka import KafkaHarness, harness

__all__ = ["harness"]

BUDGET = 4 << 20
LARGE = 50_000
MANY = 2_000
_PAGE = 50


def large(owner: Owner, n: int, state: State) -> AsideRecord:
    value = n.to_bytes(4) * (LARGE // 4)
    name = record_id(GROUP, owner.assigned.log_id, owner.partition, n)
    event = Event(f"event-{n}", owner.partition.topic, f"key-{n % 10}", value)
    return msgspec.structs.replace(owner.record(0, state), id=name, position=n, event=event)


async def drained(owner: Owner, **options: Any) -> list[tuple[int, str]]:
    """Position and event id of every record, read page by page. The records themselves are not stored."""
    found: list[tuple[int, str]] = []
    after = None
    while page := await owner.aside.load(owner.partition, after=after, limit=_PAGE, max_bytes=BUDGET, **options):
        assert sum(record.event.size for record in page) <= BUDGET
        assert all(record.event.value == record.position.to_bytes(4) * (LARGE // 4) for record in page)
        found += [(record.position, record.event.id) for record in page]
        after = page[-1].position
    return found


async def foreign(kit: Kit, messages: Sequence[tuple[bytes, bytes]], **headers: bytes) -> list[int]:
    """Write into the aside as another program. Returns the offsets."""
    producer = Producer({"bootstrap.servers": cast("KafkaHarness", kit.harness).bootstrap})
    offsets: list[int] = []
    for key, value in messages:
        producer.produce(
            topic_name(GROUP, kit.topic),
            value,
            key,
            0,
            lambda _, message: offsets.append(message.offset()),
            headers=[(name.replace("_", "-"), each) for name, each in headers.items()],
        )
    assert await asyncio.to_thread(producer.flush, 30) == 0
    assert min(offsets) >= 0, "refused"
    return offsets


class TestMemory:
    @pytest.mark.slow
    @scenario(max_in_flight_bytes=BUDGET)
    async def test_many_large_records_do_not_stay_in_memory(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 1)
        states = [State.DEAD, State.HELD]
        tracemalloc.start()
        try:
            for start in range(0, MANY, _PAGE):
                await owner.set_aside([large(owner, n, states[n % 2]) for n in range(start, start + _PAGE)])
            expected = [(n, f"event-{n}") for n in range(MANY)]
            assert await drained(owner, dead=True) == expected
            assert await drained(owner) == expected[1::2]
            shown = 0
            after = None
            while True:
                page = await owner.aside.scan(Filter(text="no stock"), after, 1_000)
                shown += len(page.records)
                after = page.after
                if after is None:
                    break
            assert shown == MANY // 2
            del page
            used, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert used < BUDGET + 4 * 1_000 * MANY, f"{used:,} bytes of {MANY * LARGE:,} are in memory"
        assert peak < 64 << 20, f"{peak:,} bytes at most"

    @scenario(max_in_flight_bytes=1)
    async def test_a_record_whose_body_is_not_in_memory_can_be_moved_and_rewritten(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 4)
        await owner.set_aside([owner.record(n) for n in range(4)], 4)
        ids = [owner.record(n).id for n in range(4)]
        assert await owner.aside.move(ids[1:2], expect=State.DEAD, to=State.WAITING, due=7.0) == 1
        assert await owner.aside.remove(ids[2:3], expect=State.DEAD) == 1
        again = owner.record(3, State.HELD)
        await owner.set_aside([again])
        found = await scanned(owner.broker)
        assert [(record.id, record.state, record.due) for record in found] == [
            (ids[0], State.DEAD, None),
            (ids[1], State.WAITING, 7.0),
            (ids[3], State.HELD, None),
        ]
        assert found[2] == again
        assert await owner.loaded() == found[1:]


class TestRefused:
    @scenario(max_in_flight_bytes=1, client={"batch.num.messages": 1})
    async def test_records_stored_with_a_refused_one_of_their_partition_are_undone(self, kit: Kit) -> None:
        """One record is new and is removed again. One replaced an older record, which is restored."""
        owner = await Owner.of(kit, 4)
        older = owner.record(0, State.WAITING)
        await owner.set_aside([older], 1)
        failure = msgspec.structs.replace(cast("Failure", owner.record(2).failure), message="x" * 500_000)
        refused = msgspec.structs.replace(owner.record(2), failure=failure)
        records = [owner.record(0), owner.record(1), refused]
        harness = cast("KafkaHarness", kit.harness)
        with harness.refuse_aside(larger_than=100_000), pytest.raises(AsideError, match="too large") as raised:
            await owner.member.subscription.settle([owner.progress(3)], aside=records, gone=[older.id])
        assert raised.value.partitions == (owner.partition,)
        assert await scanned(owner.broker) == [older]
        await owner.set_aside(records[1:2], 2)
        assert await scanned(owner.broker) == [older, records[1]]


class TestCount:
    @scenario(max_in_flight_bytes=1)
    async def test_dead_letters_are_counted_without_reading_them(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 4)
        await owner.set_aside([owner.record(n) for n in range(4)], 4)
        letters = DeadLetters(owner.broker, [(kit.topic, GROUP)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RecordBodies, "read", _unread)
            assert (await letters.tally(kit.topic, GROUP)).depth == 4
            assert await letters.count(key="key-0") == 4
            with pytest.raises(AssertionError, match="was read"):
                await letters.count(text="stock")


def _unread(*_: object) -> None:
    raise AssertionError("a body was read")


class TestRemoved:
    """Records that compaction removes. The tests delete them by hand, because the time of a compaction is unknown."""

    log: pytest.LogCaptureFixture

    @pytest.fixture(autouse=True)
    def _listen(self, caplog: pytest.LogCaptureFixture) -> None:
        self.log = caplog

    async def cut(self, kit: Kit, offset: int) -> None:
        harness, name = cast("KafkaHarness", kit.harness), topic_name(GROUP, kit.topic)
        change = ConfigEntry("cleanup.policy", "compact,delete", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[change])
        await asyncio.to_thread(harness.admin.incremental_alter_configs([resource])[resource].result, 30)
        await asyncio.to_thread(_delete, harness, TopicPartition(name, 0, offset))

    @scenario(max_in_flight_bytes=1, partitions=1)
    async def test_the_newer_record_of_an_id_is_read_in_place_of_a_removed_one(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 3)
        await owner.set_aside([owner.record(n, State.HELD) for n in range(3)], 3)
        aside = AsideLog(Cluster.at(kit.harness.url, load(kit.harness.url, max_in_flight_bytes=1)), GROUP)
        with aside.reading([owner.partition]) as tables:
            rows = list(tables[owner.partition].above(-1))
        again = [owner.record(n, State.HELD, tries=Tries(failed=9)) for n in range(2)]
        await owner.set_aside(again)
        await owner.gone(owner.record(2).id)
        await self.cut(kit, rows[-1].offset + 1)
        assert aside.records(owner.partition, rows) == again
        aside.close()
        assert not [each for each in self.log.records if each.levelname == "ERROR"]

    @scenario(max_in_flight_bytes=1)
    async def test_a_record_that_was_deleted_from_the_log_is_reported_and_stops_no_other(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 3)
        await owner.set_aside([owner.record(n, State.HELD) for n in range(2)], 2)
        assert len(await owner.loaded()) == 2
        await self.cut(kit, -1)
        await owner.set_aside([owner.record(2, State.HELD)], 3)
        assert await owner.loaded() == [owner.record(2, State.HELD)]
        lost = [each.getMessage() for each in self.log.records if each.levelname == "ERROR"]
        assert [owner.record(n).id in lost[n] and topic_name(GROUP, kit.topic) in lost[n] for n in range(2)] == [
            True,
            True,
        ]


def _delete(harness: KafkaHarness, place: TopicPartition) -> None:
    """Delete records as soon as the log uses its new setting, which allows it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            harness.admin.delete_records([place])[place].result(30)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.POLICY_VIOLATION or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


JUNK = [(b"\xff\xfe", b"junk"), (b"foreign", b"junk"), (b"!move:foreign", b"junk")]


class TestForeign:
    log: pytest.LogCaptureFixture

    @pytest.fixture(autouse=True)
    def _listen(self, caplog: pytest.LogCaptureFixture) -> None:
        self.log = caplog

    def reported(self, kit: Kit, offset: int) -> bool:
        return f"{topic_name(GROUP, kit.topic)}/0: the entry at offset {offset} " in self.log.text

    @scenario(partitions=1)
    async def test_records_are_read_after_foreign_bytes_at_the_beginning(self, kit: Kit) -> None:
        broker = await kit.broker()
        await broker.publish(kit.events(3))
        await broker.aside(GROUP).load(Partition(kit.topic, 0), after=None, limit=1, max_bytes=1)  # creates the topic
        offsets = await foreign(kit, JUNK) + await foreign(kit, [(b"x", b"junk")], onward_fence=b"junk")
        member = await (await kit.member(broker, GROUP)).hold(1)
        owner = Owner(broker, member, (await member.take(3))[:3])
        records = [owner.record(0), owner.record(1, State.HELD)]
        await owner.set_aside(records, 2)
        assert await scanned(owner.broker) == records
        assert all(self.reported(kit, offset) for offset in offsets), self.log.text

    @scenario()
    async def test_all_records_are_read_with_foreign_bytes_between_them(self, kit: Kit) -> None:
        owner = await Owner.of(kit, 6)
        records = [owner.record(n, State.HELD) for n in range(5)]
        await owner.set_aside(records[:3], 3)
        late = {"onward_fence": str(owner.assigned.fence).encode()}
        offsets = await foreign(kit, [*JUNK, (records[1].id.encode(), b"junk")], **late)
        await owner.set_aside(records[3:], 5)
        assert await owner.loaded() == records
        assert await scanned(await kit.broker(partitions=1)) == records
        assert all(self.reported(kit, offset) for offset in offsets), self.log.text
        await owner.member.subscription.close()
        again = await (await kit.member(await kit.broker(partitions=1), GROUP)).hold(1)
        assert [record.position for record in await owner.loaded()] == [record.position for record in records]
        await again.take(1)
        assert again.values == [5]


class LateTopics:
    """A cluster whose node does not show the new topic yet."""

    def __init__(self) -> None:
        self.created: list[tuple[str, int]] = []

    def described(self, name: str) -> None:
        return None

    def appeared(self, name: str) -> KafkaTopic:
        return KafkaTopic(name, "log", 4)

    def create(self, name: str, partitions: int, config: dict[str, str]) -> KafkaTopic:
        self.created.append((name, partitions))
        return KafkaTopic(name, "log", partitions)


def test_a_topic_that_its_node_does_not_show_yet_gets_its_aside() -> None:
    topics = LateTopics()
    asides = AsideTopics(cast("KafkaTopics", topics), load("kafka://localhost:1"), GROUP)
    assert asides.prepare("orders", 3), "otherwise the new owner would not mark the aside as its own"
    assert topics.created == [(topic_name(GROUP, "orders"), 4)]
