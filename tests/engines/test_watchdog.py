"""The log names the handler that blocks the event loop, with its line."""

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from onward import Onward
from onward.engines.watchdog import Watchdog


def work_hard() -> None:
    time.sleep(0.4)


async def blocking(order: dict[str, int]) -> None:
    await asyncio.sleep(0)
    work_hard()  # the line that is named


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line and "line_of" not in line)


def test_a_blocking_handler_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db")
    app.handler("orders", group="g")(blocking)

    async def main() -> None:
        async with app:
            await app.publish_many("orders", [("k", {"n": n}) for n in range(3)])
            running = asyncio.create_task(app.run())
            async with asyncio.timeout(20):
                while not app.readings() or app.readings()[0].done < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            app.stop()
            await running

    with caplog.at_level(logging.WARNING, "onward"):
        asyncio.run(main())
    named = [record.getMessage() for record in caplog.records if "blocked the event loop" in record.getMessage()]
    assert len(named) == 1
    assert named[0].startswith("blocking ")
    assert f"{__file__}:{line_of('# the line that is named')}" in named[0]


def test_code_that_does_not_block_is_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.engines.watchdog.LIMIT_S", 2.0)  # a busy machine may suspend us for a while

    async def main() -> None:
        with Watchdog():
            for _ in range(10):
                await asyncio.sleep(0.02)
                time.sleep(0.005)  # noqa: ASYNC251

    with caplog.at_level(logging.WARNING, "onward"):
        asyncio.run(main())
    assert not caplog.records


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_other_code_that_blocks_the_loop_is_logged_too(
    caplog: pytest.LogCaptureFixture, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        async def task() -> None:
            work_hard()

        with Watchdog():
            await asyncio.sleep(0.1)
            await asyncio.create_task(task())

    with caplog.at_level(logging.WARNING, "onward"), asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    assert "task has blocked the event loop" in caplog.text


def test_a_library_that_blocks_the_loop_is_not_blamed_on_a_handler(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with Watchdog():
            await asyncio.sleep(0.1)
            asyncio.get_running_loop().call_soon(subprocess.run, ["sleep", "0.5"])
            await asyncio.sleep(0.7)

    asyncio.run(main())
    assert "blocked the event loop" not in caplog.text
