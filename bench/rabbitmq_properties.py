"""Messages as other frameworks send them, with their headers."""

from typing import Any

from pamqp import header
from pamqp.commands import Basic

from bench.amqp_frames import Outgoing

PERSISTENT = 2


def outgoing(queue: str, body: bytes, headers: dict[str, Any] | None = None, **properties: Any) -> Outgoing:
    """A persistent JSON message for a queue."""
    given = Basic.Properties(content_type="application/json", headers=headers, delivery_mode=PERSISTENT, **properties)
    encoded = header.ContentHeader(0, len(body), given).marshal()
    return Outgoing("", queue, encoded[12:], body)  # without class, weight and size of the body
