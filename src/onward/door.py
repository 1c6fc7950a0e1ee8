"""Publishing for callers without an event loop: plain scripts and threads."""

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

_LOOP_PATIENCE_S = 5.0  # added to the broker's own time limit, for a busy event loop


def refuse_loop_thread() -> None:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ConfigError("publish_sync would block this event loop; use `await app.publish(...)` here")


class SyncDoor:
    """A broker on an event loop in its own thread, for callers that have no loop. The first publish opens it.

    It is never closed and ends with the process. Events that `publish` has returned for are stored, so no work is left.
    """

    def __init__(self, settings: Settings, opening: Callable[[], Coroutine[Any, Any, Broker]]) -> None:
        self._settings = settings
        self._open_broker = opening
        self._opening = threading.Lock()  # several threads may publish first at the same time
        self._opened: tuple[Broker, asyncio.AbstractEventLoop] | None = None

    def publish(self, events: list[Event]) -> None:
        refuse_loop_thread()
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
        broker, loop = self._opened
        wait_for(broker.publish(events), loop, self._settings, events)

    def _open(self) -> tuple[Broker, asyncio.AbstractEventLoop]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="onward-sync", daemon=True)
        thread.start()
        try:
            return wait_for(self._open_broker(), loop, self._settings), loop
        except BaseException:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
            raise


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
