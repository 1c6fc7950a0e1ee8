"""The engine contract: an engine runs handlers and reports how each run ended. It has no notion of brokers or order."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from onward.clock import now
from onward.event import Delivery

_LOOK_S = 0.01


Work = Delivery | tuple[Delivery, ...]
"""What one call of the handler gets: an event, or for a batch handler several events of one partition, in order."""

Call = Callable[[Any], Any]
"""The handler with its decoding. A call returns a coroutine if the handler is `async def`; otherwise it has run."""


class Ended(msgspec.Struct, frozen=True, gc=False):
    """How one run ended. No error: success. `cancelled`: it may not start or shutdown ended it, which is no failure.
    `took_s`: how long the handler ran; None if it did not run to its end."""

    work: Work
    error: BaseException | None = None
    cancelled: bool = False
    took_s: float | None = None


class EngineHealth(msgspec.Struct, frozen=True):
    """`workers`: tasks, threads or processes that run or wait for work. `restarted`: how many were replaced after a
    failure."""

    workers: int
    busy: int
    restarted: int
    oldest_running_s: float | None


Report = Callable[[Sequence[Ended]], None]

MayStartUntil = Callable[[Work], float]
"""Returns until when, on onward.clock, work may start. A time in the past: it may not start any more. Any thread may
call it."""


def always(work: Work) -> float:
    return math.inf


async def drained(is_idle: Callable[[], bool], deadline_s: float) -> bool:
    """Wait until `is_idle`. False: the deadline passed first."""
    deadline = now() + deadline_s
    while not is_idle():
        if now() >= deadline:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


class Engine(Protocol):
    """The constructor takes the handler, how many runs there may be at once, and how long each may take.

    - Every submitted work ends in exactly one Ended, whatever the handler raises, BaseException included.
    - Right before work starts, the engine checks whether it may still start. If not, it ends as cancelled.
    - Each run gets a fresh copy of the context that the engine was started in. `onward.context.current` works in it.
    - A run that exceeds `timeout_s` ends with HandlerTimeout, which names the line that the handler had reached. The
      engine reports it when the run has really ended, so the next event of its key never runs at the same time. Onward
      cannot kill a thread, or a coroutine that catches its cancellation: it logs them and waits for them to return.
    - When a worker dies, only the run that it had begun ends, with WorkerDied. Other workers run the rest of its
      work, in order.
    """

    failure: BaseException | None
    """Why the engine cannot go on. It then ends all its work as cancelled, and calls `ended` at least once."""

    def start(self, ended: Report, may_start_until: MayStartUntil = always) -> None:
        """Begin, on the running event loop. The engine calls `ended` there, with lists, never from within submit."""

    def submit(self, work: Sequence[Work]) -> None:
        """Run these, at most `concurrency` at once. The rest wait here, in order."""

    def health(self) -> EngineHealth: ...

    async def drain(self, deadline_s: float) -> bool:
        """Wait until nothing runs and nothing waits. False: the deadline passed first."""

    async def close(self) -> None:
        """End all running and waiting work, and report each before this returns: as cancelled, unless it has just
        ended. Idempotent. Work submitted afterwards is cancelled."""
