"""The connection between a child process and its supervisor. The child ends when the supervisor ends.

The child's stdin is one end of a socket pair. The child sends a Hello when it has started, then a Joined and Reports,
each as one line. The supervisor sends nothing, so when the socket closes, the supervisor has ended for whatever reason.
A line is msgpack in base64, because JSON has no NaN and no infinity.
"""

import base64
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from onward.brokers.base import Supervised

if TYPE_CHECKING:
    from onward.observe.workers import Report

MARKER = "ONWARD_CHILD"  # in the child's environment: its Place
_PR_SET_PDEATHSIG = 1

Message = TypeVar("Message")


class Place(msgspec.Struct, frozen=True):
    """What the supervisor passes to a child at its start."""

    number: int
    slot: str
    gone: tuple[str, ...] = ()  # see Supervised

    def supervised(self) -> Supervised:
        """What the broker needs to know about this process."""
        member = member_of(self.slot, os.getpid())
        return Supervised(self.slot, member, frozenset(self.gone) - {member})  # the system may reuse a process id


def member_of(slot: str, pid: int) -> str:
    return f"{slot}-{pid}"


class Hello(msgspec.Struct, frozen=True):
    """A child sends it when it has loaded its application and opened the broker."""

    drain_timeout_s: float
    url: str | None = None  # of its broker, whose lock it may hold


class Joined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):  # so a Report cannot be read as one
    """A child sends it once, when every handler has joined its group."""


class Leash:
    """The child's end."""

    def __init__(self, place: Place, link: socket.socket) -> None:
        self.number = place.number
        self.supervised = place.supervised()
        self._link = link
        self._unsent = b""

    def greet(self, hello: Hello) -> None:
        self._link.sendall(_line(hello))

    def join(self) -> None:
        """Send that every handler has joined its group. If a part of a report is unsent, the next report sends both."""
        self._unsent += _line(Joined())
        self._send()

    def report(self, make: Callable[[], "Report"]) -> bool:
        """Send a report, without waiting for a supervisor that does not read. False: a part of it is still unsent, and
        the next call sends that part."""
        self._unsent = self._unsent or _line(make())
        self._send()
        return not self._unsent

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                self._unsent = self._unsent[self._link.send(self._unsent, socket.MSG_DONTWAIT) :]


def _line(message: msgspec.Struct) -> bytes:
    return base64.b64encode(msgspec.msgpack.encode(message)) + b"\n"


def read(line: bytes | bytearray, kind: type[Message]) -> Message | None:
    """The message in a line that has no line end; None if it cannot be decoded."""
    try:
        return msgspec.msgpack.decode(base64.b64decode(line, validate=True), type=kind)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None


def take() -> Leash | None:
    """The leash of this process, or None if it has no supervisor. To be called once, at the start."""
    marker = os.environ.pop(MARKER, None)  # removed, so that processes started by this one do not use it
    if marker is None:
        return None
    if sys.platform == "linux":
        import ctypes  # only a supervised process needs it

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    link = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the application's stdin is empty, and its own children do not inherit the link
    os.close(nothing)
    threading.Thread(target=_end_with, args=(link,), name="onward-leash", daemon=True).start()
    return Leash(msgspec.json.decode(marker, type=Place), link)


def _end_with(link: socket.socket) -> None:
    try:
        while link.recv(1024):
            pass
    except OSError:
        pass  # connection reset: the supervisor has ended too
    os._exit(1)
