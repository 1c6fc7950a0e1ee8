"""Ordered publishing: calls wait in a queue, and their events are sent in windows.

One window is sent at a time, and the next one only after every event has its answer. So a failed event stops the later
events of its key before they are sent. A broker implements only the sending of one window, with an answer for each of
its events.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from onward import clock
from onward.brokers.base import Relay
from onward.errors import Backlogged, BadSetting, Closed, OnwardError, PublishError, RelayFenced, Unserialisable
from onward.event import Event, header_fault

T = TypeVar("T")

WINDOW_EVENTS = 10_000
WINDOW_BYTES = 16 << 20
_MOST_CAUSES = 5  # in one error

Key = tuple[str, str | None]  # a topic and a key


class Outgoing(NamedTuple, Generic[T]):
    """An event that is being published. `packed` is the event as the broker has encoded it."""

    event: Event
    partition: int
    size: int
    packed: T

    @property
    def lane(self) -> Key:
        return self.event.topic, self.event.key


def check_relay(relay: Relay | None) -> None:
    """Raise BadSetting if `relay` is not a shard and a fence."""
    if relay is None:
        return
    shard, fence = relay if isinstance(relay, tuple) and len(relay) == 2 else (None, None)
    if not isinstance(shard, str) or not shard or type(fence) is not int or not 0 <= fence < 1 << 63:
        raise BadSetting(f"relay={relay!r}: use (shard, fence), a text and a number that is not negative")


def check_events(events: Iterable[Event]) -> None:
    """Raise Unserialisable if a value is not bytes, a time is not in the calendar, or some broker would change a
    header."""
    for event in events:
        if not clock.in_calendar(event.time):
            raise Unserialisable(
                f"the time of event {event.id} is {event.time}; use a Unix time of the years 1 to 9999"
            )
        value = event.value
        if value is not None and not isinstance(value, bytes):
            raise Unserialisable(f"the value of event {event.id} is a {type(value).__name__}; use bytes, or None")
        if event.headers and (fault := header_fault(event.headers)):
            raise Unserialisable(f"event {event.id} cannot be stored: {fault}")


class Refusal(NamedTuple):
    """Why an event was not accepted. `unknown`: it may be stored anyway. `kind`: the error to raise. `seen`: of
    RelayFenced, the highest fence that the broker has seen."""

    why: str
    unknown: bool = False
    kind: type[PublishError] = PublishError
    seen: int = 0


BEHIND = Refusal("refused, because an earlier event of the same key was not accepted; publish both again, in order")
UNANSWERED = Refusal("the broker did not answer for this event", unknown=True)


class Window(Generic[T]):
    """The events that are sent together. `answers` has one entry per event, by its index: None if it was accepted."""

    __slots__ = ("answers", "deadline", "items")

    def __init__(self, items: Sequence[Outgoing[T]] = (), deadline: float = 0.0) -> None:
        self.items = items
        self.deadline = deadline  # on the clock of onward.clock.now
        self.answers: dict[int, Refusal | None] = {}


class Courier(Protocol[T]):
    """Sends windows, one at a time. Within a window, it refuses the later events of a key after a refused one."""

    def take(self, window: Window[T], done: Callable[[Window[T]], object]) -> None:
        """Send the window. Call `done`, from any thread, when every event has its answer. That must happen before the
        deadline or soon after it."""


class Call(Generic[T]):
    """The rest of one publish call: the events that have no answer yet, and those that failed."""

    __slots__ = ("deadline", "failed", "future", "items", "size", "unanswered")

    def __init__(self, items: Sequence[Outgoing[T]], deadline: float, future: "asyncio.Future[None]") -> None:
        self.items: deque[Outgoing[T]] = deque(items)  # not yet in a window
        self.unanswered = len(items)
        self.size = sum([item.size for item in items])
        self.deadline = deadline
        self.future = future
        self.failed: list[tuple[Event, Refusal]] = []


class Publisher(Generic[T]):
    def __init__(self, courier: Courier[T], *, label: str, timeout_s: float, max_outgoing_bytes: int) -> None:
        self._courier = courier
        self._label = label  # the broker's name, in errors
        self._timeout_s = timeout_s
        self._max_outgoing_bytes = max_outgoing_bytes
        self._calls: deque[Call[T]] = deque()
        self._queued_bytes = 0
        self._busy = False
        self._closed = False
        self._idle: asyncio.Future[None] | None = None

    def enter(self, items: Sequence[Outgoing[T]]) -> "asyncio.Future[None]":
        """Queue the events of one call. The future is done when all of them are accepted. If the caller cancels it,
        they are still sent, because later events of their keys may be in the queue."""
        if self._closed:
            raise Closed("the broker is closed")
        loop = asyncio.get_running_loop()
        call = Call(items, clock.now() + self._timeout_s, loop.create_future())
        if self._queued_bytes and self._queued_bytes + call.size > self._max_outgoing_bytes:
            raise Backlogged(
                f"{self._queued_bytes:,} bytes wait to be sent to {self._label}; slow down, or raise "
                f"max_outgoing_bytes={self._max_outgoing_bytes:,}",
                refused=[item.event for item in items],
            )
        self._calls.append(call)
        self._queued_bytes += call.size
        self._send_next(loop)
        return asyncio.shield(call.future)

    async def close(self) -> None:
        """Finish the calls in the queue. Events that cannot be sent before their deadline are refused."""
        self._closed = True
        if self._busy:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def _send_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._busy or not self._calls:
            return
        items: list[Outgoing[T]] = []
        calls: list[Call[T]] = []  # the call of each item
        room, deadline = WINDOW_BYTES, self._calls[0].deadline
        while self._calls and room > 0 and len(items) < WINDOW_EVENTS:
            call = self._calls[0]
            while call.items and room > 0 and len(items) < WINDOW_EVENTS:
                item = call.items.popleft()
                room -= item.size
                items.append(item)
                calls.append(call)
            if not call.items:
                self._calls.popleft()
                self._queued_bytes -= call.size
        self._busy = True
        self._courier.take(
            Window(items, deadline), lambda done: loop.call_soon_threadsafe(self._answered, done, calls, loop)
        )

    def _answered(self, window: Window[T], calls: Sequence[Call[T]], loop: asyncio.AbstractEventLoop) -> None:
        self._busy = False
        failed: set[Key] = set()
        for at, (item, call) in enumerate(zip(window.items, calls, strict=True)):
            refusal = window.answers.get(at, UNANSWERED)
            call.unanswered -= 1
            if refusal is not None:
                call.failed.append((item.event, refusal))
                failed.add(item.lane)
        if failed:
            self._stop_behind({lane for lane in failed if lane[1] is not None})
        for call in dict.fromkeys(calls):
            self._answer(call)
        self._send_next(loop)
        if not self._busy and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _stop_behind(self, failed: set[Key]) -> None:
        """Refuse all events in the queue whose key has failed."""
        for call in tuple(self._calls):
            kept: deque[Outgoing[T]] = deque()
            for item in call.items:
                if item.lane in failed:
                    call.failed.append((item.event, BEHIND))
                    call.unanswered -= 1
                else:
                    kept.append(item)
            call.items = kept
            if not kept:
                self._calls.remove(call)
                self._queued_bytes -= call.size
                self._answer(call)

    def _answer(self, call: Call[T]) -> None:
        if call.unanswered or call.future.done():
            return
        if not call.failed:
            call.future.set_result(None)
            return
        call.future.set_exception(combined(self._label, call.failed))
        call.future.exception()  # a cancelled caller does not fetch it, and asyncio would log that


def counted(events: int) -> str:
    return "1 event was" if events == 1 else f"{events:,} events were"


def _outcome(refused: int, unknown: int) -> str:
    if not unknown:
        return f"{counted(refused)} not accepted"
    doubt = f"it is unknown whether {counted(unknown)} accepted"
    return f"{counted(refused)} not accepted, and {doubt}" if refused else doubt


def combined(label: str, failed: Iterable[tuple[Event, Refusal]]) -> OnwardError:
    """One error for a call, which names every cause once."""
    failed = list(failed)
    causes = list(dict.fromkeys(refusal.why for _, refusal in failed))
    more = [f"and {len(causes) - _MOST_CAUSES} more causes"] if len(causes) > _MOST_CAUSES else []
    kinds = {refusal.kind for _, refusal in failed if refusal.why != BEHIND.why}
    kind = kinds.pop() if len(kinds) == 1 else PublishError
    refused = [event for event, refusal in failed if not refusal.unknown]
    unknown = [event for event, refusal in failed if refusal.unknown]
    error = kind(
        f"{label}: {_outcome(len(refused), len(unknown))}: {', '.join([*causes[:_MOST_CAUSES], *more])}",
        refused=refused,
        unknown=unknown,
    )
    if isinstance(error, RelayFenced):
        error.seen = max(refusal.seen for _, refusal in failed)
    return error
