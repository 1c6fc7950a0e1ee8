"""The inbox contract: it stands around a handler and lets each event's effect happen once.

- An event whose effect has happened is not run again: its call returns, and the event is done.
- Of two runs of one event at once, one waits for the other: it returns if that succeeds, and runs if that fails.
- Nothing is remembered of a run that failed, was cancelled or was killed: the event stays open.
- What a former owner of a partition does after the new one has begun changes nothing (Superseded).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from onward.brokers.base import Progress
from onward.engines.base import Call, Work

Run = Callable[[Work, Any], Any]
"""The handler with its decoding: called with work and with what the inbox gives it, it runs or returns a coroutine."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler asks of its inbox."""

    name: str
    group: str
    engine: str
    is_async: bool
    batch: bool
    gives: Any = None  # the annotation of the parameter that the inbox fills; None: there is none


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What an inbox stands on, known when the application starts."""

    name: str
    batch: bool
    stable: bool  # a position names the same event in every delivery, and each ownership has a fence
    longest_redelivery_s: float


class Inbox(Protocol):
    def gives(self, annotation: Any) -> bool:
        """Does this inbox fill a parameter that is annotated so?"""

    def around(self, run: Run, asked: Asked) -> Call:
        """The handler's call with the inbox around it. BadHandler: they do not go together."""

    async def start(self, ground: Ground) -> None:
        """Before the first event of a handler: BadSetting when effects once could not be kept."""

    def settled(self, group: str, progress: Sequence[Progress]) -> None:
        """The broker has stored this: what is below its watermark comes back from the aside only."""

    async def upkeep(self) -> None:
        """Forget what is older than the horizon, again and again, until cancelled."""

    async def close(self) -> None:
        """After the last event: let go of what start opened. It may be started again."""
