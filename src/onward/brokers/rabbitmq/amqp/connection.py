"""A connection to a server: handshake, channels, alarms and its end."""

import asyncio
import math
import re
import ssl as tls
from collections.abc import Callable
from typing import Any, NamedTuple

import onward
from onward.brokers.rabbitmq.amqp import frames
from onward.brokers.rabbitmq.amqp.assembly import Arrival, ServerMethod
from onward.brokers.rabbitmq.amqp.calls import Calls
from onward.brokers.rabbitmq.amqp.channel import Channel
from onward.brokers.rabbitmq.amqp.faults import (
    AmqpError,
    ChannelClosed,
    ClosedByUs,
    ConnectFailed,
    ConnectionLost,
    LoginRefused,
    Malformed,
)
from onward.brokers.rabbitmq.amqp.wire import Wire

CLOSE_S = 3.0
_LEAST_FRAME_MAX = 4096  # by the specification
_MOST_CHANNELS = 65535
_REFUSALS = (403, 530)
_CAPABILITIES = (
    "authentication_failure_close",
    "basic.nack",
    "connection.blocked",
    "consumer_cancel_notify",
    "exchange_exchange_bindings",
    "publisher_confirms",
)


class Agreed(NamedTuple):
    """What the handshake has found."""

    server: dict[str, Any]
    channel_max: int
    frame_max: int


