"""The thread for I/O: coroutines run in it from any loop, and end with it."""

import asyncio
import threading
import time

import pytest

from onward.brokers.rabbitmq.io_thread import IoThread
from onward.errors import Closed
from tests.brokers.rabbitmq.stage import played, until


@played
async def test_a_coroutine_runs_in_the_thread_and_its_result_or_error_comes_back() -> None:
    io = IoThread("io")

    async def where(error: Exception | None = None) -> str:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return threading.current_thread().name

    async def nested() -> str:
        return await io.run(where())

    assert await io.run(where()) == "io"
    assert await io.run(nested()) == "io"
    with pytest.raises(LookupError, match="gone"):
        await io.run(where(LookupError("gone")))
    await io.close()


@played
async def test_a_cancelled_caller_leaves_the_coroutine_running_unless_it_asks_for_more() -> None:
    io, ended = IoThread("io"), dict[bool, str]()

    async def work(cancel: bool) -> None:
        try:
            await asyncio.sleep(0.1)
            ended[cancel] = "done"
        except asyncio.CancelledError:
            ended[cancel] = "cancelled"
            raise

    for cancel in (False, True):
        call = asyncio.ensure_future(io.run(work(cancel), cancel=cancel))
        await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await until(lambda: len(ended) == 2)
    assert ended == {False: "done", True: "cancelled"}
    await io.close()


@played
async def test_work_goes_on_while_the_loop_of_the_caller_is_blocked() -> None:
    io, ticks = IoThread("io"), list[float]()

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    io.spawn(tick())
    await until(lambda: ticks)
    seen = len(ticks)
    time.sleep(0.3)  # noqa: ASYNC251 - the loop is blocked
    assert len(ticks) > seen + 5
    await io.close()


@played
async def test_the_end_of_the_thread_ends_what_runs_in_it() -> None:
    io = IoThread("io")
    call = asyncio.ensure_future(io.run(asyncio.sleep(100)))
    await asyncio.sleep(0.02)
    await io.close()
    with pytest.raises(Closed):
        await call
    with pytest.raises(Closed):
        await io.run(asyncio.sleep(0))
    io.post(pytest.fail)
    io.spawn(asyncio.sleep(0))
    await io.close()
    assert "io" not in [thread.name for thread in threading.enumerate()]


def test_a_loop_that_ended_before_its_answer_came_hurts_nobody() -> None:
    io = IoThread("io")

    async def fail_late() -> None:
        await asyncio.sleep(0.1)
        raise LookupError("nobody waits for this")

    async def leave() -> None:
        asyncio.ensure_future(io.run(fail_late()))  # noqa: RUF006 - asyncio.run cancels it
        await asyncio.sleep(0.02)

    asyncio.run(leave())
    time.sleep(0.2)
    asyncio.run(io.close())
