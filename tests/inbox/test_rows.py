"""A row per event: its effect and its mark are one transaction, on every database, sync and async."""

import asyncio
import random
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from onward.errors import BadHandler
from tests.inbox.conftest import Open
from tests.inbox.place import Gate, Place, delivery


def test_the_effect_happens_once(database: Open) -> None:
    async def scenario() -> None:
        async with database() as place:
            for _ in range(3):
                await place.call(delivery("a"))
            assert (await place.effects(), await place.marks()) == (["a"], 1)

    asyncio.run(scenario())


def test_a_run_that_fails_leaves_neither_effect_nor_mark(database: Open) -> None:
    async def scenario() -> None:
        async with database() as place:
            with pytest.raises(ValueError, match="the handler fails"):
                await place.call(delivery("a"), fails=True)
            assert (await place.effects(), await place.marks()) == ([], 0)
            await place.call(delivery("a"))
            assert await place.effects() == ["a"]

    asyncio.run(scenario())


async def duel(place: Place, *, first_fails: bool) -> None:
    """Two runs of one event at once: the second begins while the first is within its transaction."""
    gate = Gate()
    first = asyncio.create_task(place.call(delivery("a"), gate=gate, fails=first_fails))
    await gate.until_reached()
    second = asyncio.create_task(place.call(delivery("a")))
    done, _ = await asyncio.wait([second], timeout=0.3)
    assert not done  # it waits: the outcome of the first is not known yet
    gate.open.set()
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(outcomes[0], ValueError) == first_fails
    assert outcomes[1] is None
    assert (await place.effects(), await place.marks()) == (["a"], 1)


@pytest.mark.parametrize("first_fails", [False, True], ids=["commits", "rolls back"])
def test_a_duplicate_waits_for_the_first(database: Open, first_fails: bool) -> None:
    async def scenario() -> None:
        async with database() as place:
            await duel(place, first_fails=first_fails)

    asyncio.run(scenario())


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("first_fails", [False, True], ids=["commits", "rolls back"])
def test_a_duplicate_waits_at_every_isolation_level(server_database: Open, level: str, first_fails: bool) -> None:
    async def scenario() -> None:
        async with server_database(isolation_level=level) as place:
            await duel(place, first_fails=first_fails)

    asyncio.run(scenario())


@pytest.mark.parametrize("level", [None, "SERIALIZABLE"])
def test_many_duplicates_and_failures_at_once_leave_one_effect_per_event(database: Open, level: str | None) -> None:
    dice = random.Random(3)
    runs = [(name, dice.random() < 0.3) for name in range(40) for _ in range(4)]
    dice.shuffle(runs)

    async def scenario() -> None:
        async with database(**({"isolation_level": level} if level else {})) as place:
            limit = asyncio.Semaphore(8)

            async def run(name: int, fails: bool) -> None:
                async with limit:
                    await place.call(delivery(name), fails=fails)

            ends = await asyncio.gather(*(run(*each) for each in runs), return_exceptions=True)
            assert {type(end) for end in ends} <= {type(None), ValueError}
            for name in range(40):
                await place.call(delivery(name))
            assert await place.effects() == sorted(str(name) for name in range(40))

    asyncio.run(scenario())


def test_odd_ids_are_different_and_so_is_the_same_id_in_another_group(database: Open) -> None:
    names = ["a", "A", "a ", "ä", "a\x00", "", "x" * 500, "x" * 501, "\ud800"]

    async def scenario() -> None:
        async with database() as place:
            runs: list[str] = []

            def note(work: Any, _: Any) -> Any:
                runs.append(work.event.id)
                return asyncio.sleep(0) if place.is_async else None

            for name in names * 2:
                await place.run(note, delivery(name))
            assert runs == names
            await place.run(note, delivery("a"), group="shipping")
            assert len(runs) == len(names) + 1

    asyncio.run(scenario())


def test_a_cancelled_run_leaves_nothing(async_database: Open) -> None:
    async def scenario() -> None:
        async with async_database() as place:
            gate = Gate()
            run = asyncio.create_task(place.call(delivery("a"), gate=gate))
            await gate.until_reached()
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            gate.open.set()
            await place.call(delivery("a"))
            assert await place.effects() == ["a"]

    asyncio.run(scenario())


def test_the_commit_of_a_session_only_flushes(database: Open) -> None:
    async def scenario() -> None:
        async with database() as place:

            def plain(work: Any, session: Session) -> None:
                session.execute(text("INSERT INTO effect VALUES ('one')"))
                session.commit()
                session.execute(text("INSERT INTO effect VALUES ('two')"))
                raise ValueError("after its commit")

            async def asynchronous(work: Any, session: AsyncSession) -> None:
                await session.run_sync(lambda inner: plain(work, inner))

            handler = asynchronous if place.is_async else plain
            with pytest.raises(ValueError, match="after its commit"):
                await place.run(handler, delivery("a"), gives=AsyncSession if place.is_async else Session)
            assert (await place.effects(), await place.marks()) == ([], 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_handler_that_ends_the_transaction_gets_an_error_and_leaves_nothing(database: Open, end: str) -> None:
    async def scenario() -> None:
        async with database() as place:

            def plain(work: Any, connection: Connection) -> None:
                connection.execute(text("INSERT INTO effect VALUES ('half')"))
                getattr(connection, end)()

            async def asynchronous(work: Any, connection: Any) -> None:
                await connection.execute(text("INSERT INTO effect VALUES ('half')"))
                await getattr(connection, end)()

            with pytest.raises(BadHandler, match="the inbox commits"):
                await place.run(asynchronous if place.is_async else plain, delivery("a"))
            assert (await place.effects(), await place.marks()) == ([], 0)
            await place.call(delivery("a"))
            assert await place.effects() == ["a"]

    asyncio.run(scenario())
