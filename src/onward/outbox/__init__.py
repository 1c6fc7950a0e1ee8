"""The outbox: an event commits together with the data that it is about. A relay then publishes it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.outbox.outbox import Outbox

__all__ = ["Outbox"]


def __getattr__(name: str) -> Any:
    """Import the class on first use: `import onward` imports a module of this package, and must stay fast."""
    if name != "Outbox":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onward.outbox.outbox import Outbox

    return Outbox
