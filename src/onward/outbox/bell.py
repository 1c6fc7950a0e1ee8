"""Wakes relays after a commit: those of this process by a call, those of other processes by PostgreSQL's NOTIFY.

A relay polls too, so a lost ring costs time and no event. A writer must not wait for it, and it must not fail a writer.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import cached_property
from itertools import count

from onward.errors import ConfigError
from onward.outbox.databases import dialect_of

log = logging.getLogger("onward")

_APART_S = 0.01  # between two NOTIFYs
_IDLE_S = 10.0  # then the connection is closed until the next ring
_RETRY_S = 1.0  # after a failure


class OutboxBell:
    """The bell of one outbox. Threads share it. `url` is called at the first ring."""

    def __init__(self, url: Callable[[], str | None], table: str) -> None:
        self._url = url
        self._table = table
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._numbers = count()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call this at each ring, in the thread that rings. Returns a function that ends it."""
        number = next(self._numbers)
        self._callbacks[number] = callback

        def unsubscribe() -> None:
            self._callbacks.pop(number, None)

        return unsubscribe

    def ring(self, *, only_here: bool = False) -> None:
        for callback in list(self._callbacks.values()):
            try:
                callback()
            except Exception:
                log.debug("a relay of this process could not be woken; it polls", exc_info=True)
        if not only_here and self._notifier is not None:
            self._notifier.ring()

    @cached_property
    def _notifier(self) -> "Notifier | None":
        url = self._url()
        on_postgresql = url is not None and dialect_of(url) == "postgresql"
        return Notifier(url, self._table.rpartition(".")[2]) if url is not None and on_postgresql else None


class Notifier:
    """Sends NOTIFY from a thread and a connection of its own: inside a business transaction it would make all commits
    of the database wait for each other. The thread starts with the first ring."""

    def __init__(self, url: str, channel: str) -> None:
        self._url = url
        self._channel = channel
        self._complained = False
        self.start_again()
        _notifiers.add(self)

    def start_again(self) -> None:
        """Forget the thread. A forked child has none of its parent's threads, and its locks may be held for ever."""
        self._rung = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def ring(self) -> None:
        self._rung.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="onward outbox bell", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while True:
            self._rung.wait()
            try:
                self._notify()
            except (ModuleNotFoundError, ConfigError) as error:
                return self._complain(error)  # another try would fail too
            except Exception as error:
                self._complain(error)
                time.sleep(_RETRY_S)

    def _notify(self) -> None:
        """Connect, and pass rings on until there was none for a while."""
        from onward.outbox.postgresql import connect  # imported late: it needs psycopg

        with connect(self._url) as connection:
            connection.execute("SET application_name = 'onward outbox bell'")
            while self._rung.wait(_IDLE_S):
                self._rung.clear()
                connection.execute(f'NOTIFY "{self._channel}"')
                time.sleep(_APART_S)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            log.debug("cannot wake the relays of the outbox, so they poll: %s", error)


_notifiers: "weakref.WeakSet[Notifier]" = weakref.WeakSet()


def _start_again_in_child() -> None:
    for notifier in list(_notifiers):
        notifier.start_again()


os.register_at_fork(after_in_child=_start_again_in_child)
