"""The effects: a row is committed when the call returns, and a cancelled caller does not affect the others."""

import asyncio
import sqlite3
from pathlib import Path

from onward.demo import effects
from onward.demo.effects import Effects, Subject


def rows(folder: Path) -> list[tuple[int, str]]:
    db = sqlite3.connect(folder / effects.FILE)
    try:
        return db.execute("SELECT number, outcome FROM effects ORDER BY seq").fetchall()
    finally:
        db.close()


def test_a_row_is_committed_when_the_call_returns_and_attempts_are_counted(tmp_path: Path) -> None:
    async def work() -> None:
        pen = Effects(tmp_path, 1)
        assert pen.attempt(7) == 1
        await pen.failed(Subject(7, "a", 1, 0.0), 1)
        assert rows(tmp_path) == [(7, "failed")]
        other = Effects(tmp_path, 2)
        assert other.attempt(7) == 2
        other.close()
        pen.close()

    effects.create(tmp_path)
    asyncio.run(work())


def test_the_rows_of_one_turn_share_a_commit_that_a_cancelled_caller_does_not_undo(tmp_path: Path) -> None:
    async def work() -> None:
        pen = Effects(tmp_path, 1)
        tasks = [asyncio.create_task(pen.done(Subject(number, "a", number, 0.0), 1)) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None)]
        assert rows(tmp_path) == [(0, "done"), (1, "done"), (2, "done")]
        pen.close()

    effects.create(tmp_path)
    asyncio.run(work())
