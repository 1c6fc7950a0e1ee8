"""Logs the code that blocks the event loop: one blocking line in an `async def` stops every handler."""

import asyncio
import logging
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Self

from onward.engines import tasks
from onward.engines.where import LIBRARIES

log = logging.getLogger("onward")

LIMIT_S = 0.1
_BEAT_S = 0.05
_QUIET_S = 60.0  # the shortest time between two log lines about the same function

_OURS = str(Path(__file__).parent.parent)
_ASYNCIO = str(Path(asyncio.__file__).parent)


class Watchdog:
    """A context manager. While it is open, a thread checks that the event loop runs, and logs code that blocks it."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="onward-watchdog", daemon=True)
        self._named: dict[CodeType, float] = {}

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._timer.cancel()
        self._thread.join(1.0)  # not for ever: it may be in a log handler that waits for this loop

    def _beat(self) -> None:
        self._ticked = time.monotonic()
        self._timer = self._loop.call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
        while not self._over.wait(_BEAT_S):
            blocked_s = time.monotonic() - self._ticked - _BEAT_S
            if blocked_s > LIMIT_S and (frame := self._frame()) is not None:
                self._name(frame, blocked_s)

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread_id)  # noqa: SLF001  # documented, despite its underscore

    def _name(self, innermost: FrameType, blocked_s: float) -> None:
        culprit = find(innermost)
        if culprit is None:
            return
        code, at = culprit.f_code, time.monotonic()
        if at - self._named.get(code, -_QUIET_S) < _QUIET_S:
            return
        self._named[code] = at
        log.warning(
            "%s has blocked the event loop for %.0f ms, at %s:%d; no other handler can run meanwhile. "
            "Use `await` there, or declare the handler with `def` (threads) or engine='processes'",
            *(code.co_qualname, blocked_s * 1000, code.co_filename, culprit.f_lineno),
        )


def find(innermost: FrameType) -> FrameType | None:
    """The frame of the handler in this stack. Without a handler, the outermost frame that the loop called.

    None: the loop itself was waiting for work, so the whole process was suspended.
    """
    stack: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    stack.reverse()
    served = [at for at, each in enumerate(stack) if each.f_code.co_filename == tasks.__file__]
    loops = [at for at, each in enumerate(stack) if _is_loop(each)]
    begin = (served or loops or [len(stack)])[-1]
    # A handler may be installed like a library. If no handler runs, skip libraries: the user cannot change them.
    others = (_OURS, _ASYNCIO) if served else (_OURS, *LIBRARIES)
    return next((each for each in stack[begin:] if not each.f_code.co_filename.startswith(others)), None)


def _is_loop(frame: FrameType) -> bool:
    """Whether this is a frame of asyncio's loop, or of the call to another loop, such as uvloop, that has no frames."""
    code = frame.f_code
    return code.co_filename.startswith(_ASYNCIO) and code.co_name in ("_run_once", "run")
