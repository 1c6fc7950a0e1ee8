"""The properties of a message as their fields and entries, none of which is decoded. Pure.

A message of another program is sent again in the bytes that it came in: what is decoded and encoded again may become
longer, or something that AMQP cannot express.
"""

import struct
from collections.abc import Iterable, Mapping

from onward.brokers.rabbitmq.amqp.faults import Malformed
from onward.brokers.rabbitmq.amqp.frames import PROPERTY_FIELDS, field_end
from onward.brokers.rabbitmq.amqp.tables import entry_end, long_string

_FLAGS = struct.Struct(">H")


def fields_of(raw: bytes) -> dict[str, bytes]:
    """The bytes of each property that is present, by name. Raises Malformed if they are cut off."""
    found: dict[str, bytes] = {}
    try:
        flags, at = _FLAGS.unpack_from(raw)[0], 2
        for name, kind, flag in PROPERTY_FIELDS:
            if flags & flag:
                end = field_end(kind, raw, at)
                found[name], at = raw[at:end], end
    except (struct.error, IndexError) as error:
        raise Malformed("the properties of a message are cut off") from error
    if at != len(raw) or flags & 3:
        raise Malformed("the properties of a message do not end where they should")
    return found


def joined_fields(fields: Mapping[str, bytes]) -> bytes:
    """The opposite of `fields_of`."""
    flags = sum([flag for name, _, flag in PROPERTY_FIELDS if name in fields])
    return _FLAGS.pack(flags) + b"".join([fields[name] for name, _, _ in PROPERTY_FIELDS if name in fields])


def entries_of(field: bytes) -> list[tuple[bytes, bytes]]:
    """The name and the bytes of each entry of a table with its length in front. Raises Malformed if it is cut off."""
    found: list[tuple[bytes, bytes]] = []
    at, end = 4, len(field)
    try:
        while at < end:
            following = entry_end(field, at)
            found.append((field[at + 1 : at + 1 + field[at]], field[at:following]))
            at = following
    except (struct.error, IndexError) as error:
        raise Malformed("a field table is cut off") from error
    if at != end and field:
        raise Malformed("a field table is cut off")
    return found


def joined_entries(entries: Iterable[bytes]) -> bytes:
    """A table of these entries, with its length in front."""
    return long_string(b"".join(entries))
