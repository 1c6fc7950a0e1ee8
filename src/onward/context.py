"""`current()` gives a handler the facts about its run. It works in every engine."""

import logging
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

import msgspec

from onward.event import Delivery, Event, Partition

in_worker = False
"""This process is a worker of the process engine: it runs handlers for its parent, and nothing else."""

_log = logging.getLogger("onward.handler")
_current: ContextVar[tuple[Delivery | tuple[Delivery, ...], float | None]] = ContextVar("onward.current")

group: ContextVar[str] = ContextVar("onward.group")
"""The group whose handler runs here. It is not set in a worker process of the process engine."""


class Run(msgspec.Struct, frozen=True):
    """One call of a handler. In a batch handler the fields describe the first event; `batch` has all of them.

    `deadline` is on `onward.clock`; None: there is no limit. `fence` is the number of the ownership over the whole
    fleet. A store that refuses a lower fence than it has seen is safe from a run that outlived its ownership.
    """

    event: Event
    attempt: int
    deadline: float | None
    partition: Partition
    position: int
    fence: int | None
    batch: tuple[Delivery, ...]

    @property
    def trace_id(self) -> str | None:
        """The trace id in the event's `traceparent` header, which continues the publisher's trace. None: no header."""
        parts = self.event.headers.get("traceparent", "").split("-")
        return parts[1] if len(parts) >= 4 else None

    @property
    def log(self) -> "logging.LoggerAdapter[logging.Logger]":
        """A logger whose records carry topic, partition, position, key, event_id, attempt and trace_id."""
        event = self.event
        return _Bound(
            _log,
            {
                "topic": event.topic,
                "partition": self.partition.index,
                "position": self.position,
                "key": event.key,
                "event_id": event.id,
                "attempt": self.attempt,
                "trace_id": self.trace_id,
            },
        )


class _Bound(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        # The base class would drop the extra fields of the call.
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}


def current() -> Run:
    """The run that this code is part of. Raises LookupError outside of a handler."""
    try:
        work, deadline = _current.get()
    except LookupError:
        raise LookupError("no handler runs here: call onward.context.current() inside a handler") from None
    batch = (work,) if isinstance(work, Delivery) else work
    first = batch[0]
    return Run(first.event, first.attempt, deadline, first.partition, first.position, first.fence, batch)


def enter(call: Callable[[Any], Any], work: Delivery | tuple[Delivery, ...], deadline: float | None) -> Any:
    """Call the handler so that `current` works in it. Engines call this in the run's own context."""
    _current.set((work, deadline))
    return call(work)
