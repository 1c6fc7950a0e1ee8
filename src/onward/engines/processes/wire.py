"""What the engine and a worker process tell each other: frames on a socket, and a page of memory that they share.

Work goes down once and never comes back. Success is told by a number on the page, which costs no system call; a
failure by a frame, sent before that number covers it. So whoever reads the page first and the socket then knows
everything about the runs that the page calls finished, even if the worker is dead by now.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator

import msgspec

from onward.errors import GiveUp, RetryLater, Skip, Undecodable
from onward.event import Delivery

DECIDING = (Undecodable, RetryLater, GiveUp, Skip)
"""Errors that say what is to become of the event: the engine's process raises them anew."""

_LENGTH = struct.Struct(">I")
_PAGE_BYTES = 4096


class Down(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the engine to a worker."""


class Setup(Down, frozen=True, kw_only=True):
    """The first frame."""

    target: str
    batch: bool
    timeout_s: float | None
    argv: list[str]
    main: tuple[str, str] | None  # the file and the package of the program's main module, if the target is in it
    log_level: int | None
    log_format: str


class Events(Down, frozen=True):
    """Run these in turn; they are numbered from `first` on. What is not begun at `until` must not begin."""

    first: int
    until: float
    works: list[Delivery]


class Batches(Down, frozen=True):
    first: int
    until: float
    works: list[tuple[Delivery, ...]]


class Retire(Down, frozen=True):
    """Nothing more will come: end."""


class Up(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a worker to the engine."""


class Ready(Up, frozen=True):
    """The handler is imported."""


class Unfit(Up, frozen=True):
    """It cannot be imported."""

    why: str


class Idle(Up, frozen=True):
    """All that was sent has been run: look at the page."""


class Returned(Up, frozen=True):
    """These were not begun: called back in time, or too late to begin."""

    numbers: list[int]


class Failed(Up, frozen=True):
    number: int
    name: str
    message: str
    kinds: list[str]
    trace: str
    ours: str  # the name of an error of ours that says what is to become of the event, or nothing
    after_s: float  # of RetryLater


FromEngine = Setup | Events | Batches | Retire
FromWorker = Ready | Unfit | Idle | Returned | Failed

_encode = msgspec.msgpack.Encoder().encode
from_engine = msgspec.msgpack.Decoder(FromEngine).decode
from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def whole(work: Delivery | tuple[Delivery, ...]) -> Delivery | tuple[Delivery, ...]:
    """The work as an encoder takes it: a broker may leave fields of an event until somebody asks for them."""
    if isinstance(work, tuple):
        return tuple([_whole(delivery) for delivery in work])
    return _whole(work)


def _whole(delivery: Delivery) -> Delivery:
    event = delivery.event.whole()
    return delivery if event is delivery.event else msgspec.structs.replace(delivery, event=event)


def frame(message: Down | Up) -> bytes:
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Splitter:
    """Frames out of a stream that comes in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The bodies of the frames that are complete now."""
        buffer = self._buffer
        buffer += piece
        at = 0
        while len(buffer) - at >= 4:
            (size,) = _LENGTH.unpack_from(buffer, at)
            if len(buffer) - at - 4 < size:
                break
            yield bytes(buffer[at + 4 : at + 4 + size])
            at += 4 + size
        if at:
            del buffer[:at]


class StatusPage:
    """One page of memory shared by the engine and one worker, who alone writes it. Runs are known by their numbers.

    Each field is eight aligned bytes, so it is always read whole.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, _PAGE_BYTES)
        self._counts = memoryview(self._map).cast("Q")
        self._times = memoryview(self._map).cast("d")

    @property
    def finished(self) -> int:
        """One more than the number of the last run that has ended."""
        return self._counts[0]

    @property
    def started(self) -> int:
        """One more than the number of the last run that has begun; more than `finished`: it is running."""
        return self._counts[1]

    @property
    def since(self) -> float:
        """When the last run began or ended, on onward.clock."""
        return self._times[2]

    @property
    def busy_s(self) -> float:
        """How long all runs took together."""
        return self._times[3]

    def begin(self, number: int, at: float) -> None:
        self._times[2] = at
        self._counts[1] = number + 1

    def finish(self, number: int, at: float) -> None:
        self._times[3] += at - self._times[2]
        self._times[2] = at
        self._counts[0] = number + 1

    def close(self) -> None:
        self._counts.release()
        self._times.release()
        self._map.close()


def new_page() -> int:
    """The descriptor of memory for a page."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("onward-page")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _PAGE_BYTES)
    return descriptor
