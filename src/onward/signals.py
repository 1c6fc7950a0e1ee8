"""Stop signals: the first one ends the process gracefully, the second one at once."""

import asyncio
import atexit
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from onward import clock

log = logging.getLogger("onward")

ECHO_S = 0.3  # `timeout` and other wrappers send a signal twice; a person takes longer to send the second one
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_at_first: list[Callable[[asyncio.AbstractEventLoop], None]] = []


def at_first(call: Callable[[asyncio.AbstractEventLoop], None]) -> None:
    """Call this at the first stop signal, inside the signal handler, so also while code blocks the event loop."""
    _at_first.append(call)


def ignore_at_exit() -> None:
    """Ignore the stop signals once Python has joined its threads. While it exits, Python restores the system's signal
    handling, so a signal that is sent twice would kill a process that has already ended well.

    Call this at the start of a program: atexit callbacks run in reverse order, so this one runs after those of the
    application."""
    atexit.register(_ignore)


def _ignore() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[None]:
    """The first stop signal calls `stop`. A second one within ECHO_S is ignored; a later one gets the system's default
    handling."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers; in other threads the program calls stop itself
        return
    handler = _Handler(asyncio.get_running_loop(), stop)
    before = {number: _handling(number) for number in STOP_SIGNALS}
    if callable(before[signal.SIGTERM]):
        log.warning(
            "app.run() replaces the SIGTERM handler %r; inside a program that handles signals itself, such as a web "
            "server, use `async with app.running():`",
            before[signal.SIGTERM],
        )
    for number in STOP_SIGNALS:
        handler.install(number)
    try:
        yield
    finally:
        for number, handling in before.items():
            handler.remove(number, handling)


class _Handler:
    """Handles the stop signals while the application runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
        self._loop = loop
        self._stop = stop
        self._asked_at: float | None = None

    def install(self, number: signal.Signals) -> None:
        # The loop's own handler only runs when the loop is free. It is set for its side effect: a signal that another
        # thread receives wakes the loop.
        self._loop.add_signal_handler(number, lambda: None)
        signal.signal(number, self._received)

    def remove(self, number: signal.Signals, handling: Any) -> None:
        """Restore the earlier handling. Within ECHO_S of the first signal, a repeated one is still ignored."""
        self._loop.remove_signal_handler(number)
        late = self._asked_at is None or clock.now() - self._asked_at > ECHO_S
        signal.signal(number, handling if late else _Echo(self._asked_at or 0.0, handling))

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = clock.now()
            for call in _at_first:
                call(self._loop)
            self._loop.call_soon_threadsafe(self._ask, signal.Signals(number))
        elif clock.now() - self._asked_at > ECHO_S:
            self._to_system(number)

    def _ask(self, number: signal.Signals) -> None:
        log.info("%s: stopping; a second signal ends the process at once", number.name)
        self._stop()

    def _to_system(self, number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


class _Echo:
    """Ignores a stop signal within ECHO_S of the first one, and passes a later one to the earlier handling."""

    def __init__(self, asked_at: float, handling: Any) -> None:
        self._asked_at = asked_at
        self.handling = handling

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if clock.now() - self._asked_at > ECHO_S:
            signal.signal(number, self.handling)
            signal.raise_signal(number)


def _handling(number: signal.Signals) -> Any:
    found = signal.getsignal(number)
    return found.handling if isinstance(found, _Echo) else found
