"""Records out of the flow, on SQLite: set aside with the progress, browsed, moved, heard of by the owner."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onward.brokers.base import (
    AsideRecord,
    Assigned,
    Broker,
    Failure,
    Filter,
    Message,
    Moved,
    Progress,
    State,
    Subscription,
    Tries,
    record_id,
)
from onward.brokers.sqlite import open_broker
from onward.errors import AsideError, Backlogged
from onward.event import Delivery, Event, new_id
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
        async with asyncio.timeout(10):
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

    async def moved(self) -> list[Moved]:
        async with asyncio.timeout(5):
            while True:
                heard = await self.subscription.receive(100, 1 << 20, 1.0)
                if found := [each for each in heard if isinstance(each, Moved)]:
                    return found


def test_records_are_set_aside_with_the_progress_and_gone_when_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            states = [State.WAITING, State.HELD, State.DEAD, State.HELD]
            records = [scene.record(n, state) for n, state in enumerate(states)]
            assert not await scene.subscription.settle([scene.progress(4)], aside=records)
            aside, place = scene.broker.aside("billing"), scene.assigned.partition
            assert await aside.load(place, after=None, limit=10, max_bytes=1 << 20) == [
                records[0],
                records[1],
                records[3],
            ]
            assert await aside.load(place, after=0, limit=1, max_bytes=1 << 20) == [records[1]]
            assert await aside.load(place, after=None, limit=10, max_bytes=1) == [records[0]]
            assert not await scene.broker.aside("other").load(place, after=None, limit=10, max_bytes=1 << 20)
            assert not await scene.subscription.settle([], gone=[records[0].id, "never heard of"])
            assert await aside.load(place, after=None, limit=10, max_bytes=1 << 20) == [records[1], records[3]]
            assert not await scene.subscription.settle([scene.progress(4)], aside=[scene.record(1, State.DEAD)])
            assert await aside.load(place, after=None, limit=10, max_bytes=1 << 20) == [records[3]]

    asyncio.run(scenario())


def test_a_former_owner_sets_nothing_aside_and_removes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            await scene.subscription.settle([scene.progress(1)], aside=[scene.record(0)])
            with closing(sqlite3.connect(scene.path)) as db, db:
                db.execute("UPDATE onward_group SET owner = 'rival', fence = fence + 1")
            lost = await scene.subscription.settle(
                [scene.progress(5)], aside=[scene.record(1)], gone=[scene.record(0).id]
            )
            assert lost == [scene.assigned.partition]
            assert await scene.subscription.settle([], gone=[scene.record(0).id]) == [scene.assigned.partition]
            page = await scene.broker.aside("billing").scan(Filter(), None, 10)
            assert page.records == [scene.record(0)]
            (group,) = await scene.broker.groups("orders")
            assert group.watermarks == {0: 1}

    asyncio.run(scenario())


def test_when_a_record_cannot_be_stored_nothing_of_the_call_is_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            with closing(sqlite3.connect(scene.path)) as db, db:
                db.execute("CREATE TRIGGER no BEFORE INSERT ON onward_aside BEGIN SELECT RAISE(ABORT, 'no'); END")
            with pytest.raises(AsideError):
                await scene.subscription.settle([scene.progress(3)], aside=[scene.record(2)])
            (group,) = await scene.broker.groups("orders")
            assert group.watermarks == {0: 0}
            assert not await scene.subscription.settle([scene.progress(2)])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"states": frozenset({State.HELD})}, [1]),
        ({"topic": "orders", "key": "k0"}, [0, 2, 4]),
        ({"topic": "payments"}, []),
        ({"error": "KeyError"}, [4]),
        ({"text": "stock for 3"}, [3]),
        ({"text": "v2"}, [2]),
        ({"since": 2.0, "until": 4.0}, [2, 3]),
    ],
)
def test_scan_filters_and_pages(tmp_path: Path, where: dict[str, Any], expected: list[int]) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            records = [scene.record(n, error="KeyError" if n == 4 else "ValueError") for n in range(6)]
            records[1] = scene.record(1, State.HELD)
            await scene.subscription.settle([scene.progress(6)], aside=records)
            aside, after, found = scene.broker.aside("billing"), None, []
            while True:
                page = await aside.scan(Filter(**where), after, 2)
                found += [record.position for record in page.records]
                after = page.after
                if after is None:
                    break
                # What goes meanwhile hides nothing of the rest.
                await scene.subscription.settle([], gone=[page.records[-1].id])
            assert found == expected

    asyncio.run(scenario())


def test_a_move_compares_and_the_owner_hears_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            await scene.subscription.settle([scene.progress(4)], aside=[scene.record(n) for n in range(4)])
            ids = [scene.record(n).id for n in range(4)]
            other = open_broker(f"sqlite:///{scene.path}", Settings(partitions=1))
            aside = other.aside("billing")
            assert await aside.move(ids[:2], expect=State.WAITING, to=State.DEAD, due=None) == 0
            assert await aside.move([*ids[:2], "nobody"], expect=State.DEAD, to=State.WAITING, due=7.0) == 2
            assert await aside.move(ids[:2], expect=State.DEAD, to=State.WAITING, due=8.0) == 0
            (moved,) = await scene.moved()
            assert moved == Moved(scene.assigned.partition, scene.assigned.epoch, ids[:2], State.WAITING, 7.0)
            assert await aside.remove(ids, expect=State.DEAD) == 2
            (removed,) = await scene.moved()
            assert removed == Moved(scene.assigned.partition, scene.assigned.epoch, ids[2:], None, None)
            loaded = await aside.load(scene.assigned.partition, after=None, limit=10, max_bytes=1 << 20)
            assert [(each.state, each.due) for each in loaded] == [(State.WAITING, 7.0)] * 2
            await other.close()

    asyncio.run(scenario())


def test_a_dropped_group_takes_its_records_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(tmp_path / "shop.db") as scene:
            await scene.subscription.settle([scene.progress(1)], aside=[scene.record(0)])
            await scene.subscription.close()
            await scene.broker.drop_group("orders", "billing")
            assert not (await scene.broker.aside("billing").scan(Filter(), None, 10)).records
            assert not await scene.broker.groups("orders")

    asyncio.run(scenario())


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
