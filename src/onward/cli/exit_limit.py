"""Limits how long the process of `onward run` takes to exit after the first stop signal, or after its application has
ended.

Without a limit, Python waits forever for threads that are not daemons, and asyncio for tasks that catch CancelledError.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import NamedTuple

from onward import signals
from onward.cli import policy
from onward.engines.where import coroutine_frames, thread_frames

log = logging.getLogger("onward")

SPARE_S = 5.0  # beyond drain_timeout_s
_LOG_S = 1.0  # a log handler that blocks does not delay the exit for longer
_MOST = 10  # threads and tasks to list
_COMMAND_LINE = str(Path(__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_LIBRARY = str(Path(os.__file__).parent)


def limit_exit(drain_timeout_s: float) -> Callable[[], None]:
    """End this process with exit code 1 if it still runs SPARE_S after the end of `drain_timeout_s`. Returns a function
    to call when the application has ended by itself: the process then has SPARE_S to exit."""
    # The thread starts now: a signal handler must not start one, as it may interrupt code that holds threading's lock.
    begun: SimpleQueue[_Ending] = SimpleQueue()
    threading.Thread(target=_cut_late, args=(begun,), name="onward-exit-limit", daemon=True).start()
    signals.at_first(lambda loop: begun.put(_Ending("the stop signal", drain_timeout_s + SPARE_S, loop)))
    return lambda: begun.put(_Ending("the end of the application", SPARE_S, None))


class _Ending(NamedTuple):
    cause: str
    limit_s: float
    loop: asyncio.AbstractEventLoop | None


def _cut_late(begun: "SimpleQueue[_Ending]") -> None:
    cause, limit_s, loop = begun.get()
    threading.Event().wait(limit_s)
    reporting = threading.Thread(target=_report, args=(cause, limit_s, loop), daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter starts no more threads
        reporting.start()
        reporting.join(_LOG_S)
    os._exit(policy.NO)


def _report(cause: str, limit_s: float, loop: asyncio.AbstractEventLoop | None) -> None:
    found = [*_threads(), *(_tasks(loop) if loop is not None else ())]
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    log.error(
        "the process did not exit within %g s of %s and is ended now; still running: %s%s",
        *(limit_s, cause, "; ".join(found[:_MOST]) or "nothing known", more),
    )
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _threads() -> Iterator[str]:
    """The threads that Python waits for. The main thread is listed only if it is in the application's code."""
    for thread in threading.enumerate():
        place = _place(thread_frames(thread.ident))
        if not thread.daemon and (place or thread is not threading.main_thread()):
            yield f"thread {thread.name}{place}"


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    for task in asyncio.all_tasks(loop):
        yield f"task {task.get_name()}{_place(coroutine_frames(task.get_coro()))}"


def _place(inwards: Sequence[FrameType]) -> str:
    """Where the application's innermost code is; empty if there is none. Code that called the command line does not
    count as the application's."""
    for frame in reversed(inwards):
        name = frame.f_code.co_filename
        if name.startswith(_COMMAND_LINE):
            break
        if not name.startswith((_OURS, _LIBRARY, "<frozen")):
            return f" in {frame.f_code.co_qualname} at {name}:{frame.f_lineno}"
    return ""
