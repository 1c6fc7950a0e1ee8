"""The embedded broker: one SQLite file, any number of processes on one machine, nothing to install."""

from typing import Any

from onward.brokers.base import Holder
from onward.brokers.sqlite.broker import open_broker
from onward.brokers.sqlite.callers_connection import borrowed
from onward.brokers.sqlite.gate import lock_holder
from onward.brokers.sqlite.store import is_ours, locate
from onward.settings import Settings

__all__ = ["absent", "holder", "keeps_log_in", "lock_holder", "open_broker"]


def absent(settings: Settings) -> str:
    """Why there is no store to open, or "". In that case open_broker would create the file or its tables."""
    path = locate(settings.url)
    if not path.exists():
        return f"{path.absolute()} does not exist"
    return "" if is_ours(path) else f"{path.absolute()} has no tables of Onward"


def holder(settings: Settings) -> Holder | None:
    """The process that writes to the file now. Raises OSError if the lock file cannot be read."""
    return lock_holder(locate(settings.url))


def keeps_log_in(settings: Settings, connection: Any) -> bool:
    """Whether the file is the main database of this connection. The file need not have our tables yet."""
    with borrowed(connection) as caller:
        return caller is not None and caller.is_on(locate(settings.url).resolve())
