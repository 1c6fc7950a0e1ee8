"""A thread with a loop of its own for everything that talks to the server. Heartbeats and tokens go on there while the
application's loop is blocked."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from onward.errors import Closed
from onward.loops import new_loop

T = TypeVar("T")

_END_S = 5.0  # for tasks that are cancelled


class IoThread:
    """It starts with the first use. Coroutines run in it until their end, also if the caller was cancelled."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def run(self, coroutine: Coroutine[Any, Any, T], *, cancel: bool = False) -> T:
        """The result of the coroutine, from any loop. Cancelling this call leaves the coroutine running; with `cancel`
        the coroutine is cancelled too. Raises Closed if the thread has ended, or ends before the coroutine."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return await coroutine
        result: asyncio.Future[T] = loop.create_future()
        started: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._spawn(coroutine)
            started.append(task)
            task.add_done_callback(lambda done: _pass_on(done, loop, result))

        if not self._call(start):
            coroutine.close()
            raise Closed("the broker is closed")
        try:
            return await result
        except asyncio.CancelledError:
            if cancel:
                self._call(lambda: [task.cancel() for task in started])
            raise

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run it in the thread, and wait for nothing. It must handle its errors itself."""
        if not self._call(lambda: self._spawn(coroutine)):
            coroutine.close()

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Call the function in the thread, soon. Does nothing when the thread has ended."""
        self._call(lambda: function(*args))

    async def close(self) -> None:
        """Cancel what still runs and end the thread. Idempotent."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(loop.stop)
        await asyncio.shield(asyncio.to_thread(thread.join))

    def _call(self, function: Callable[[], object]) -> bool:
        """False if the thread has ended."""
        with self._lock:
            if self._closed:
                return False
            if self._loop is None:
                self._loop = new_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            self._loop.call_soon_threadsafe(function)
        return True

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        assert self._loop is not None, "called in the loop"
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(_ended())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()


async def _ended() -> None:
    """Cancel all tasks of the loop, and wait for them for a while."""
    await asyncio.sleep(0)  # what was posted before the end has begun
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_S)


def _pass_on(done: "asyncio.Task[T]", loop: asyncio.AbstractEventLoop, result: "asyncio.Future[T]") -> None:
    """Give the result to the loop that waits for it."""
    error = Closed("the broker is closed") if done.cancelled() else done.exception()
    with contextlib.suppress(RuntimeError):  # that loop is closed, so no task waits there
        loop.call_soon_threadsafe(_set, result, error, None if error is not None else done.result())


def _set(result: "asyncio.Future[T]", error: BaseException | None, value: Any) -> None:
    if result.done():
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)
