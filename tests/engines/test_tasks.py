"""What only the task engine does. The suite tests the rest."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import pytest

from onward.engines.base import Ended
from onward.engines.tasks import TaskEngine
from onward.errors import HandlerTimeout
from onward.event import Delivery, Event, Partition

Handler = Callable[[Delivery], Awaitable[None]]


def deliveries(count: int) -> list[Delivery]:
    return [Delivery(Event(str(n), "t", None, b""), Partition("t", 0), n, 1) for n in range(count)]


def position(ended: Ended) -> int:
    assert isinstance(ended.work, Delivery)
    return ended.work.position


class Run:
    def __init__(self, handler: Handler, *, concurrency: int = 10, timeout_s: float | None = None) -> None:
        self.engine = TaskEngine(handler, concurrency=concurrency, timeout_s=timeout_s)
        self.ended: list[Ended] = []
        self.calls = 0
        self.engine.start(self._ended)

    def _ended(self, results: Sequence[Ended]) -> None:
        self.ended.extend(results)
        self.calls += 1

    async def all(self, work: Sequence[Delivery]) -> list[Ended]:
        self.engine.submit(work)
        assert await self.engine.drain(60)
        await self.engine.close()
        assert sorted(position(each) for each in self.ended) == [each.position for each in work]
        return self.ended


def test_ended_runs_are_reported_in_lists() -> None:
    async def main() -> None:
        async def handler(delivery: Delivery) -> None: ...

        run = Run(handler)
        ended = await run.all(deliveries(1000))
        assert all(each.error is None and not each.cancelled for each in ended)
        assert run.calls < 40

    asyncio.run(main())


@pytest.mark.parametrize(
    "error", [ValueError("bad"), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
)
def test_any_exception_ends_its_own_event_and_no_other(error: BaseException) -> None:
    async def main() -> None:
        async def handler(delivery: Delivery) -> None:
            await asyncio.sleep(0)
            if delivery.position == 3:
                raise error

        ended = await Run(handler).all(deliveries(50))
        assert {position(each): each.error for each in ended if each.error} == {3: error}

    asyncio.run(main())


def test_each_event_runs_in_a_fresh_context() -> None:
    seen: ContextVar[int] = ContextVar("seen", default=-1)

    async def main() -> None:
        found: list[int] = []

        async def handler(delivery: Delivery) -> None:
            found.append(seen.get())
            token = seen.set(delivery.position)
            await asyncio.sleep(0)
            assert seen.get() == delivery.position
            await asyncio.create_task(_inherits(delivery.position))
            seen.reset(token)
            seen.set(delivery.position)

        async def _inherits(expected: int) -> None:
            assert seen.get() == expected

        ended = await Run(handler, concurrency=3).all(deliveries(30))
        assert not [each.error for each in ended if each.error]
        assert set(found) == {-1}

    asyncio.run(main())


def test_a_handler_that_exceeds_its_time_fails_and_its_worker_goes_on() -> None:
    async def main() -> None:
        async def handler(delivery: Delivery) -> None:
            if delivery.position % 10 == 0:
                await asyncio.sleep(30)
            async with asyncio.timeout(5):  # needs the current task to be usable
                await asyncio.sleep(0.001)

        ended = await Run(handler, concurrency=4, timeout_s=2.0).all(deliveries(40))
        late = {position(each) for each in ended if isinstance(each.error, HandlerTimeout)}
        assert late == {0, 10, 20, 30}
        assert all(each.error is None for each in ended if position(each) not in late)

    asyncio.run(main())


async def pause(waiting: asyncio.Event) -> None:
    await waiting.wait()


def test_a_timeout_names_the_line_that_the_handler_had_reached() -> None:
    async def main() -> None:
        async def handler(delivery: Delivery) -> None:
            await asyncio.wait_for(pause(asyncio.Event()), 30) if delivery.position else await pause(asyncio.Event())

        first, second = await Run(handler, timeout_s=0.05).all(deliveries(2))
        line = pause.__code__.co_firstlineno + 1
        assert str(first.error).endswith(f"timeout_s=0.05, at {__file__}:{line} in pause")
        assert f"at {__file__}:" in str(second.error)

    asyncio.run(main())


def test_a_handler_that_catches_its_cancellation_and_returns_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def handler(delivery: Delivery) -> None:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)

        ended = await Run(handler, timeout_s=0.05).all(deliveries(3))
        assert all(isinstance(each.error, HandlerTimeout) for each in ended)
        assert all("test_tasks.py" in str(each.error) for each in ended)

    with caplog.at_level(logging.WARNING, "onward"):
        asyncio.run(main())
    assert caplog.text.count("has caught its cancellation after timeout_s=0.05, and returned") == 3


def test_a_handler_that_ignores_its_cancellation_is_logged_while_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def handler(delivery: Delivery) -> None:
            while not gate.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await gate.wait()

        run = Run(handler, timeout_s=0.05)
        run.engine.submit(deliveries(1))
        async with asyncio.timeout(20):
            while "and is at" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # time for a second log line, which must not appear
        gate.set()
        assert await run.engine.drain(20)
        await run.engine.close()
        assert isinstance(run.ended[0].error, HandlerTimeout)

    with caplog.at_level(logging.WARNING, "onward"):
        asyncio.run(main())
    assert caplog.text.count("cannot be killed") == 1


def test_close_cancels_running_and_waiting_work() -> None:
    async def main() -> None:
        five = asyncio.Barrier(6)

        async def handler(delivery: Delivery) -> None:
            await five.wait()
            await asyncio.sleep(30)

        run = Run(handler, concurrency=5)
        run.engine.submit(deliveries(20))
        await five.wait()
        assert run.engine.health().busy == 5
        assert not await run.engine.drain(0.05)
        await run.engine.close()
        await run.engine.close()
        assert len(run.ended) == 20
        assert all(each.cancelled and each.error is None for each in run.ended)

    asyncio.run(main())


def test_close_does_not_wait_for_ever_for_a_handler_that_swallows_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.engines.tasks._CLOSE_S", 0.2)

    async def main() -> None:
        over = asyncio.Event()

        async def handler(delivery: Delivery) -> None:
            while not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    continue

        run = Run(handler)
        run.engine.submit(deliveries(1))
        await asyncio.sleep(0.01)
        await run.engine.close()
        assert [each.cancelled for each in run.ended] == [True]
        over.set()
        await asyncio.sleep(0.01)
        assert len(run.ended) == 1

    asyncio.run(main())


def test_a_run_that_is_cancelled_by_close_and_outlives_it_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.engines.tasks._CLOSE_S", 0.1)

    async def main() -> None:
        async def handler(delivery: Delivery) -> None:
            try:
                await asyncio.sleep(30)
            finally:
                await asyncio.sleep(0.3)

        run = Run(handler)
        run.engine.submit(deliveries(1))
        await asyncio.sleep(0.01)
        await run.engine.close()
        await asyncio.sleep(0.4)
        assert [each.cancelled for each in run.ended] == [True]

    asyncio.run(main())


def test_a_handler_that_cancels_itself_leaves_its_worker_clean() -> None:
    async def main() -> None:
        counts: list[int] = []

        async def handler(delivery: Delivery) -> None:
            me = asyncio.current_task()
            assert me is not None
            counts.append(me.cancelling())
            if delivery.position == 0:
                me.cancel()
            await asyncio.sleep(0)

        ended = await Run(handler, concurrency=1).all(deliveries(3))
        assert [type(each.error) for each in ended] == [asyncio.CancelledError, type(None), type(None)]
        assert counts == [0, 0, 0]

    asyncio.run(main())


def test_the_return_value_of_a_handler_is_ignored() -> None:
    async def main() -> None:
        async def handler(delivery: Delivery) -> Any:
            return {"anything": 1}

        assert [each.error for each in await Run(handler).all(deliveries(2))] == [None, None]

    asyncio.run(main())


def test_a_worker_that_was_cancelled_while_idle_is_replaced() -> None:
    """A library's timer that outlives the handler's call may cancel the task that the handler ran in."""

    async def main() -> None:
        async def handler(delivery: Delivery) -> None:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.01, task.cancel)

        run = Run(handler, concurrency=1)
        for count, work in enumerate(deliveries(3), 1):
            run.engine.submit([work])
            async with asyncio.timeout(20):
                while len(run.ended) < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # its timer fires meanwhile
        await run.engine.close()

    asyncio.run(main())


def test_the_loop_runs_between_handlers_that_block() -> None:
    async def main() -> None:
        async def handler(delivery: Delivery) -> None:
            time.sleep(0.01)  # noqa: ASYNC251 - blocks the loop, as a bad handler does

        run = Run(handler, concurrency=50)
        run.engine.submit(deliveries(50))
        turns = 0
        while len(run.ended) < 50:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 25
        await run.engine.close()

    asyncio.run(main())
