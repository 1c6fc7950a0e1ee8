"""The process of `onward run` ends within a time of the first stop signal, or of the end of its application, whatever
its handlers have left running.

Python waits for threads that are no daemons, and asyncio for tasks that catch their cancellation, for ever.
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
_SAY_S = 1.0  # a log that blocks does not hold up the end
_MOST = 10  # threads and tasks that are named
_COMMAND_LINE = str(Path(__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_LIBRARY = str(Path(os.__file__).parent)


def limit_exit(drain_timeout_s: float) -> Callable[[], None]:
    """End this process, with exit code 1, when it still runs SPARE_S after its drain should be over. Returns what to
    call when the application has ended by itself: the process then has SPARE_S."""
    # A thread that waits from the start on: a signal handler may interrupt code that holds the lock of new threads.
    begun: SimpleQueue[_Ending] = SimpleQueue()
    threading.Thread(target=_cut_late, args=(begun,), name="onward-exit-limit", daemon=True).start()
    signals.at_first(lambda loop: begun.put(_Ending("the stop signal", drain_timeout_s + SPARE_S, loop)))
    return lambda: begun.put(_Ending("the application had ended", SPARE_S, None))


class _Ending(NamedTuple):
    what: str
    limit_s: float
    loop: asyncio.AbstractEventLoop | None


def _cut_late(begun: "SimpleQueue[_Ending]") -> None:
    what, limit_s, loop = begun.get()
    threading.Event().wait(limit_s)
    saying = threading.Thread(target=_say, args=(what, limit_s, loop), daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter starts no more threads
        saying.start()
        saying.join(_SAY_S)
    os._exit(policy.NO)


def _say(what: str, limit_s: float, loop: asyncio.AbstractEventLoop | None) -> None:
    found = [*_threads(), *(_tasks(loop) if loop is not None else ())]
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    log.error(
        "not at an end %g s after %s: the process is cut off; still running: %s%s",
        *(limit_s, what, "; ".join(found[:_MOST]) or "nothing that is known", more),
    )
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _threads() -> Iterator[str]:
    """Those that Python waits for. The main thread counts if it is in code of the application."""
    for thread in threading.enumerate():
        place = _place(thread_frames(thread.ident))
        if not thread.daemon and (place or thread is not threading.main_thread()):
            yield f"thread {thread.name}{place}"


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    for task in asyncio.all_tasks(loop):
        yield f"task {task.get_name()}{_place(coroutine_frames(task.get_coro()))}"


def _place(inwards: Sequence[FrameType]) -> str:
    """The innermost code of the application; empty: there is none. What called the command line is not the
    application's."""
    for frame in reversed(inwards):
        name = frame.f_code.co_filename
        if name.startswith(_COMMAND_LINE):
            break
        if not name.startswith((_OURS, _LIBRARY, "<frozen")):
            return f" in {frame.f_code.co_qualname} at {name}:{frame.f_lineno}"
    return ""
