"""The way in for callers without an event loop: plain scripts and threads."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from onward.brokers.base import Broker
from onward.errors import ConfigError, PublishError
from onward.event import Event
from onward.settings import Settings

Answer = TypeVar("Answer")

_LOOP_PATIENCE_S = 5.0  # beyond the broker's own time limit, for a loop that is slow to turn


def refuse_loop_thread() -> None:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ConfigError("publish_sync would block this event loop; use `await app.publish(...)` here")


class SyncDoor:
    """A broker on an event loop in a thread of its own, for callers that have no loop.

    It ends with the process: what publish has returned for is durable, so there is nothing left to finish.
    """

    def __init__(self, settings: Settings, opening: Callable[[], Coroutine[Any, Any, Broker]]) -> None:
        refuse_loop_thread()
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="onward-sync", daemon=True)
        self._thread.start()
        try:
            self._broker = wait_for(opening(), self._loop, settings)
        except BaseException:
            self._stop()
            raise

    def publish(self, events: list[Event]) -> None:
        refuse_loop_thread()
        wait_for(self._broker.publish(events), self._loop, self._settings, events)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def wait_for(
    work: Coroutine[Any, Any, Answer],
    loop: asyncio.AbstractEventLoop,
    settings: Settings,
    events: Sequence[Event] = (),
) -> Answer:
    """The answer of work on a loop in another thread. The broker keeps its own time limit; this one is for the loop."""
    waiting = asyncio.run_coroutine_threadsafe(work, loop)
    limit_s = settings.publish_timeout_s + _LOOP_PATIENCE_S
    try:
        return waiting.result(limit_s)
    except TimeoutError:
        if waiting.done():
            raise  # the work's own
        waiting.cancel()
        raise PublishError(
            f"no answer within {limit_s:g} s: the application's event loop is blocked or has ended; look for a handler "
            "that blocks it, and do that work in a thread",
            unknown=events,
        ) from None
