"""The socket of one connection: reads into an Assembly, writes at the end of each loop turn, sends heartbeats."""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from onward.brokers.rabbitmq.amqp.assembly import Arrival, Assembly
from onward.brokers.rabbitmq.amqp.faults import AmqpError, ConnectionLost, Malformed
from onward.brokers.rabbitmq.amqp.frames import HEARTBEAT_FRAME, PROTOCOL

log = logging.getLogger("onward")

_TICKS_PER_HEARTBEAT = 2
_SILENT_HEARTBEATS = 2  # after so many the server is gone


class Wire(asyncio.Protocol):
    """`on_arrivals` gets what each read completes; if it raises, the connection ends. `on_end` is called once."""

    def __init__(
        self,
        frame_max: int,
        on_arrivals: Callable[[list[tuple[int, Arrival]]], None],
        on_end: Callable[[AmqpError], None],
    ) -> None:
        self._assembly = Assembly(frame_max)
        self._on_arrivals = on_arrivals
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._heartbeat: asyncio.TimerHandle | None = None
        self._silent_ticks = 0
        self._is_quiet = True  # nothing was written since the last tick
        self.has_ended = False
        self.gone = asyncio.get_running_loop().create_future()  # done when the socket is closed

    def write(self, data: bytes) -> None:
        """Written at the end of this loop turn, together with all else of the turn. Nothing after the end."""
        if self.has_ended or not data:
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outgoing.append(data)

    def flush(self) -> None:
        if self._outgoing and self._transport is not None and not self.has_ended:
            self._transport.write(b"".join(self._outgoing))
            self._outgoing.clear()
            self._is_quiet = False

    def beat(self, heartbeat_s: float) -> None:
        """Send heartbeats from now on, and end the connection when the server is silent for two of them.

        The ticks are counted, not the time. So after this process was suspended, the server still has its two
        heartbeats to be heard.
        """
        if self.has_ended:
            return
        if self._silent_ticks >= _TICKS_PER_HEARTBEAT * _SILENT_HEARTBEATS:
            silence_s = _SILENT_HEARTBEATS * heartbeat_s
            self.end(ConnectionLost(f"the server was silent for {silence_s:.0f} s: no heartbeat"))
            return
        if self._is_quiet:
            self.write(HEARTBEAT_FRAME)
        self._is_quiet = True
        self._silent_ticks += 1
        pause_s = heartbeat_s / _TICKS_PER_HEARTBEAT
        self._heartbeat = asyncio.get_running_loop().call_later(pause_s, self.beat, heartbeat_s)

    def end(self, why: AmqpError) -> None:
        """Write what is due, close the socket and call `on_end`, the first time."""
        if self.has_ended:
            return
        self.flush()
        self._outgoing.clear()
        self.has_ended = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._transport is None:
            self.gone.set_result(None)
        else:
            self._transport.abort()
        self._on_end(why)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self.has_ended:
            self._transport.abort()
        self.write(PROTOCOL)

    def data_received(self, data: bytes) -> None:
        if self.has_ended:
            return
        self._silent_ticks = 0
        try:
            self._on_arrivals(self._assembly.feed(data))
        except Malformed as error:
            self.end(ConnectionLost(f"the server does not keep to AMQP 0.9.1: {error}"))
        except Exception as error:
            log.exception("RabbitMQ: the connection is closed because a callback failed")
            self.end(ConnectionLost(f"closed by us because a callback failed: {error!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.gone.done():
            self.gone.set_result(None)
        self.end(ConnectionLost(f"the connection broke: {exc}" if exc else "the server closed the connection"))
