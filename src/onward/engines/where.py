"""Where a handler is: the line of the application's own code that it has reached, for a run over its time."""

import site
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = Path(__file__).parent.parent
_APPLICATIONS = (str(_OURS / "demo"), str(_OURS / "testing"))  # of this package, but no part of the path to a handler
LIBRARIES = (*(str(Path(path)) for path in (*site.getsitepackages(), sysconfig.get_path("stdlib"))), "<frozen")
_NEXT = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))


def in_thread(thread_id: int | None) -> str:
    """The line at which a thread of this process is; empty: it has ended."""
    frame = sys._current_frames().get(thread_id or 0)  # noqa: SLF001  # public, for all its underscore
    inwards: list[FrameType] = []
    while frame is not None:
        inwards.append(frame)
        frame = frame.f_back
    return _line(inwards[::-1])


def in_coroutine(steps: Any) -> str:
    """The line at which a suspended coroutine waits; empty: it has ended."""
    inwards: list[FrameType] = []
    while steps is not None:
        frame, steps = next(
            ((getattr(steps, at), getattr(steps, then)) for at, then in _NEXT if hasattr(steps, at)), (None, None)
        )
        if frame is not None:
            inwards.append(frame)
    return _line(inwards)


def _line(inwards: list[FrameType]) -> str:
    """The innermost frame of the application. Without one, of a library; without that, of anything."""
    for skipped in ((str(_OURS), *LIBRARIES), (str(_OURS), *LIBRARIES[-2:]), ()):
        for frame in reversed(inwards):
            code = frame.f_code
            if code.co_filename.startswith(_APPLICATIONS) or not code.co_filename.startswith(skipped):
                return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
    return ""
