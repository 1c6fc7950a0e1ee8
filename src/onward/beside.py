"""Runs work in its own task while the body of an `async with` runs. When one ends, the other is stopped."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

log = logging.getLogger("onward")


class Beside:
    """The body begins when the work has called `started`. When the body ends, `stop` is called and `__aexit__` waits
    for the work to end. Work that ends without an error leaves the body running.

    If the work fails, it cancels the body's task, and `__aexit__` raises the failure in place of that cancellation, as
    asyncio.TaskGroup does. If the body is cancelled, the work still stops gracefully. A second cancellation cancels the
    work too.
    """

    def __init__(
        self, work: Callable[[Callable[[], None]], Coroutine[Any, Any, None]], stop: Callable[[], None]
    ) -> None:
        self._work = work
        self._stop = stop
        self._interrupted = False  # we have cancelled the body

    async def __aenter__(self) -> asyncio.Task[None]:
        body = asyncio.current_task()
        assert body is not None
        self._body, self._cancelling = body, body.cancelling()
        started = asyncio.Event()
        self._task, starting = asyncio.create_task(self._work(started.set)), asyncio.create_task(started.wait())
        try:
            await asyncio.wait([self._task, starting], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._cut()
            raise
        finally:
            starting.cancel()
        if self._task.done():
            self._task.result()  # raises why it could not start
        self._task.add_done_callback(self._interrupt)
        return self._task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.remove_done_callback(self._interrupt)
        ours = self._interrupted and self._body.uncancel() <= self._cancelling
        self._stop()
        cut = await self._ended()
        failure = None if self._task.cancelled() else self._task.exception()
        if failure is not None:
            if not cut and (error is None or (ours and isinstance(error, asyncio.CancelledError))):
                _raise(failure)
            log.error("the handlers also failed", exc_info=failure)
        if cut:
            raise asyncio.CancelledError

    def _interrupt(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._interrupted = True
            self._body.cancel()

    async def _ended(self) -> bool:
        """Wait until the work has ended. True: we were cancelled meanwhile, and have cancelled the work."""
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            await self._cut()
            return True
        return False

    async def _cut(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


def _raise(failure: BaseException) -> None:
    """Raise the failure with its own context, without the cancellation that it replaces."""
    context = failure.__context__
    try:
        raise failure
    finally:
        failure.__context__ = context
