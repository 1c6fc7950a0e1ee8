"""The metadata of commits, and where an owner starts after the last owner's commit. Pure.

The metadata is the progress codec's text, then "." and the owner's mark, then "." and the log's id, then "." and how
many partitions the topic had when the group began. Earlier versions wrote no mark. If the metadata has the id of
another log, its offset does not apply to this one.
"""

import time
from typing import NamedTuple

from onward.brokers.base import Progress
from onward.brokers.core.progress_codec import LIMIT_CHARS, Alphabet, Decoded, Encoded, decode, encode
from onward.event import Partition

FORGOTTEN = "onward: forgotten"  # in place of metadata: the group was dropped


class TextLimit(NamedTuple):
    """How much text the coordinator accepts. Kafka 4.3 refuses a text of exactly its limit."""

    chars: int = LIMIT_CHARS - 1
    alphabet: Alphabet = "utf16"

    def smaller(self) -> "TextLimit":
        """After a refusal: first the alphabet for brokers that count bytes, then half the size, and so on."""
        return TextLimit(self.chars, "bytes") if self.alphabet == "utf16" else TextLimit(self.chars // 2, "bytes")


class Metadata(NamedTuple):
    progress: Decoded
    log_id: str  # empty: the text is not ours
    partitions: int  # of the topic when the group began
    owner: str = ""  # the mark of the member that committed; empty: unknown


class Committed(NamedTuple):
    """A partition's commit as it was found; `text` is its metadata."""

    offset: int | None
    text: str


class LogBounds(NamedTuple):
    """A partition's log as it was found, and where a new group would start in it."""

    log_id: str
    low: int
    high: int
    start: int


class StartPoint(NamedTuple):
    """Where an ownership starts."""

    position: int
    stored: Progress | None
    fence: int
    unclean: bool
    owner: str = ""  # the mark of the last owner
    note: str = ""  # for the operator: events are lost, or are delivered again
    blank: bool = False  # the commit has no fence for this log, so the aside may contain a higher one


def write(
    progress: Progress, fence: int, *, clean: bool, owner: str, suffix: str, limit: TextLimit
) -> tuple[str, Encoded]:
    """The metadata for a commit of this progress. `suffix` comes from `suffix_of`."""
    log_id = suffix.split(".")[1]
    tail = f".{owner}{suffix}"
    room = limit.chars - len(tail)
    encoded = encode(progress, fence=fence, clean=clean, log_id=log_id, limit=room, alphabet=limit.alphabet)
    return encoded.text + tail, encoded


def suffix_of(log_id: str, partitions: int) -> str:
    return f".{log_id}.{partitions}"


def read(text: str, offset: int) -> Metadata:
    """Decode the metadata of a commit with this offset."""
    body, *owner, log_id, partitions = parts if len(parts := text.split(".")) in (3, 4) else ("", "", "")
    if not body or not partitions.isascii() or not partitions.isdigit():
        return Metadata(Decoded(), "", 0)
    progress = decode(body, offset, log_id=log_id)
    if progress.fence is None:
        return Metadata(Decoded(), "", 0)
    return Metadata(progress, log_id, int(partitions), "".join(owner))


def partitions_at_start(commits: dict[int, Committed], now: int) -> int:
    """How many partitions the topic had when the group began; 0: it begins now. `now`: how many it has now."""
    counts = [read(each.text, each.offset).partitions or now for each in commits.values() if each.offset is not None]
    return min(counts, default=0)


def start_point(partition: Partition, committed: Committed, bounds: LogBounds, *, began_with: int) -> StartPoint:
    """`began_with`: how many partitions the topic had when the group began. One that was added later is read from its
    beginning."""
    if committed.offset is None:
        position = bounds.low if began_with and partition.index >= began_with else bounds.start
        return StartPoint(position, _progress(partition, position), _next_fence(None), False, blank=True)
    found = read(committed.text, committed.offset)
    fence = _next_fence(found.progress.fence)
    note = _mismatch(partition, committed.offset, found.log_id, bounds)
    if note:
        return StartPoint(bounds.low, _progress(partition, bounds.low), fence, False, note=note, blank=True)
    position = max(committed.offset, bounds.low)
    if position > committed.offset:
        removed = f"positions {committed.offset} to {position}"
        note = f"{partition}: {removed} were removed by retention before they were handled"
    blank = found.progress.fence is None
    unclean = not blank and not found.progress.clean
    return StartPoint(position, _resumed(partition, position, found.progress), fence, unclean, found.owner, note, blank)


def _mismatch(partition: Partition, offset: int, log_id: str, bounds: LogBounds) -> str:
    """Why a commit does not apply to this log; empty: it does."""
    if log_id and log_id != bounds.log_id:
        return f"{partition} is a new log, and the group's progress is of an older one: it is read from its beginning"
    if offset > bounds.high:
        return f"{partition} ends at {bounds.high}, below the group's offset {offset}: it is read from its beginning"
    return ""


def _resumed(partition: Partition, position: int, found: Decoded) -> Progress:
    above = [(max(start, position), stop) for start, stop in found.done_above if stop > position]
    tries = {at: each for at, each in found.tries.items() if at >= position}
    return Progress(partition, 0, position, above, tries=tries)


def _progress(partition: Partition, position: int) -> Progress | None:
    return Progress(partition, 0, position) if position else None


def _next_fence(stored: int | None) -> int:
    """One more than the last fence. If a reset of the group removed the last one, the clock in ms is above it. If the
    clock of an earlier owner was ahead, the aside contains the higher fence."""
    return int(time.time() * 1000) if stored is None else stored + 1
