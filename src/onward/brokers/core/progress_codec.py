"""Encodes the part of a partition's progress beyond its watermark as a short text, and decodes it.

It is for brokers that store one number and one text per partition, like a commit of Kafka. The text is valid only
together with the watermark and the log that it was written for. Format 1, all bits most significant first:

    text      "O1", then the bits as characters: 15 bits each in `utf16`, base85 of whole bytes in `bytes`
    bits      check 32 | origin 32 | clean 1 | fence NUMBER | tries | done | zeros up to a whole character
    check     CRC-32 of all bits after it, zero-padded on the left to whole bytes
    origin    CRC-32 of "<log id>:<watermark>", because tools that copy a commit to another log or offset often copy
              the text unchanged
    tries     (1 | failed NUMBER | started NUMBER | crashes NUMBER | RUNS)* 0; positions with equal tries share a group
    done      0 nothing | 10 RUNS | 11 NUMBER of bits, then a bit for each position from the watermark on, 1: done
    NUMBER    6 bits L, then the L bits after the leading one of value + 1: 0 to 2**63 - 1
    RUNS      NUMBER of intervals, then for each 32 of them RICE of the gaps before them and RICE of their lengths.
              Gaps and lengths are stored less 1, because none is empty. Only the first gap is stored as it is; it is
              counted from the watermark
    RICE      6 bits k. If k = 63, all values are 0. Otherwise: for each value, value >> k zeros and a one; then, for
              each value, its low k bits

Rice codes need at most a tenth more than the entropy of scattered positions. The density of done positions changes from
the old end of a partition to the new one, so each 32 intervals have their own k.
"""

import re
from base64 import b85decode, b85encode
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Literal
from zlib import crc32

import msgspec

from onward.brokers.base import Progress, Tries

Alphabet = Literal["utf16", "bytes"]

LIMIT_CHARS = 4_096  # Kafka's offset.metadata.max.bytes, which counts UTF-16 units despite its name
MAX_TRIES = 100_000  # positions; a few bits can encode a long run, which must not fill the reader's memory

_PREFIX = "O1"  # marks a text of Onward, in format 1
_CHECK_BITS = 32
_BLOCK = 32  # how many values share one k
_ALL_ZERO = 63  # this k means that all values are 0

# 15 bits per character, from two ranges of single UTF-16 units that no normalisation changes. The first range (CJK with
# its extension A, hexagrams, Yi) has 28,813 values. The other 3,955 values are in the private use area.
_WIDE = re.compile("[\u3400-\ua48c\ue000-\uef72]+")
_FIRST = 0x3400
_REST = 3_955
_JUMP = 0xE000 - 0xA48D  # from the end of the first range to the second
_DONE = re.compile("1+")


class Encoded(msgspec.Struct, frozen=True):
    text: str  # empty if the limit leaves no room even for the fence
    covered_to: int  # the text has the positions that are done below this one, and none at or above it
    done_dropped: int  # how many done positions are left out and would run again. Above 0, read no more events for now
    tries_dropped: int  # how many tried positions are left out and would count as never tried


class Decoded(msgspec.Struct, frozen=True):
    """The content of a text. It is empty if the text is unknown, damaged or in a newer format.

    If a valid text was written for another watermark or log, only its fence is used, so that fences continue to grow.
    """

    fence: int | None = None
    clean: bool = False  # written by a drained release
    done_above: list[tuple[int, int]] = []
    tries: dict[int, Tries] = {}


def encode(
    progress: Progress,
    *,
    fence: int,
    clean: bool,
    log_id: str = "",
    limit: int = LIMIT_CHARS,
    alphabet: Alphabet = "utf16",
) -> Encoded:
    """Encode as much as fits into `limit`: the fence, then the tries, then the done positions, each from the lowest
    position up."""
    base = progress.watermark
    head = f"{_origin(log_id, base)}{clean:b}{_number(fence)}"
    room = _capacity_bits(limit, alphabet) - _CHECK_BITS - len(head)
    if room < 2:  # the two bits for "no tries, nothing done"
        return Encoded("", base, _count(progress.done_above, base), len(progress.tries))
    tries, tries_dropped = _tries(progress, room - 1)
    done, covered_to = _done(progress, room - len(tries))
    text = _seal(head + tries + done, alphabet)
    return Encoded(text, covered_to, _count(progress.done_above, covered_to), tries_dropped)


def decode(text: str, watermark: int, *, log_id: str = "") -> Decoded:
    """Decode a text. It never raises: with a text that is not surely from Onward, nothing counts as done."""
    try:
        bits = _Bits(_unseal(text))
        ours = bits.take(32) == _origin(log_id, watermark)
        clean = bits.take(1) == "1"
        fence = bits.number()
        tries = dict(bits.tries(watermark))
        done_above = bits.done(watermark)
        bits.end()
    except ValueError:
        return Decoded()
    return Decoded(fence, clean, done_above, tries) if ours else Decoded(fence)


def _count(spans: Iterable[tuple[int, int]], covered_to: int) -> int:
    return sum(stop - max(start, covered_to) for start, stop in spans if stop > covered_to)


