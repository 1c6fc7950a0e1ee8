"""The table of the aside on SQLite, which the suite for all brokers does not test."""

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
    """A topic with one partition and ten events, and a member that has received them."""

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
        messages: list[Message] = []
        async with asyncio.timeout(40):
            while not any(isinstance(each, Delivery) for each in messages):
                messages += await subscription.receive(100, 1 << 20, 1.0)
        (assigned,) = [each for each in messages if isinstance(each, Assigned)]
        return subscription, assigned, [each for each in messages if isinstance(each, Delivery)]

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


def test_a_damaged_record_is_logged_once_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
            logged = [record.getMessage() for record in caplog.records]
            assert [text.split(" is damaged")[0] for text in logged] == [f"record {name}" for name in ids[:3]]
            assert await aside.remove(ids[:1], expect=State.WAITING) == 1
            assert not await scene.subscription.settle([], gone=[ids[1]])
            with closing(sqlite3.connect(scene.path)) as db, db:
                db.execute(logged[2].rpartition(": ")[2])  # the statement that the message suggests
                assert db.execute("SELECT id FROM onward_aside").fetchall() == [(ids[3],)]

    asyncio.run(scenario())


def test_dead_letters_are_counted_without_reading_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            await scene.subscription.settle([scene.progress(4)], aside=[scene.record(n, State.DEAD) for n in range(4)])
            with closing(sqlite3.connect(scene.path)) as db, db:
                db.execute("UPDATE onward_aside SET data = x'c1'")  # reading it would log a warning
            topic = scene.assigned.partition.topic
            letters = DeadLetters(scene.broker, [(topic, "billing")])
            assert (await letters.tally(topic, "billing")).depth == 4
            assert await letters.count() == 4
            assert not caplog.records

    asyncio.run(scenario())


def counted(path: Path) -> tuple[int, int]:
    """The bytes of waiting and held records: as the topic's counter has them, and as their sum."""
    with closing(sqlite3.connect(path)) as db:
        (counter,) = db.execute("SELECT aside FROM onward_topic").fetchone()
        (found,) = db.execute(
            "SELECT coalesce(sum(length(data)), 0) FROM onward_aside WHERE state != 'dead'"
        ).fetchone()
        return counter, found


def test_the_counter_of_aside_bytes_follows_every_change_of_a_record(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            seen: list[int] = []

            def look() -> None:
                counter, found = counted(scene.path)
                assert counter == found
                seen.append(counter)

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


def test_held_records_count_as_backlog(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            records = [scene.record(n, State.HELD) for n in range(10)]
            await scene.subscription.settle([scene.progress(10)], aside=records)
            counter, _ = counted(scene.path)
            other = open_broker(f"sqlite:///{scene.path}", Settings(partitions=1, max_backlog_bytes=counter + 10))
            event = Event(new_id(), "orders", "k0", b"more")
            with pytest.raises(Backlogged, match="set aside"):
                await other.publish([event])
            await scene.broker.aside("billing").remove([record.id for record in records], expect=State.HELD)
            await other.publish([event])
            await other.close()

    asyncio.run(scenario())
