"""The cursor of a batch handler, on every database: gaps, former owners, and recreated logs."""

import asyncio

import pytest

from onward.brokers.base import Progress
from onward.errors import BadStore, Superseded
from onward.event import Partition
from onward.inbox.cursor import MAX_INTERVALS
from tests.inbox.conftest import Open
from tests.inbox.place import Gate, Place, batch, delivery


def test_only_events_that_are_not_done_run(database: Open) -> None:
    async def scenario() -> None:
        async with database() as place:
            await place.call(batch(0, 1, 4))
            await place.call(batch(0, 1, 2, 4, 5))
            await place.call(batch(2, 5))
            assert await place.effects() == ["e0", "e1", "e2", "e4", "e5"]
            assert await place.cursors() == [("log", 1, "0-3 4-6")]
            assert await place.marks() == 0

    asyncio.run(scenario())


def test_a_batch_that_fails_leaves_neither_effects_nor_marks(database: Open) -> None:
    async def scenario() -> None:
        async with database() as place:
            await place.call(batch(0))
            with pytest.raises(ValueError, match="the handler fails"):
                await place.call(batch(1, 2), fails=True)
            assert await place.cursors() == [("log", 1, "0-1")]
            await place.call(batch(0, 1, 2))
            assert await place.effects() == ["e0", "e1", "e2"]

    asyncio.run(scenario())


def test_an_outdated_memory_of_the_cursor_is_noticed(database: Open) -> None:
    """After a rollback, and after another process wrote with the same fence or a newer one."""

    async def scenario() -> None:
        async with database() as place:
            other = Place(place.engine)
            await place.call(batch(0))
            with pytest.raises(ValueError, match="the handler fails"):
                await place.call(batch(1, 2), fails=True)
            await place.call(batch(3))
            assert await place.cursors() == [("log", 1, "0-1 3-4")]
            await other.call(batch(4, 5))
            await place.call(batch(5, 6))
            assert await place.cursors() == [("log", 1, "0-1 3-7")]
            await other.call(batch(7, fence=2))
            with pytest.raises(Superseded):
                await place.call(batch(7, 8))
            assert await place.effects() == ["e0", "e3", "e4", "e5", "e6", "e7"]

    asyncio.run(scenario())


@pytest.mark.parametrize("first_fails", [False, True], ids=["commits", "rolls back"])
def test_the_batches_of_one_partition_wait_for_each_other(database: Open, first_fails: bool) -> None:
    async def scenario() -> None:
        async with database() as place:
            gate = Gate()
            first = asyncio.create_task(place.call(batch(0, 1), gate=gate, fails=first_fails))
            await gate.until_reached()
            second = asyncio.create_task(place.call(batch(1, 2)))
            done, _ = await asyncio.wait([second], timeout=0.3)
            assert not done
            gate.open.set()
            await asyncio.gather(first, return_exceptions=True)
            await second
            assert await place.effects() == (["e1", "e2"] if first_fails else ["e0", "e1", "e2"])

    asyncio.run(scenario())


def test_a_former_owner_is_fenced(database: Open) -> None:
    async def scenario() -> None:
        async with database() as place:
            await place.call(batch(0, fence=7))
            await place.call(batch(1, fence=8))
            with pytest.raises(Superseded, match="fence 7 is outdated, fence 8"):
                await place.call(batch(2, 3, fence=7))
            assert await place.effects() == ["e0", "e1"]
            await place.call(batch(2, 3, fence=8))
            assert await place.cursors() == [("log", 8, "0-4")]

    asyncio.run(scenario())


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_former_owner_that_waits_for_the_new_one_is_fenced(server_database: Open, level: str) -> None:
    async def scenario() -> None:
        async with server_database(isolation_level=level) as place:
            await place.call(batch(0, fence=7))
            gate = Gate()
            new = asyncio.create_task(place.call(batch(1, 2, fence=8), gate=gate))
            await gate.until_reached()
            former = asyncio.create_task(place.call(batch(1, 2, 3, fence=7)))
            done, _ = await asyncio.wait([former], timeout=0.3)
            assert not done
            gate.open.set()
            await new
            with pytest.raises(Superseded):
                await former
            assert await place.effects() == ["e0", "e1", "e2"]

    asyncio.run(scenario())


def test_a_recreated_log_has_its_own_cursor(database: Open) -> None:
    async def scenario() -> None:
        async with database() as place:
            await place.call(batch(0, 1))
            await place.call(batch(0, 1, log_id="newer"))
            assert await place.effects() == ["e0", "e0", "e1", "e1"]

    asyncio.run(scenario())


def test_an_event_from_the_aside_is_marked_by_a_row(database: Open) -> None:
    async def scenario() -> None:
        async with database() as place:
            await place.call(batch(5, 6))
            for _ in range(2):
                await place.call((delivery("e3", position=3, drawn=True), delivery("e5", position=5, drawn=True)))
            assert await place.effects() == ["e3", "e5", "e6"]
            assert (await place.cursors(), await place.marks()) == ([("log", 1, "5-7")], 1)

    asyncio.run(scenario())


def test_the_cursor_stays_small_on_a_log_with_holes(sqlite_database: Open) -> None:
    async def scenario() -> None:
        async with sqlite_database() as place:
            for start in range(0, 10_000, 1_000):
                await place.call(batch(*range(start, start + 1_000, 10)))
                place.inbox.settled("billing", [Progress(Partition("orders", 0), 1, start)])
            ((_, _, done),) = await place.cursors()
            assert len(done.split()) <= MAX_INTERVALS
            before = await place.effects()
            await place.call(batch(*range(9_000, 10_000, 10)))
            assert await place.effects() == before

    asyncio.run(scenario())


@pytest.mark.parametrize("missing", [{"fence": None}, {"log_id": ""}])
def test_a_batch_without_fence_or_log_is_refused(sqlite_database: Open, missing: dict[str, str | None]) -> None:
    async def scenario() -> None:
        async with sqlite_database() as place:
            with pytest.raises(BadStore, match="no fence or no log"):
                await place.call(batch(0, **missing))

    asyncio.run(scenario())
