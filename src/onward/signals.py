"""Stop signals: the first asks for a graceful end, the second ends at once."""

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger("onward")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[None]:
    """The first stop signal calls `stop`; the second gets the system's own handling."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; a program that uses another one calls stop itself
        return
    loop = asyncio.get_running_loop()

    def first(number: signal.Signals) -> None:
        log.info("%s: stopping; once more ends at once", number.name)
        for each in _STOP_SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        stop()

    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    if callable(before[signal.SIGTERM]):
        log.warning(
            "app.run() takes SIGTERM over from %r; inside a program that handles signals itself, such as a web server, "
            "use `async with app.running():`",
            before[signal.SIGTERM],
        )
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, first, number)
    try:
        yield
    finally:
        for number, handling in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handling)
