"""The broker for callers without an event loop: plain scripts and threads."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from onward.brokers.base import Broker
from onward.errors import ConfigError, PublishError
from onward.event import Event
from onward.settings import Settings

Answer = TypeVar("Answer")

_LOOP_PATIENCE_S = 5.0  # added to the broker's own time limit, for a busy event loop
_OPEN_S = 5.0  # to open a broker while the caller may hold a transaction


def refuse_loop_thread() -> None:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ConfigError("publish_sync would block this event loop; use `await app.publish(...)` here")


class SyncDoor:
    """A broker on an event loop in its own thread, for callers that have no loop. The first use opens it.

    It is never closed and ends with the process. Events that `publish` has returned for are stored, so no work is left.
    """

    def __init__(self, settings: Settings, opening: Callable[[], Coroutine[Any, Any, Broker]]) -> None:
        self._settings = settings
        self._open_broker = opening
        self._guard = threading.Lock()  # several threads may be the first at the same time
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: Future[Broker] | None = None

    def publish(self, events: list[Event]) -> None:
        refuse_loop_thread()
        loop, opening = self._begun()
        broker = opened(opening, self._settings.publish_timeout_s + _LOOP_PATIENCE_S)
        wait_for(broker.publish(events), loop, self._settings, events)

    def broker(self) -> Broker:
        """The broker, for methods that any thread may call. The first call opens it; its thread waits for that."""
        _, opening = self._begun()
        return opened(opening, min(_OPEN_S, self._settings.publish_timeout_s))

    def _begun(self) -> tuple[asyncio.AbstractEventLoop, "Future[Broker]"]:
        with self._guard:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="onward-sync", daemon=True).start()
            if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
                self._opening = asyncio.run_coroutine_threadsafe(self._open_broker(), self._loop)
            return self._loop, self._opening


def opened(opening: "Future[Broker]", limit_s: float) -> Broker:
    """Wait until the broker is open. If that takes too long, it still opens, for the next caller."""
    try:
        return opening.result(limit_s)
    except TimeoutError:
        if opening.done():
            raise  # the opening itself raised TimeoutError
        raise PublishError(
            f"the broker could not be opened within {limit_s:g} s. A transaction that has written to the broker's own "
            "file prevents it from creating its tables and topics: open the application before the transaction begins, "
            "or create them with `onward topology apply`"
        ) from None


def wait_for(
    work: Coroutine[Any, Any, Answer],
    loop: asyncio.AbstractEventLoop,
    settings: Settings,
    events: Sequence[Event] = (),
) -> Answer:
    """Run the work on a loop in another thread, and return its result. The broker has its own time limit; the limit
    here is for a blocked loop."""
    waiting = asyncio.run_coroutine_threadsafe(work, loop)
    limit_s = settings.publish_timeout_s + _LOOP_PATIENCE_S
    try:
        return waiting.result(limit_s)
    except TimeoutError:
        if waiting.done():
            raise  # the work itself raised TimeoutError
        waiting.cancel()
        raise PublishError(
            f"no answer within {limit_s:g} s: the application's event loop is blocked or has ended; look for a handler "
            "that blocks it, and do that work in a thread",
            unknown=events,
        ) from None
