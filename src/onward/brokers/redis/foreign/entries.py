"""Entries of other programs' streams as events, and back, by the field mapping of a topic. Pure."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from onward.brokers.redis.foreign.streams import Streams
from onward.errors import Unserialisable
from onward.event import Event

STREAM_HEADER = "onward-stream"
ID_HEADER = "onward-stream-id"
_MOST_FIELDS = 1_000  # of one entry that we publish
_SEQ_BITS = 21
_MOST_SEQ = (1 << _SEQ_BITS) - 1
_MOST_MS = (1 << 48) - 1
_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder(dict[str, Any]).decode


class Misfit(ValueError):
    """An entry that the mapping does not fit."""


class StreamEntries:
    """The entries of one stream, in one log."""

    def __init__(self, topic: str, stream: str, streams: Streams, log_id: str) -> None:
        self.stream = stream
        self._topic = topic
        self._key = None if streams.key is None else streams.key.encode()
        self._value = None if streams.value is None else streams.value.encode()
        digest = hashlib.blake2b(f"{log_id} {stream}".encode(), digest_size=8).digest()
        prefix = int.from_bytes(digest, "big") >> 11  # 53 bits
        high = 0x2 << 62 | (prefix & (1 << 41) - 1) << _SEQ_BITS
        self._middle = f"-7{prefix >> 41:03x}-{high >> 48:04x}-"
        self._low = high & (1 << 48) - 1

    def event(self, id_: bytes, fields: Sequence[bytes]) -> Event:
        """Misfit: the entry has no such field, or one that is not UTF-8."""
        found = dict(zip(fields[::2], fields[1::2], strict=True))
        key = None if self._key is None else _text(id_, self._key, _field(id_, self._key, found))
        if self._value is None:
            value = _to_json({_text(id_, name, name): _text(id_, name, each) for name, each in found.items()})
        else:
            value = _field(id_, self._value, found)
        return self._event(id_, key, value)

    def damaged(self, id_: bytes, fields: Sequence[bytes]) -> Event:
        """For the dead letter of an entry that does not fit: its fields as they are, with bytes that are no text as
        escapes."""
        texts = [field.decode(errors="backslashreplace") for field in fields]
        return self._event(id_, None, _to_json(dict(zip(texts[::2], texts[1::2], strict=True))))

    def lost(self, id_: bytes) -> Event:
        """For the dead letter of an entry that was removed before it was handled."""
        return self._event(id_, None, None)

    def _event(self, id_: bytes, key: str | None, value: bytes | None) -> Event:
        """Its id is a UUIDv7: the time of the entry, then the log and the stream, then its number within the
        millisecond. So the same entry always has the same id."""
        ms, _, seq = id_.partition(b"-")
        moment = int(ms)
        hexed = f"{moment & _MOST_MS:012x}"
        id_text = f"{hexed[:8]}-{hexed[8:]}{self._middle}{self._low | int(seq) & _MOST_SEQ:012x}"
        headers = {STREAM_HEADER: self.stream, ID_HEADER: id_.decode()}
        return Event(id_text, self._topic, key, value, headers, time=moment / 1000)


def _field(id_: bytes, name: bytes, found: dict[bytes, bytes]) -> bytes:
    if name not in found:
        names = ", ".join(each.decode(errors="backslashreplace") for each in found)
        raise Misfit(f"entry {id_.decode()} has no field {name.decode()}; it has {names}")
    return found[name]


def _text(id_: bytes, name: bytes, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        shown = name.decode(errors="backslashreplace")
        raise Misfit(f"field {shown} of entry {id_.decode()} is not UTF-8: {error}") from error


def fields_of(event: Event, streams: Streams) -> list[bytes]:
    """The entry that the mapping makes this event from again: names and values. Unserialisable: there is none."""
    if event.headers:
        raise Unserialisable(
            f"event {event.id} has headers, but a stream of others has no place for them; put them into the value"
        )
    if event.value is None:
        raise Unserialisable(f"event {event.id} is a tombstone, but a stream of others has no place for one")
    fields = _members(event, event.value) if streams.value is None else {streams.value: event.value}
    if streams.key is not None:
        if event.key is None:
            raise Unserialisable(f"event {event.id} has no key, but the field {streams.key} of its entry is the key")
        if fields.setdefault(streams.key, event.key.encode()) != event.key.encode():
            raise Unserialisable(f"event {event.id} has another key than its field {streams.key}; make them equal")
    return [part for name, value in fields.items() for part in (name.encode(), value)]


def packed(fields: Sequence[bytes]) -> bytes:
    """As PUBLISH_STREAM takes them."""
    return b"".join(part for field in fields for part in (len(field).to_bytes(4, "big"), field))


def _members(event: Event, value: bytes) -> dict[str, bytes]:
    try:
        members = _from_json(value)
    except msgspec.MsgspecError as error:
        raise Unserialisable(
            f"the value of event {event.id} becomes the fields of an entry, so it must be a JSON object ({error})"
        ) from error
    if not 0 < len(members) <= _MOST_FIELDS:
        raise Unserialisable(f"event {event.id} has {len(members)} fields; use 1 to {_MOST_FIELDS}")
    return {name: each.encode() if isinstance(each, str) else _to_json(each) for name, each in members.items()}
