"""The transactions with events of an outbox that are open in this task or thread, for the warning about dual writes.

Only used with the setting `debug`.
"""

import asyncio
import sys
import threading
from contextvars import ContextVar
from types import FrameType


class OpenTransaction:
    """A transaction in which events were added. `where`: the file and line of the first `add`."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._runner: object | None = _runner()

    def close(self) -> None:
        """The transaction has ended. Any task or thread may call this."""
        self._runner = None

    @property
    def is_ours(self) -> bool:
        return self._runner is not None and self._runner == _runner()

    @property
    def is_open(self) -> bool:
        return self._runner is not None


_opened: ContextVar[tuple[OpenTransaction, ...]] = ContextVar("onward.outbox.open_transactions", default=())


def opened(where: str) -> OpenTransaction:
    """Events were added in a transaction of this task or thread. Call `close` of the result when it ends."""
    transaction = OpenTransaction(where)
    _opened.set((*(each for each in _opened.get() if each.is_open), transaction))
    return transaction


def current() -> str | None:
    """Where events were added in a transaction that is still open in this task or thread. None: there is none.

    A task inherits the context of the task that started it, so the context alone does not tell.
    """
    return next((each.where for each in _opened.get() if each.is_ours), None)


def caller() -> str:
    """The file and line that called into Onward."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - its documented name
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "onward"


def _runner() -> object:
    """The running task; in a thread without an event loop, the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.current_thread() if task is None else task
