"""Proofs that a stream is still the log that progress was stored for. Pure.

A stream does not sync its file at each write, and a token queue does. After a power cut the progress can be beyond the
end of the log. New events then get offsets that count as done. An anchor notices that: the offset and a checksum of the
id of the last event below the watermark.
"""

from array import array
from bisect import bisect_left
from enum import Enum
from zlib import crc32

from onward.brokers.rabbitmq.ordered.token import Anchor, thinned

_HAS_CONTENT_TYPE, _HAS_ENCODING, _HAS_HEADERS = 0x8000, 0x4000, 0x2000
_HAS_MODE, _HAS_PRIORITY, _HAS_TEXTS, _HAS_ID = 0x1000, 0x0800, 0x0700, 0x0080
_MANY = 4_096


class LogVerdict(Enum):
    SAME = "same"
    TRIMMED = "events below the first one were removed"
    CUT = "the log has lost its end"


def mark_of(properties: bytes, body: bytes) -> int:
    """A checksum that is the same in every delivery: of the message's id or, if it has none, of its body."""
    flags = properties[0] << 8 | properties[1]
    if not flags & _HAS_ID:
        return crc32(body)
    at = 2
    if flags & _HAS_CONTENT_TYPE:
        at += 1 + properties[at]
    if flags & _HAS_ENCODING:
        at += 1 + properties[at]
    if flags & _HAS_HEADERS:
        at += 4 + int.from_bytes(properties[at : at + 4], "big")
    if flags & _HAS_MODE:
        at += 1
    if flags & _HAS_PRIORITY:
        at += 1
    for text in (0x0400, 0x0200, 0x0100) if flags & _HAS_TEXTS else ():
        if flags & text:
            at += 1 + properties[at]
    return crc32(properties[at + 1 : at + 1 + properties[at]])


def judged(anchor: Anchor, watermark: int, first: Anchor) -> LogVerdict:
    """The log was read from the anchor's offset on, and `first` is the first message that came."""
    if first.offset == anchor.offset:
        return LogVerdict.SAME if first.mark == anchor.mark else LogVerdict.CUT
    if first.offset < anchor.offset:
        return LogVerdict.CUT
    return LogVerdict.TRIMMED if first.offset > watermark else LogVerdict.SAME


class AnchorTrail:
    """The anchors of the messages that were read since the last token, and the older ones of that token."""

    def __init__(self, anchors: tuple[Anchor, ...]) -> None:
        self._older = anchors
        self._offsets = array("q")
        self._marks = array("L")

    def add(self, offset: int, mark: int) -> None:
        self._offsets.append(offset)
        self._marks.append(mark)

    @property
    def last(self) -> Anchor | None:
        """Of the message that was read last."""
        if self._offsets:
            return Anchor(self._offsets[-1], self._marks[-1])
        return self._older[0] if self._older else None

    def below(self, watermark: int) -> tuple[Anchor, ...]:
        """The anchors of a token with this watermark."""
        at = bisect_left(self._offsets, watermark) - 1
        if at >= 0:
            newest = Anchor(self._offsets[at], self._marks[at])
            if not self._older or newest.offset > self._older[0].offset:
                self._older = thinned((newest, *self._older))
            if at > _MANY:
                del self._offsets[:at]
                del self._marks[:at]
        return self._older