def _origin(log_id: str, watermark: int) -> str:
    return f"{crc32(f'{log_id}:{watermark}'.encode()):032b}"


def _tries(progress: Progress, room: int) -> tuple[str, int]:
    """The section, and how many positions did not fit. Positions below the watermark are done, so they are left out."""
    positions = sorted(position for position in progress.tries if position >= progress.watermark)
    fit = min(len(positions), MAX_TRIES)
    section = _groups(progress, positions[:fit])
    if len(section) > room:
        sizes = range(1, fit)
        fit = bisect_right(sizes, room, key=lambda size: len(_groups(progress, positions[:size])))
        section = _groups(progress, positions[:fit])
    return section, len(positions) - fit


def _groups(progress: Progress, positions: Sequence[int]) -> str:
    groups: dict[Tries, list[tuple[int, int]]] = {}
    for position in positions:
        groups.setdefault(progress.tries[position], []).append((position, position + 1))
    parts = []
    for tries, spans in groups.items():
        runs, _ = _runs(spans, progress.watermark)
        parts += ["1", _number(tries.failed), _number(tries.started), _number(tries.crashes), runs]
    return "".join([*parts, "0"])


def _done(progress: Progress, room: int) -> tuple[str, int]:
    """The section, and the position up to which it covers the done positions.

    It is either runs or a bitset: the shorter one if both cover everything, otherwise the one that covers more."""
    base, spans = progress.watermark, progress.done_above
    if not spans:
        return "0", base
    window = spans[-1][1] - base
    size = 2 + len(_number(window))
    wide = max(0, min(window, room - size))  # how many positions fit into a bitset
    runs, reached = _runs(spans, base, min(room, size + wide) - 2)
    if reached >= base + wide:
        return ("10" + runs if reached > base else "0"), reached
    bitset = _bitset(spans, base, base + wide)
    return (f"11{_number(len(bitset))}{bitset}" if bitset else "0"), base + wide


def _bitset(spans: Iterable[tuple[int, int]], end: int, top: int) -> str:
    parts = []
    for start, stop in spans:
        if start >= top:
            break
        parts.append("0" * (start - end) + "1" * (min(stop, top) - start))
        end = stop
    return "".join(parts)


def _runs(spans: Sequence[tuple[int, int]], base: int, room: float = inf) -> tuple[str, int]:
    """The code of as many intervals as fit, from the lowest up, and the end of the last one."""
    gaps, lengths = _split(spans, base)
    room -= len(_number(len(gaps)))
    parts = []
    held = 0
    size = _BLOCK
    while size == _BLOCK and held < len(gaps):
        size, block = _block(gaps[held : held + _BLOCK], lengths[held : held + _BLOCK], room)
        parts.append(block)
        room -= len(block)
        held += size
    reached = base - 1 + sum(gaps[:held]) + sum(lengths[:held]) + 2 * held if held else base
    return _number(held) + "".join(parts), reached


def _block(gaps: Sequence[int], lengths: Sequence[int], room: float) -> tuple[int, str]:
    """How many of the values fit, from the first one on, and their code."""
    for size in range(len(gaps), 0, -1):
        block = _rice(gaps[:size]) + _rice(lengths[:size])
        if len(block) <= room:
            return size, block
    return 0, ""


def _split(spans: Sequence[tuple[int, int]], base: int) -> tuple[list[int], list[int]]:
    """The gaps and lengths of ascending intervals, each less 1. Adjacent intervals are merged."""
    assert not spans or spans[0][0] >= base, "done_above must not have positions below the watermark"
    gaps: list[int] = []
    lengths: list[int] = []
    end = base - 1  # not base, so that a first interval that begins at the watermark still starts a new one
    for start, stop in spans:
        assert end <= start < stop, "intervals must ascend"
        if start > end:
            gaps.append(start - end - 1)
            lengths.append(stop - start - 1)
        else:
            lengths[-1] += stop - start
        end = stop
    return gaps, lengths


