"""The messages between the engine and a worker process: frames on a socket, and a page of memory that they share.

The engine sends work once, and the worker never sends it back. The worker reports success by a number on the page,
which costs no system call. It reports a failure by a frame, before that number includes the run. So an engine that
reads the page first and then the socket has the result of every finished run, even if the worker has died since.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator

import msgspec

from onward.error_report import ErrorReport
from onward.event import Delivery

Order = bytes
RECALL: Order = b"r"
LOCATE: Order = b"w"
"""Bytes on the leash: return the work that has not begun; report the line that the current run has reached."""

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
    """Run these one after the other, numbered from `first` on. A run that has not begun by `until` must not begin."""

    first: int
    until: float
    works: list[Delivery]


class Batches(Down, frozen=True):
    first: int
    until: float
    works: list[tuple[Delivery, ...]]


class Retire(Down, frozen=True):
    """The engine will send nothing more: end."""


class Up(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a worker to the engine."""


class Ready(Up, frozen=True):
    """The handler is imported."""


class Unfit(Up, frozen=True):
    """The handler cannot be imported."""

    why: str


class Idle(Up, frozen=True):
    """The worker has run all its work: read the page."""


class Returned(Up, frozen=True):
    """These runs have not begun: the engine recalled them, or it was too late to begin them."""

    numbers: list[int]


class At(Up, frozen=True):
    """The line that the current run has reached."""

    number: int
    where: str


class Failed(Up, frozen=True):
    number: int
    error: ErrorReport


FromEngine = Setup | Events | Batches | Retire
FromWorker = Ready | Unfit | Idle | Returned | At | Failed

_encode = msgspec.msgpack.Encoder().encode
from_engine = msgspec.msgpack.Decoder(FromEngine).decode
from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def whole(work: Delivery | tuple[Delivery, ...]) -> Delivery | tuple[Delivery, ...]:
    """The work with all fields set, as an encoder needs it: a broker may decode fields of an event late."""
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
    """Cuts a stream, in pieces of any size, into frames."""

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
    """One page of memory that the engine and one worker share. Only the worker writes it. It names runs by number.

    Each field is eight aligned bytes, so a reader never sees half a value.
    """

    # When a worker dies, the page shows which run had begun. A frame for each begin would show it too, but would cost a
    # system call per event.

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, _PAGE_BYTES)
        self._counts = memoryview(self._map).cast("Q")
        self._times = memoryview(self._map).cast("d")

    @property
    def finished(self) -> int:
        """The number of the last run that has ended, plus one."""
        return self._counts[0]

    @property
    def started(self) -> int:
        """The number of the last run that has begun, plus one. If it is above `finished`, that run has not ended."""
        return self._counts[1]

    @property
    def since(self) -> float:
        """When the last run began or ended, on onward.clock."""
        return self._times[2]

    @property
    def busy_s(self) -> float:
        """The total duration of all runs."""
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
    """Create the memory of a page. Returns its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("onward-page")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _PAGE_BYTES)
    return descriptor
