"""Effects once: an inbox stores which events have had their effect, in the place where the effect is.

SqlInbox: the mark and the handler's own writes are one database transaction. RedisInbox: for effects elsewhere.
"""

from typing import TYPE_CHECKING, Any

from onward.errors import MissingExtra

if TYPE_CHECKING:
    from onward.inbox.redis import Claim, RedisInbox
    from onward.inbox.sql import SqlInbox

__all__ = ["Claim", "RedisInbox", "SqlInbox"]

_HOMES = {"SqlInbox": ("sql", "SQLAlchemy"), "RedisInbox": ("redis", "redis"), "Claim": ("redis", "redis")}


def __getattr__(name: str) -> Any:
    """Import each name on first use, so that one inbox does not need the client library of the other."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, client = _HOMES[name]
    try:
        return getattr(import_module(f"onward.inbox.{module}"), name)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{name} needs {client}, which is not installed ({error}): pip install 'onward[inbox]'"
        ) from error
