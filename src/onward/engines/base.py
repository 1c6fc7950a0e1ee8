"""The engine contract: an engine runs handlers and says how each run ended. It knows no broker and no order."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from onward.clock import now
from onward.event import Delivery

_LOOK_S = 0.01


Work = Delivery | tuple[Delivery, ...]
"""What one call of the handler takes: an event, or for a batch handler several of one partition, in order."""

Call = Callable[[Any], Any]
"""The handler with its decoding: called with work, it returns a coroutine if it is `async def`, else it has run."""


class Ended(msgspec.Struct, frozen=True, gc=False):
    """How one run ended. No error: success. `cancelled`: shutdown ended it, so it counts as no failure.
    `took_s`: how long the handler ran; None: it did not run to its end."""

    work: Work
    error: BaseException | None = None
    cancelled: bool = False
    took_s: float | None = None


class EngineHealth(msgspec.Struct, frozen=True):
    """`workers`: tasks, threads or processes that stand ready or run. `restarted`: those that had to be replaced."""

    workers: int
    busy: int
    restarted: int
    oldest_running_s: float | None


Report = Callable[[Sequence[Ended]], None]

MayStartUntil = Callable[[Work], float]
"""Until when, on onward.clock, work may be started; a time that has passed: not any more. Asked from any thread."""


def always(work: Work) -> float:
    return math.inf


async def drained(is_idle: Callable[[], bool], deadline_s: float) -> bool:
    """Wait until it is idle; False when the deadline came first."""
    deadline = now() + deadline_s
    while not is_idle():
        if now() >= deadline:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


class Engine(Protocol):
    """What to run, how much of it at once and for how long is given to the constructor.

    - Every work submitted ends in exactly one Ended, whatever the handler does, BaseException included.
    - Work that waits here is asked about right before it starts: if it may not any more, it ends as cancelled.
    - Each run is in a fresh copy of the context that the engine was started in; `onward.context.current` knows it.
    - A run over its time ends with HandlerTimeout. It is told when the run has really ended, so that the next event
      of its key never runs beside it; what cannot be ended (a thread) is named in the log when its time is over.
    - A worker's death ends the run that it had started with WorkerDied, and no other: what it had not started runs
      elsewhere, in order.
    """

    failure: BaseException | None
    """Why the engine cannot go on. It then ends what it was given as cancelled, and calls `ended` at least once."""

    def start(self, ended: Report, may_start_until: MayStartUntil = always) -> None:
        """Begin, on the running event loop. `ended` is called there, with lists, never from within submit."""

    def submit(self, work: Sequence[Work]) -> None:
        """Run these; at most `concurrency` at once, the rest wait here in order."""

    def health(self) -> EngineHealth: ...

    async def drain(self, deadline_s: float) -> bool:
        """Wait until nothing runs and nothing waits; False when the deadline came first."""

    async def close(self) -> None:
        """End what runs and what waits; each is reported, as cancelled unless it has just ended, before this returns.
        Idempotent; what is submitted afterwards is cancelled."""
