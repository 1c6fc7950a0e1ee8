"""The inbox contract. An inbox wraps a handler and lets the effect of each event happen once.

- If the effect of an event has happened, the handler is not called again. The call returns, and the event is done.
- If two runs of one event overlap, the second waits for the first. It returns if the first succeeds, and runs the
  handler if the first fails.
- A run that failed, was cancelled or was killed leaves no mark: the event stays open.
- Once the new owner of a partition has begun, the former owner can change nothing (Superseded).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from onward.brokers.base import Progress
from onward.engines.base import Call, Work

Run = Callable[[Work, Any], Any]
"""The handler with its decoding. Called with the work and the parameter that the inbox fills; an `async def` returns a
coroutine."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the inbox must know about its handler."""

    name: str
    group: str
    engine: str
    is_async: bool
    batch: bool
    gives: Any = None  # the annotation of the parameter that the inbox fills; None: there is no such parameter


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What the inbox must know about its broker and settings. Known when the application starts."""

    name: str
    batch: bool
    stable: bool  # a position names the same event in every delivery, and each ownership has a fence
    longest_redelivery_s: float


class Inbox(Protocol):
    def gives(self, annotation: Any) -> bool:
        """Does this inbox fill a parameter with this annotation?"""

    def around(self, run: Run, asked: Asked) -> Call:
        """The handler's call with the inbox around it. BadHandler if the handler does not fit this inbox."""

    async def start(self, ground: Ground) -> None:
        """Called before the first event of a handler. BadSetting if effects could happen twice."""

    def settled(self, group: str, progress: Sequence[Progress]) -> None:
        """The broker has stored this progress. Events below its watermark can come again only from the aside."""

    async def upkeep(self) -> None:
        """Delete marks that are older than the horizon, at intervals, until cancelled."""

    async def close(self) -> None:
        """Called after the last event: close what `start` opened. The inbox may be started again."""
