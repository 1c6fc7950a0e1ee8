"""Records out of the flow, on SQLite: what the suite does not know of, the table they stand in."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from onward.brokers.base import (
    AsideRecord,
    Assigned,
    Broker,
    Failure,
    Filter,
    Message,
    Progress,
    State,
    Subscription,
    Tries,
    record_id,
)
from onward.brokers.sqlite import open_broker
from onward.errors import Backlogged
from onward.event import Delivery, Event, new_id
from onward.failure.dead import DeadLetters
from onward.settings import Settings


class Scene:
    """One topic of one partition with ten events, and a member that has received them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broker: Broker = open_broker(f"sqlite:///{path}", Settings(partitions=1, lease_s=2, takeover_grace_s=0.1))

    async def __aenter__(self) -> "Scene":
        await self.broker.publish([Event(new_id(), "orders", f"k{n % 2}", f"v{n}".encode()) for n in range(10)])
        self.subscription, self.assigned, self.deliveries = await self.join()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.broker.close()

    async def join(self) -> tuple[Subscription, Assigned, list[Delivery]]:
        subscription = await self.broker.subscribe(
            ["orders"], group="billing", member="m", ordering="key", start="earliest"
        )
        heard: list[Message] = []
        async with asyncio.timeout(40):
            while not any(isinstance(each, Delivery) for each in heard):
                heard += await subscription.receive(100, 1 << 20, 1.0)
        (assigned,) = [each for each in heard if isinstance(each, Assigned)]
        return subscription, assigned, [each for each in heard if isinstance(each, Delivery)]

    def record(self, n: int, state: State = State.DEAD, error: str = "ValueError") -> AsideRecord:
        delivery = self.deliveries[n]
        name = record_id("billing", self.assigned.log_id, delivery.partition, delivery.position)
        failure = Failure("exhausted", error, f"no stock for {n}", "Traceback", "bill", 5, 1.0, float(n))
        due = 50.0 if state is State.WAITING else None
        return AsideRecord(name, "billing", delivery.partition, n, state, due, delivery.event, Tries(failed=5), failure)

    def progress(self, watermark: int) -> Progress:
        return Progress(self.assigned.partition, self.assigned.epoch, watermark)


def test_a_record_of_an_older_release_is_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            record = scene.record(0, State.WAITING)
            await scene.subscription.settle([scene.progress(1)], aside=[record])
            older = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
            del older["wait_s"]
            with closing(sqlite3.connect(scene.path)) as db, db:
                db.execute("UPDATE onward_aside SET data = ?", (msgspec.msgpack.encode(older),))
            aside = scene.broker.aside("billing")
            assert await aside.load(scene.assigned.partition, after=None, limit=10, max_bytes=1 << 20) == [record]

    asyncio.run(scenario())


def test_a_damaged_record_is_named_and_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            records = [scene.record(n, State.WAITING) for n in range(4)]
            await scene.subscription.settle([scene.progress(4)], aside=records)
            ids = [record.id for record in records]
            with closing(sqlite3.connect(scene.path)) as db, db:
                db.execute("UPDATE onward_aside SET data = x'c1' WHERE position IN (0, 1)")
                db.execute("UPDATE onward_aside SET data = x'80' WHERE position = 2")
            aside, place = scene.broker.aside("billing"), scene.assigned.partition
            for _ in range(2):
                assert await aside.load(place, after=None, limit=1, max_bytes=1 << 20) == [records[3]]
                assert (await aside.scan(Filter(), None, 10)).records == [records[3]]
            assert await aside.move(ids, expect=State.WAITING, to=State.HELD, due=None) == 1
            told = [record.getMessage() for record in caplog.records]
            assert [text.split(" is damaged")[0] for text in told] == [f"record {name}" for name in ids[:3]]
            assert await aside.remove(ids[:1], expect=State.WAITING) == 1
            assert not await scene.subscription.settle([], gone=[ids[1]])
            with closing(sqlite3.connect(scene.path)) as db, db:
                db.execute(told[2].rpartition(": ")[2])  # the cure that it names
                assert db.execute("SELECT id FROM onward_aside").fetchall() == [(ids[3],)]

    asyncio.run(scenario())


def test_the_dead_are_counted_without_being_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            await scene.subscription.settle([scene.progress(4)], aside=[scene.record(n, State.DEAD) for n in range(4)])
            with closing(sqlite3.connect(scene.path)) as db, db:
                db.execute("UPDATE onward_aside SET data = x'c1'")  # whoever reads it complains
            topic = scene.assigned.partition.topic
            letters = DeadLetters(scene.broker, [(topic, "billing")])
            assert (await letters.tally(topic, "billing")).depth == 4
            assert await letters.count() == 4
            assert not caplog.records

    asyncio.run(scenario())


def counted(path: Path) -> tuple[int, int]:
    """What the topic says is set aside and unfinished, and what is."""
    with closing(sqlite3.connect(path)) as db:
        (said,) = db.execute("SELECT aside FROM onward_topic").fetchone()
        (found,) = db.execute(
            "SELECT coalesce(sum(length(data)), 0) FROM onward_aside WHERE state != 'dead'"
        ).fetchone()
        return said, found


def test_what_is_set_aside_is_counted_through_all_its_changes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            seen: list[int] = []

            def look() -> None:
                said, found = counted(scene.path)
                assert said == found
                seen.append(said)

            aside, records = scene.broker.aside("billing"), [scene.record(n, State.HELD) for n in range(4)]
            for written in (
                records,
                records,
                [scene.record(1, State.DEAD)],
                [scene.record(2, State.WAITING, "E" * 99)],
            ):
                await scene.subscription.settle([scene.progress(4)], aside=written)
                look()
            await aside.move([records[1].id], expect=State.DEAD, to=State.WAITING, due=1.0)
            look()
            await aside.remove([records[1].id], expect=State.WAITING)
            look()
            await scene.subscription.settle([], gone=[records[2].id])
            look()
            assert seen[0] == seen[1] > seen[2] < seen[3] < seen[4] > seen[5] > seen[6] > 0
            await scene.subscription.close()
            await scene.broker.drop_group("orders", "billing")
            look()
            assert seen[-1] == 0

    asyncio.run(scenario())


def test_what_is_set_aside_counts_as_backlog(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            records = [scene.record(n, State.HELD) for n in range(10)]
            await scene.subscription.settle([scene.progress(10)], aside=records)
            said, _ = counted(scene.path)
            other = open_broker(f"sqlite:///{scene.path}", Settings(partitions=1, max_backlog_bytes=said + 10))
            event = Event(new_id(), "orders", "k0", b"more")
            with pytest.raises(Backlogged, match="set aside"):
                await other.publish([event])
            await scene.broker.aside("billing").remove([record.id for record in records], expect=State.HELD)
            await other.publish([event])
            await other.close()

    asyncio.run(scenario())
