"""What a commit says beside its offset, and where an owner begins, given what the owner before it left. Pure.

A mark is the progress codec's text, then "." and the log's id, then "." and how many partitions the topic had when
the group began. A mark from another log says that its offset means nothing here.
"""

import time
from typing import NamedTuple

from onward.brokers.base import Progress
from onward.brokers.core.progress_codec import LIMIT_CHARS, Alphabet, Decoded, Encoded, decode, encode
from onward.event import Partition

FORGOTTEN = "onward: forgotten"  # in place of a mark: the group was dropped, and begins anew


class Limit(NamedTuple):
    """How much text the coordinator takes: Kafka 4.3 refuses one of exactly its limit."""

    chars: int = LIMIT_CHARS - 1
    alphabet: Alphabet = "utf16"

    def smaller(self) -> "Limit":
        """After a refusal: first the alphabet for brokers that count bytes, then half of it, and so on."""
        return Limit(self.chars, "bytes") if self.alphabet == "utf16" else Limit(self.chars // 2, "bytes")


class Mark(NamedTuple):
    said: Decoded
    log_id: str  # empty: not ours
    partitions: int  # of the topic when the group began


class Committed(NamedTuple):
    """A partition's commit as it was found; `mark` is its text."""

    offset: int | None
    mark: str


class Log(NamedTuple):
    """A partition's log as it was found, and where a new group would begin in it."""

    log_id: str
    low: int
    high: int
    start: int


class Origin(NamedTuple):
    """Where an ownership begins."""

    position: int
    stored: Progress | None
    fence: int
    unclean: bool
    note: str = ""  # what an operator must know: events are gone, or come again
    blank: bool = False  # the commit says nothing of this log, so there may be more in its aside than it knows of


def written(progress: Progress, fence: int, *, clean: bool, suffix: str, limit: Limit) -> tuple[str, Encoded]:
    """The text for a commit of this progress. `suffix` comes from `suffixed`."""
    log_id = suffix.split(".")[1]
    room = limit.chars - len(suffix)
    encoded = encode(progress, fence=fence, clean=clean, log_id=log_id, limit=room, alphabet=limit.alphabet)
    return encoded.text + suffix, encoded


def suffixed(log_id: str, partitions: int) -> str:
    return f".{log_id}.{partitions}"


def read(text: str, offset: int) -> Mark:
    body, _, partitions = text.rpartition(".")
    body, _, log_id = body.rpartition(".")
    if not body or not partitions.isascii() or not partitions.isdigit():
        return Mark(Decoded(), "", 0)
    said = decode(body, offset, log_id=log_id)
    return Mark(said, log_id, int(partitions)) if said.fence is not None else Mark(Decoded(), "", 0)


def began_with(marks: dict[int, Committed], now: int) -> int:
    """How many partitions the topic had when the group began: none, if it begins now."""
    counts = [read(each.mark, each.offset).partitions or now for each in marks.values() if each.offset is not None]
    return min(counts, default=0)


def origin(partition: Partition, committed: Committed, log: Log, *, begun: int) -> Origin:
    """`begun`: the partitions that the group began with; a later one is read from its beginning."""
    if committed.offset is None:
        position = log.low if begun and partition.index >= begun else log.start
        return Origin(position, _progress(partition, position), _fence(None), False, blank=True)
    mark = read(committed.mark, committed.offset)
    fence = _fence(mark.said.fence)
    if mark.log_id and mark.log_id != log.log_id:
        note = f"{partition} is another log than the group's progress tells of: it is read from its beginning"
        return Origin(log.low, _progress(partition, log.low), fence, False, note, blank=True)
    if committed.offset > log.high:
        note = f"{partition} ends at {log.high}, before the group's {committed.offset}: it is read from its beginning"
        return Origin(log.low, _progress(partition, log.low), fence, False, note, blank=True)
    note, position = "", committed.offset
    if position < log.low:
        note = f"{partition}: positions {position} to {log.low} were removed by retention before they were handled"
        position = log.low
    unclean = mark.said.fence is not None and not mark.said.clean
    blank = mark.said.fence is None
    return Origin(position, _resumed(partition, position, mark.said), fence, unclean, note, blank)


def _resumed(partition: Partition, position: int, said: Decoded) -> Progress:
    above = [(max(start, position), stop) for start, stop in said.done_above if stop > position]
    tries = {at: each for at, each in said.tries.items() if at >= position}
    return Progress(partition, 0, position, above, tries=tries)


def _progress(partition: Partition, position: int) -> Progress | None:
    return Progress(partition, 0, position) if position else None


def _fence(stored: int | None) -> int:
    """One more than the last. Where that was lost, with a reset of the group, the clock stands above it; and where it
    does not, because the clock of an owner was ahead, the aside tells of it."""
    return int(time.time() * 1000) if stored is None else stored + 1
