"""Tokens: the messages in a token queue, their order, and how long a new owner waits. Pure.

Each group has one token queue for each partition. Its newest token says how far the group is and who owned the
partition last. The server delivers the queue to one consumer at a time, its *active* consumer. The active consumer
owns the partition once its own claim was delivered back to it.

A queue may contain several messages: tokens that were replaced and not yet acknowledged, late tokens of former owners,
and probes. The newest token is the one with the highest fence and, within a fence, the highest number.
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import msgspec

_DRIFT = 1.01  # two clocks that measure the same lease may differ by this factor
LONGEST_LEASE_S = 3_600.0  # a token with a longer one is damaged or forged
_LARGEST_FOUND = 1 << 61  # fence or number. No group comes so far: a token from here on is damaged or forged
_LARGEST = 1 << 63  # what follows a token that was just below stays far below this
_ANCHORS = 8
_SPREAD = 8  # each older anchor is up to this many times as far back as the one before


class Awaited(msgspec.Struct, frozen=True, array_like=True):
    """The owner whose events may still run, as its last token names it."""

    tenure: str
    member: str
    lease_s: float  # how long its events may start after its last token; 0: it starts none any more

    def ended(self) -> "Awaited":
        return msgspec.structs.replace(self, lease_s=0.0)


class Anchor(msgspec.Struct, frozen=True, array_like=True):
    """An event that proves that a log is the same: its offset and a checksum of its id."""

    offset: int
    mark: int


class Token(msgspec.Struct, frozen=True, tag="token", tag_field="onward", omit_defaults=True):
    """One token. `tenure` names the ownership that wrote it, and is unique in the fleet.

    `awaits` is None after a drained release, and before the first owner. While a new owner waits for the last one, its
    tokens still name the last one there: if the new owner dies too, the next one waits as well."""

    fence: int
    number: int
    tenure: str
    topic_id: str  # the id of the topic's log, as the registry has it
    log_id: str  # differs from topic_id after the log has lost its end
    watermark: int
    progress: str = ""  # in the format of core.progress_codec
    anchors: tuple[Anchor, ...] = ()  # the newest one first. It is the last event below the watermark
    awaits: Awaited | None = None
    is_seed: bool = False  # no progress was stored yet

    @property
    def order(self) -> tuple[int, int]:
        return self.fence, self.number

    @property
    def is_clean(self) -> bool:
        return self.awaits is None

    @property
    def has_room(self) -> bool:
        """Whether a new owner may go on from it. Its own tokens are higher, and must still be read back."""
        return max(self.order) < _LARGEST_FOUND

    def claimed(self, tenure: str) -> "Token":
        """The claim of a new owner, which has not started any event."""
        return msgspec.structs.replace(self, fence=self.fence + 1, tenure=tenure)

    def next(self) -> "Token":
        return msgspec.structs.replace(self, number=self.number + 1)


class Probe(msgspec.Struct, frozen=True, tag="probe", tag_field="onward"):
    """A message that only shows how far the queue was delivered. A queue delivers in order, so the consumer that gets
    its own probe has got every token before it."""

    mark: str


class Stray(msgspec.Struct, frozen=True):
    """A message that is neither. `is_newer`: it looks like a token of a later version of Onward."""

    is_newer: bool


TokenMessage = Token | Probe | Stray
_decode: Callable[[bytes], Token | Probe] = msgspec.msgpack.Decoder(Token | Probe).decode
_encode = msgspec.msgpack.Encoder().encode


class TokenArrival(NamedTuple):
    """A delivery of a token queue. `redelivered`: it was delivered to a consumer before."""

    tag: int
    redelivered: bool
    message: TokenMessage


def encoded(message: Token | Probe) -> bytes:
    return _encode(message)


def decoded(body: bytes) -> TokenMessage:
    try:
        message = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Stray(is_newer=_is_ours(body))
    return Stray(is_newer=False) if isinstance(message, Token) and max(message.order) >= _LARGEST else message


def _is_ours(body: bytes) -> bool:
    try:
        found = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return isinstance(found, dict) and "onward" in found


def newer(one: Token | None, other: Token) -> Token:
    """The newest of two tokens. Members that create a group at the same time may write several first tokens: the one
    that starts earlier counts, so that no event is skipped."""
    if one is None or other.order > one.order:
        return other
    if other.order == one.order and other.watermark < one.watermark:
        return other
    return one


def wait_s(awaits: Awaited | None, *, gone: Collection[str], closed: Collection[str], grace_s: float) -> float:
    """How long a new owner waits, counted from the return of its probe.

    The last owner starts no event later than its lease after it sent its last token. It sent that before the server
    made us the active consumer, so before our probe came back. `gone`: members that have no process left. `closed`:
    tenures that this process has ended itself."""
    if awaits is None or awaits.member in gone:
        return 0.0
    lease_s = 0.0 if awaits.tenure in closed else awaits.lease_s if _is_possible(awaits.lease_s) else LONGEST_LEASE_S
    return _DRIFT * lease_s + grace_s


def _is_possible(lease_s: float) -> bool:
    return 0.0 <= lease_s <= LONGEST_LEASE_S  # False for a value that is not a number


def wait_note(awaits: Awaited, waits_s: float) -> str:
    """Why a new owner waits so long, for the operator."""
    waiting = f"this member waits up to {waits_s:,.0f} s, because events of the last owner may still run"
    if not _is_possible(awaits.lease_s):
        return (
            f"its token is damaged or forged: it names a lease of {awaits.lease_s:g} s, and no member has more than "
            f"{LONGEST_LEASE_S:,.0f} s. Find out which program writes to its token queue; {waiting}"
        )
    return f"its last owner (member {awaits.member}) ended without releasing it; {waiting}"


def thinned(anchors: Iterable[Anchor]) -> tuple[Anchor, ...]:
    """A few of these anchors, which are sorted from the newest to the oldest: the newest, and others ever farther
    apart. If the log loses its end, it is read again from the newest anchor that is left."""
    newest, *older = anchors
    kept: dict[int, Anchor] = {}
    for anchor in older:
        distance = newest.offset - anchor.offset
        if distance <= 0:
            continue
        step = min(_ANCHORS - 2, (distance.bit_length() - 1) // (_SPREAD.bit_length() - 1))
        # An anchor must grow old, so the older one of two stays. In the last step it is replaced: it only grows older.
        if step < _ANCHORS - 2 or step not in kept:
            kept[step] = anchor
    return (newest, *sorted(kept.values(), key=lambda anchor: -anchor.offset))
