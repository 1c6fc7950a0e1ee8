"""The messages of an aside stream: small batches of entries. Pure.

Beside the keys of core.folded_aside there are four more:

- "!owned". The fence of an owner and how far it was. It witnesses a token that was lost.
- "!next:<generation>". It closes a generation: no entry after it has an effect, and the next generation goes on.
- "!open". The state that the next generation begins with has been copied into it completely.
- "!outcomes". How many records the last requests moved. It is only copied.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from onward.brokers.base import AsideRecord
from onward.brokers.core.folded_aside import FENCE, MOVE, MoveRequest

OWNED = "!owned"
NEXT = "!next:"
OPEN = "!open"
OUTCOMES = "!outcomes"

_LARGEST_FENCE = 1 << 62  # no owner comes so far, so an entry with a fence from here on is damaged or forged
_LARGEST_COPIED = 1 << 63
BATCH_BYTES = 65_536  # entries of one message, unless a single one is larger
_ENTRY_BYTES = 40  # of an entry around its key and its value, at most
_GENERATION_BITS = 24


class AsidePlace(NamedTuple):
    """Whose aside it is: of a partition of an ordered group, or of a whole work group."""

    topic: str
    group: str
    place: int | Literal["work"]

    def __str__(self) -> str:
        return f"the aside of {self.topic}/{self.place} in group {self.group}"


class AsideEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`value` None: the record is removed. `copied`: a part of the state that the generation begins with."""

    key: str
    value: bytes | None = None
    fence: int = 0
    copied: bool = False


def fence_fault(entry: AsideEntry, seen: int) -> str:
    """Why the fence of this entry is damaged or forged; empty: it is not. `seen`: the highest fence before it.

    Even after a forged fence just below the limit, each next owner is allowed one more, so none is shut out."""
    limit = _LARGEST_COPIED if entry.copied else max(_LARGEST_FENCE, seen + 2)
    return "" if entry.fence < limit else f"no owner has the fence {entry.fence}"


class EntryBatch(msgspec.Struct, frozen=True, array_like=True):
    """One message. `number` counts the messages of its writer, which finds its own messages by it."""

    form: Literal[1]
    writer: str
    number: int
    entries: Sequence[AsideEntry]


_decode = msgspec.msgpack.Decoder(EntryBatch).decode
_decode_outcomes = msgspec.msgpack.Decoder(dict[str, int]).decode
_encode = msgspec.msgpack.Encoder().encode


def encoded(writer: str, number: int, entries: Sequence[AsideEntry]) -> bytes:
    return _encode(EntryBatch(1, writer, number, entries))


def decoded(body: bytes) -> EntryBatch:
    """Raises MsgspecError if the message is not ours."""
    return _decode(body)


def batches(entries: Iterable[AsideEntry]) -> Iterator[list[AsideEntry]]:
    """The entries in the same order, together where they are small."""
    batch: list[AsideEntry] = []
    size = 0
    for entry in entries:
        needs = entry_bytes(entry)
        if batch and size + needs > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += needs
    if batch:
        yield batch


def entry_bytes(entry: AsideEntry) -> int:
    return _ENTRY_BYTES + len(entry.key) + len(entry.value or b"")


def fence_entry(fence: int, log_id: str | None = None) -> AsideEntry:
    return AsideEntry(FENCE, (log_id or "").encode(), fence)


def record_entry(record: AsideRecord, fence: int) -> AsideEntry:
    """Raises MsgspecError, TypeError or ValueError if the record cannot be encoded."""
    return AsideEntry(record.id, _encode(record.whole()), fence)


def owned_entry(progress: bytes, fence: int) -> AsideEntry:
    return AsideEntry(OWNED, progress, fence)


def next_entry(generation: int, fence: int) -> AsideEntry:
    return AsideEntry(f"{NEXT}{generation}", b"", fence)


def move_entry(name: str, request: MoveRequest) -> AsideEntry:
    return AsideEntry(f"{MOVE}{name}", _encode(request))


def outcomes_entry(outcomes: dict[str, int]) -> AsideEntry:
    return AsideEntry(OUTCOMES, _encode(outcomes), copied=True)


def outcomes_of(entry: AsideEntry) -> dict[str, int]:
    return _decode_outcomes(entry.value or b"")


def chain_offset(generation: int, offset: int) -> int:
    """An offset of a generation as one number, which grows from generation to generation."""
    return generation << 8 * 8 - _GENERATION_BITS | offset


def generation_and_offset(place: int) -> tuple[int, int]:
    shift = 8 * 8 - _GENERATION_BITS
    return place >> shift, place & (1 << shift) - 1
