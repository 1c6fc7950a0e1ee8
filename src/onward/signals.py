"""Stop signals: the first asks for a graceful end, the second ends at once."""

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

ECHO_S = 0.3  # `timeout` and other wrappers send a signal twice; a person's second one comes later
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_at_first: list[Callable[[asyncio.AbstractEventLoop], None]] = []


def at_first(call: Callable[[asyncio.AbstractEventLoop], None]) -> None:
    """The first stop signal calls this, in the signal handler: also while code blocks the event loop."""
    _at_first.append(call)


def ignore_at_exit() -> None:
    """Ignore the stop signals once Python has joined its threads. Its last steps give them the system's handling again,
    and one that is sent twice would kill a process that has ended well.

    Called at the start of a program: callbacks of atexit run in reverse order, so this one runs after the
    application's."""
    atexit.register(_ignore)


def _ignore() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[None]:
    """The first stop signal calls `stop`. One within ECHO_S of it is ignored, a later one gets the system's own
    handling."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; a program that uses another one calls stop itself
        return
    handler = _Handler(asyncio.get_running_loop(), stop)
    before = {number: _handling(number) for number in STOP_SIGNALS}
    if callable(before[signal.SIGTERM]):
        log.warning(
            "app.run() takes SIGTERM over from %r; inside a program that handles signals itself, such as a web server, "
            "use `async with app.running():`",
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
    """Of the stop signals, while the handlers run."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
        self._loop = loop
        self._stop = stop
        self._asked_at: float | None = None

    def install(self, number: signal.Signals) -> None:
        # The loop's own handler only runs when the loop turns. It is set for its side effect: a signal that another
        # thread receives wakes the loop.
        self._loop.add_signal_handler(number, lambda: None)
        signal.signal(number, self._heed)

    def remove(self, number: signal.Signals, handling: Any) -> None:
        """Restore what was before us, once the first signal cannot come a second time."""
        self._loop.remove_signal_handler(number)
        late = self._asked_at is None or clock.now() - self._asked_at > ECHO_S
        signal.signal(number, handling if late else _Echo(self._asked_at or 0.0, handling))

    def _heed(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = clock.now()
            for call in _at_first:
                call(self._loop)
            self._loop.call_soon_threadsafe(self._ask, signal.Signals(number))
        elif clock.now() - self._asked_at > ECHO_S:
            self._to_system(number)

    def _ask(self, number: signal.Signals) -> None:
        log.info("%s: stopping; once more ends at once", number.name)
        self._stop()

    def _to_system(self, number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


class _Echo:
    """Ignores a stop signal that comes within ECHO_S of the first, and hands a later one to what was before us."""

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