def _rice(values: Sequence[int]) -> str:
    total, count = sum(values), len(values)
    if not total:
        return f"{_ALL_ZERO:06b}"
    # For a geometric distribution the code is shortest if 2**k is between 0.48 and 0.96 of the mean.
    k = (123 * (2 * total + count) // (512 * count)).bit_length()
    counted = "1".join(["0" * (value >> k) for value in values])
    if not k:
        return f"{k:06b}{counted}1"
    low = (1 << k) - 1
    rest = 0
    for value in values:
        rest = rest << k | value & low
    return f"{k:06b}{counted}1{rest:0{k * count}b}"


def _number(value: int) -> str:
    assert 0 <= value < 1 << 63, value
    bits = bin(value + 1)[3:]
    return f"{len(bits):06b}{bits}"


class _Bits:
    """Reads the codes. Raises ValueError if a code extends over the end."""

    def __init__(self, bits: str) -> None:
        self._bits = bits
        self._at = 0

    def take(self, count: int) -> str:
        taken = self._bits[self._at : self._at + count]
        if len(taken) < count:
            raise ValueError("cut off")
        self._at += count
        return taken

    def end(self) -> None:
        rest = self._bits[self._at :]
        if "1" in rest or len(rest) >= 15:
            raise ValueError("more than is known")

    def number(self) -> int:
        return int("1" + self.take(int(self.take(6), 2)), 2) - 1

    def tries(self, base: int) -> Iterator[tuple[int, Tries]]:
        left = MAX_TRIES
        while self.take(1) == "1":
            tries = Tries(self.number(), self.number(), self.number())
            for start, stop in self.runs(base):
                left -= stop - start
                if left < 0:
                    raise ValueError("too many")
                yield from ((position, tries) for position in range(start, stop))

    def done(self, base: int) -> list[tuple[int, int]]:
        if self.take(1) == "0":
            return []
        if self.take(1) == "0":
            return list(self.runs(base))
        found = _DONE.finditer(self.take(self.number()))
        return [(base + match.start(), base + match.end()) for match in found]

    def runs(self, base: int) -> Iterator[tuple[int, int]]:
        left = self.number()
        end = base - 1
        while left > 0:
            size = min(_BLOCK, left)
            left -= size
            for gap, length in zip(self.rice(size), self.rice(size), strict=True):
                start = end + gap + 1
                end = start + length + 1
                yield start, end

    def rice(self, count: int) -> list[int]:
        k = int(self.take(6), 2)
        if k == _ALL_ZERO:
            return [0] * count
        counted = re.compile(f"(?:0*1){{{count}}}").match(self._bits, self._at)
        if not counted:
            raise ValueError("cut off")
        self._at = counted.end()
        values = [len(zeros) << k for zeros in counted[0].split("1")]
        values.pop()  # the empty text after the last "1"
        if not k:
            return values
        low = (1 << k) - 1
        rest = int(self.take(k * count), 2)
        shifts = range(k * (count - 1), -1, -k)
        return [value | rest >> shift & low for value, shift in zip(values, shifts, strict=True)]


def _capacity_bits(limit: int, alphabet: Alphabet) -> int:
    chars = max(0, limit - len(_PREFIX))
    return 15 * chars if alphabet == "utf16" else 8 * (chars * 4 // 5)  # base85: 4 bytes in 5 characters


def _seal(bits: str, alphabet: Alphabet) -> str:
    unit = 15 if alphabet == "utf16" else 8
    bits += "0" * (-(_CHECK_BITS + len(bits)) % unit)
    body = int(bits, 2)
    sealed = _check(body, len(bits)) << len(bits) | body
    units = (_CHECK_BITS + len(bits)) // unit
    chars = _wide(sealed, units) if alphabet == "utf16" else b85encode(sealed.to_bytes(units, "big")).decode()
    return _PREFIX + chars


def _unseal(text: str) -> str:
    if not text.startswith(_PREFIX):
        raise ValueError("not ours")
    chars = text[len(_PREFIX) :]
    if chars.isascii():
        data = b85decode(chars)
        sealed, size = int.from_bytes(data, "big"), 8 * len(data) - _CHECK_BITS
    else:
        sealed, size = _narrow(chars), 15 * len(chars) - _CHECK_BITS
    if size <= 0 or sealed >> size != _check(body := sealed & (1 << size) - 1, size):
        raise ValueError("damaged")
    return f"{body:0{size}b}"


def _check(body: int, bits: int) -> int:
    return crc32(body.to_bytes((bits + 7) // 8, "big"))


# All characters are encoded and decoded at once, as 16-bit lanes of one large number. So the work is done in C instead
# of in a Python loop.


def _wide(value: int, chars: int) -> str:
    for half, low in _halvings(chars):
        kept = value & low
        value = kept | (value ^ kept) << half
    ones = _ones(chars)
    rest = (value + _REST * ones) >> 15 & ones  # a one in each lane whose value is beyond the first range
    value += _FIRST * ones + _JUMP * rest
    return value.to_bytes(2 * chars, "big").decode("utf-16-be")


def _narrow(text: str) -> int:
    if not _WIDE.fullmatch(text):
        raise ValueError("not ours")
    ones = _ones(len(text))
    value = int.from_bytes(text.encode("utf-16-be"), "big") - _FIRST * ones
    value -= _JUMP * (value >> 15 & ones)
    for half, low in reversed(_halvings(len(text))):
        kept = value & low
        value = kept | (value ^ kept) >> half
    return value


def _ones(lanes: int) -> int:
    return int.from_bytes(b"\0\1" * lanes, "big")


def _halvings(lanes: int) -> list[tuple[int, int]]:
    """The steps that spread digits of 15 bits over lanes of 16 bits: first the halves move apart, then the quarters,
    and so on.

    Each step has the number of lanes in a half, which is also the number of bits that it moves, and a mask of the
    halves that stay.
    """
    half = 1 << (lanes - 1).bit_length() >> 1
    low = (1 << 15 * half) - 1
    steps = []
    while half:
        steps.append((half, low))
        low &= low >> 15 * half // 2
        low |= low << 16 * half
        half //= 2
    return steps
