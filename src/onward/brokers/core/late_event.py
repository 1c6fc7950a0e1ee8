"""Events whose fields are decoded when they are first read: decoding them is half the cost of reading an event."""

from collections.abc import Mapping
from typing import Any

from onward.event import Event, text_bytes


class LateEvent(Event, frozen=True, gc=False, array_like=True):
    """An event whose id, headers, type and time are decoded when they are first read.

    Until then these fields hold what the broker received, which no encoder accepts: encode `whole()`. A broker's own
    subclass implements `_decoded` and `_decoded_headers`.
    """

    @property  # type: ignore[misc]
    def id(self) -> str:
        return self.whole().id

    @property  # type: ignore[misc]
    def headers(self) -> Mapping[str, str]:
        """Decodes only the headers: Onward checks every event for a header with its expiry, and most events have no
        headers of their own."""
        held: Any = ID.__get__(self)
        return held.headers if isinstance(held, Event) else self._decoded_headers(held)

    @property  # type: ignore[misc]
    def type(self) -> str:
        return self.whole().type

    @property  # type: ignore[misc]
    def time(self) -> float:
        return self.whole().time

    def __eq__(self, other: object) -> bool:
        return self.whole() == other.whole() if isinstance(other, Event) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.whole().id)

    def __repr__(self) -> str:
        return repr(self.whole())

    @property
    def size(self) -> int:
        """The value and the key: the length of headers is unknown until they are decoded."""
        return len(self.value or b"") + text_bytes(self.key or "")

    def whole(self) -> Event:
        held: Any = ID.__get__(self)
        if isinstance(held, Event):
            return held
        event = self._decoded(held)
        ID.__set__(self, event)
        return event

    def _decoded(self, held: Any) -> Event:
        """The event. `held`: what the field of the id holds."""
        raise NotImplementedError

    def _decoded_headers(self, held: Any) -> Mapping[str, str]:
        raise NotImplementedError


# The fields themselves, for a broker that stores other things in them until they are decoded.
ID: Any = Event.__dict__["id"]
HEADERS: Any = Event.__dict__["headers"]
TYPE: Any = Event.__dict__["type"]
TIME: Any = Event.__dict__["time"]
