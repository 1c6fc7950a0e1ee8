"""The engine contract: an engine runs handlers and says how each run ended. It knows no broker and no order."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from onward.event import Delivery

Work = Delivery | tuple[Delivery, ...]
"""What one call of the handler takes: an event, or for a batch handler several."""

Call = Callable[[Any], Any]
"""The handler with its decoding: called with work, it returns a coroutine, or None when it has run."""


class Ended(msgspec.Struct, frozen=True, gc=False):
    """How one run ended. No error: success. `cancelled`: shutdown ended it, so it is nobody's failure."""

    work: Work
    error: BaseException | None = None
    cancelled: bool = False


class Health(msgspec.Struct, frozen=True):
    workers: int
    busy: int
    restarted: int
    oldest_running_s: float | None


class Engine(Protocol):
    """Every work submitted ends in exactly one Ended, whatever the handler does, BaseException included."""

    def start(self, call: Call, ended: Callable[[Sequence[Ended]], None]) -> None:
        """Get ready. `ended` is called on the event loop with lists, never from within submit."""

    def submit(self, work: Sequence[Work]) -> None:
        """Run these; at most `concurrency` at once, the rest wait here in order."""

    def health(self) -> Health: ...

    async def drain(self, deadline_s: float) -> bool:
        """Wait until nothing runs; False when the deadline came first."""

    async def close(self) -> None:
        """Cancel what runs and what waits; each is reported as cancelled before this returns. Idempotent."""
