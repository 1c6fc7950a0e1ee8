"""The engine's end of the socket to a worker. It never blocks, however large the messages are."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from onward.engines.processes import wire

_READ_BYTES = 1 << 18


class Line:
    def __init__(self, end: socket.socket, readable: Callable[[], None]) -> None:
        self._end = end
        self._end.setblocking(False)
        self._splitter = wire.Splitter()
        self._unsent: deque[memoryview] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._end, readable)
        self.cut = False  # the other end is closed, or sent bytes that cannot be decoded

    @property
    def clogged(self) -> bool:
        """Whether the other end has not yet read everything that was sent."""
        return bool(self._unsent)

    def send(self, message: wire.Down) -> None:
        self._unsent.append(memoryview(wire.frame(message)))
        if len(self._unsent) == 1:
            self._write()

    def receive(self) -> Iterator[wire.FromWorker]:
        """All messages that have arrived."""
        try:
            while piece := self._end.recv(_READ_BYTES):
                for body in self._splitter.feed(piece):
                    yield wire.from_worker(body)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError):
            pass  # reset, or a handler wrote into the socket: treat it as closed
        self.cut = True

    def mute(self) -> None:
        """Stop calling `readable`. `receive` still returns what arrives."""
        self._loop.remove_reader(self._end)

    def close(self) -> None:
        if self._end.fileno() >= 0:
            self.mute()
            self._loop.remove_writer(self._end)
            self._unsent.clear()
            self._end.close()

    def _write(self) -> None:
        try:
            while self._unsent:
                sent = self._end.send(self._unsent[0])
                rest = self._unsent.popleft()[sent:]
                if rest:
                    self._unsent.appendleft(rest)
        except BlockingIOError:
            self._loop.add_writer(self._end, self._write)
            return
        except OSError:
            self._unsent.clear()  # the other end is closed, and reading will show it
        self._loop.remove_writer(self._end)
