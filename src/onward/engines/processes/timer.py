"""The timer of the process engine."""

import asyncio
from collections.abc import Callable


class LookTimer:
    """Calls `look` with the seconds by which the call is late. Only one call is set at a time: the earliest one."""

    def __init__(self, look: Callable[[float], None]) -> None:
        self._look = look
        self._handle: asyncio.TimerHandle | None = None
        self._at = 0.0

    def set(self, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + after_s
        if self._handle is not None:
            if self._at <= at:
                return
            self._handle.cancel()
        self._at = at
        self._handle = loop.call_at(at, self._ring)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _ring(self) -> None:
        self._handle = None
        self._look(asyncio.get_running_loop().time() - self._at)
