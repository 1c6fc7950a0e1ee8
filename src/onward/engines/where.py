"""Finds the line of the application's own code that a handler has reached, for a run that exceeds its time."""

import site
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = Path(__file__).parent.parent
_TASK_ENGINE = str(_OURS / "engines" / "tasks.py")
_APPLICATIONS = (str(_OURS / "demo"), str(_OURS / "testing"))  # these parts of the package have handlers of their own
LIBRARIES = (*(str(Path(path)) for path in (*site.getsitepackages(), sysconfig.get_path("stdlib"))), "<frozen")
_NEXT = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))


def in_thread(thread_id: int | None) -> str:
    """The line that a thread of this process has reached; empty: it has ended."""
    return _line(thread_frames(thread_id))


def in_coroutine(steps: Any) -> str:
    """The line at which a suspended coroutine waits; empty: it has ended."""
    return _line(coroutine_frames(steps))


def thread_frames(thread_id: int | None) -> list[FrameType]:
    """The frames of a thread of this process, the innermost last."""
    frame = sys._current_frames().get(thread_id or 0)  # noqa: SLF001  # documented, despite its underscore
    outwards: list[FrameType] = []
    while frame is not None:
        outwards.append(frame)
        frame = frame.f_back
    return outwards[::-1]


def coroutine_frames(steps: Any) -> list[FrameType]:
    """The frames of a suspended coroutine, the innermost last."""
    inwards: list[FrameType] = []
    while steps is not None:
        frame, steps = next(
            ((getattr(steps, at), getattr(steps, then)) for at, then in _NEXT if hasattr(steps, at)), (None, None)
        )
        if frame is not None:
            inwards.append(frame)
            if frame.f_code.co_filename == _TASK_ENGINE:  # it runs a handler's steps itself, without `await`
                steps = frame.f_locals.get("steps") or steps
    return inwards


def _line(inwards: list[FrameType]) -> str:
    """The innermost frame of the application. Without one, that of a library; without that, any frame."""
    for skipped in ((str(_OURS), *LIBRARIES), (str(_OURS), *LIBRARIES[-2:]), ()):
        for frame in reversed(inwards):
            code = frame.f_code
            if code.co_filename.startswith(_APPLICATIONS) or not code.co_filename.startswith(skipped):
                return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
    return ""