class Connection:
    """All of it belongs to the loop that opened it. `closing` is done with the reason when it has ended.

    `blocked` is why the server takes no messages now (memory or disk alarm); `on_blocked` is called when it changes.
    `is_elsewhere` says whether another host may have a queue that this node lacks.
    """

    def __init__(self, frame_max: int) -> None:
        self.closing: asyncio.Future[AmqpError] = asyncio.get_running_loop().create_future()
        self.blocked: str | None = None
        self.on_blocked: Callable[[str | None], None] | None = None
        self.is_elsewhere: Callable[[str], bool] = lambda _: False
        self._agreed = Agreed({}, _MOST_CHANNELS, frame_max)
        self._wire = Wire(frame_max, self._arrived, self._ended)
        self._calls = Calls(self._wire, 0)
        self._channels: dict[int, Channel] = {}
        self._leaving: dict[int, asyncio.Future[None]] = {}  # channels whose close is not yet answered
        self._last_number = 0

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        vhost: str = "/",
        user: str = "guest",
        password: str = "guest",
        ssl: tls.SSLContext | None = None,
        heartbeat_s: float = 5.0,
        timeout_s: float = 10.0,
        name: str = "onward",
        frame_max: int = 131072,
    ) -> "Connection":
        """Raises LoginRefused or ConnectFailed, at the latest after `timeout_s`. `heartbeat_s` counts whole seconds."""
        connection, is_open = cls(frame_max), False
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(lambda: connection._wire, host, port, ssl=ssl)
                await connection._greet(name, user, password)
                await connection._tune(math.ceil(heartbeat_s), vhost)
        except (OSError, AmqpError) as error:
            raise _explained(error, f"{host}:{port}", timeout_s) from error
        else:
            is_open = True
            return connection
        finally:
            if not is_open:
                connection._wire.end(ConnectionLost("the handshake failed"))

    @property
    def server(self) -> dict[str, Any]:
        """What the server says of itself."""
        return self._agreed.server

    @property
    def product(self) -> str:
        return str(self.server.get("product", ""))

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", str(self.server.get("version", "")))[:3])

    @property
    def channel_max(self) -> int:
        return self._agreed.channel_max

    @property
    def frame_max(self) -> int:
        return self._agreed.frame_max

    @property
    def is_closed(self) -> bool:
        return self._wire.has_ended

    async def channel(self) -> Channel:
        """Raises ConnectionLost, or AmqpError if the connection has as many channels as the server allows."""
        self._calls.check()
        channel = Channel(self, self._wire, self._free_number())
        self._channels[channel.number] = channel
        try:
            await channel.open()
        except asyncio.CancelledError:
            self.leave(channel.number)
            raise
        return channel

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Idempotent. After `timeout_s` without an answer the socket is closed all the same."""
        if not self.is_closed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._calls.call(frames.CLOSE, 200, "closed by the client", 0, 0, reply=frames.CLOSE_OK)
            except (TimeoutError, ConnectionLost):
                pass
            finally:
                self._wire.end(ClosedByUs())
        await asyncio.wait([self._wire.gone])

    def abandon(self, why: str) -> None:
        """End it at once, as if it was lost."""
        self._wire.end(ConnectionLost(why))

    def leave(self, number: int) -> asyncio.Future[None]:
        """For a channel that we close. The future is done when the server has answered, or the connection ended."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._channels.pop(number, None) is None:  # it has ended already, alone or with the connection
            answered.set_result(None)
        else:
            self._leaving[number] = answered
            self._wire.write(frames.method_frame(number, frames.CHANNEL_CLOSE, 200, "", 0, 0))
        return answered

    async def _greet(self, name: str, user: str, password: str) -> None:
        _, _, server, mechanisms, _ = await self._calls.expect(frames.START)
        if b"PLAIN" not in mechanisms.split():
            raise ConnectFailed(f"the server offers no login by password, only {mechanisms.decode(errors='replace')}")
        self._agreed = self._agreed._replace(server=_readable(server))
        ourselves = {
            "product": "onward",
            "version": onward.__version__,
            "platform": "Python",
            "connection_name": name,
            "capabilities": dict.fromkeys(_CAPABILITIES, True),
        }
        self._calls.write(frames.START_OK, ourselves, "PLAIN", f"\0{user}\0{password}".encode(), "en_US")

    async def _tune(self, heartbeat_s: int, vhost: str) -> None:
        channel_max, frame_max, _ = await self._calls.expect(frames.TUNE)
        channel_max = channel_max or _MOST_CHANNELS  # 0: no limit
        frame_max = min(frame_max or self.frame_max, self.frame_max)
        if frame_max < _LEAST_FRAME_MAX:
            raise ConnectFailed(f"frames of {frame_max} bytes; AMQP 0.9.1 asks for {_LEAST_FRAME_MAX} at least")
        self._agreed = Agreed(self.server, channel_max, frame_max)
        self._calls.write(frames.TUNE_OK, channel_max, frame_max, heartbeat_s)
        await self._calls.call(frames.OPEN, vhost, "", False, reply=frames.OPEN_OK)
        if heartbeat_s:
            self._wire.beat(heartbeat_s)

    def _free_number(self) -> int:
        """Not the one that was freed last, so a late frame of a closed channel reaches no other."""
        for step in range(self.channel_max):
            number = (self._last_number + step) % self.channel_max + 1
            if number not in self._channels and number not in self._leaving:
                self._last_number = number
                return number
        raise AmqpError(f"all {self.channel_max} channels of the connection are in use; open another connection")

    def _arrived(self, arrivals: list[tuple[int, Arrival]]) -> None:
        for number, arrival in arrivals:
            if self._wire.has_ended:
                return
            if number == 0:
                self._method(arrival)
            elif isinstance(arrival, ServerMethod) and arrival.method is frames.CHANNEL_CLOSE:
                self._channel_closed(number, arrival)
            elif channel := self._channels.get(number):
                channel.arrived(arrival)
            elif number not in self._leaving:
                raise Malformed(f"a frame for channel {number}, which is not open")
            elif isinstance(arrival, ServerMethod) and arrival.method is frames.CHANNEL_CLOSE_OK:
                _release(self._leaving.pop(number))

    def _method(self, arrived: Arrival) -> None:
        if not isinstance(arrived, ServerMethod):
            raise Malformed("a message on channel 0")
        match arrived.method:
            case frames.CLOSE:
                code, text, *_ = arrived.arguments
                self._calls.write(frames.CLOSE_OK)
                self._wire.end(ConnectionLost(f"closed by the server: {code} {text}", code=code, text=text))
            case frames.CLOSE_OK:
                self._calls.take(arrived)
                self._wire.end(ClosedByUs())
            case frames.BLOCKED:
                self._alarmed(arrived.arguments[0])
            case frames.UNBLOCKED:
                self._alarmed(None)
            case _:
                self._calls.take(arrived)

    def _alarmed(self, why: str | None) -> None:
        self.blocked = why
        if self.on_blocked is not None:
            self.on_blocked(why)

    def _channel_closed(self, number: int, arrived: ServerMethod) -> None:
        """The server has closed a channel, perhaps while we do the same."""
        channel = self._channels.pop(number, None)
        if channel is None and number not in self._leaving:
            raise Malformed(f"channel.close for channel {number}, which is not open")
        self._wire.write(frames.method_frame(number, frames.CHANNEL_CLOSE_OK))
        if channel is not None:
            code, text, family, method = arrived.arguments
            cause = frames.METHODS.get(family << 16 | method)
            why = f"channel {number} was closed by the server: {code} {text}"
            channel.ended(ChannelClosed(why, code=code, text=text, method=cause.name if cause else ""))

    def _ended(self, why: AmqpError) -> None:
        self._calls.end(why)
        for answered in self._leaving.values():
            _release(answered)
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            channel.ended(why)
        if not self.closing.done():  # a waiter may have cancelled it
            self.closing.set_result(why)


def _release(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _readable(server: dict[str, Any]) -> dict[str, Any]:
    return {key: value.decode(errors="replace") if isinstance(value, bytes) else value for key, value in server.items()}


def _explained(error: Exception, where: str, timeout_s: float) -> ConnectFailed:
    """What to raise when the connection cannot be opened."""
    match error:
        case TimeoutError():
            return ConnectFailed(f"{where} did not answer within {round(timeout_s, 1):g} s")
        case ConnectionLost(code=code) if code in _REFUSALS:
            return LoginRefused(f"{where} refused the login: {error.text}")
        case OSError():
            return ConnectFailed(f"{where} cannot be reached: {error}")
        case _:
            return ConnectFailed(f"{where}: {error}")
