"""Requests of one channel and their replies."""

import asyncio
import copy
from collections import deque
from typing import Any

from onward.brokers.rabbitmq.amqp.assembly import ServerMethod
from onward.brokers.rabbitmq.amqp.faults import AmqpError, Malformed
from onward.brokers.rabbitmq.amqp.frames import Method, method_frame
from onward.brokers.rabbitmq.amqp.wire import Wire

Reply = asyncio.Future[tuple[Any, ...]]


class Calls:
    """One request at a time; the server answers in order. A request that is cancelled still takes its reply."""

    def __init__(self, wire: Wire, channel: int) -> None:
        self._wire = wire
        self._channel = channel
        self._turn = asyncio.Lock()
        self._waiting: deque[tuple[Method, Reply]] = deque()
        self.why_ended: AmqpError | None = None

    async def call(self, method: Method, *arguments: Any, reply: Method) -> tuple[Any, ...]:
        """The arguments of the reply. Raises why the channel has ended, if it ends first."""
        async with self._turn:
            self.check()
            self._wire.write(method_frame(self._channel, method, *arguments))
            return await self.expect(reply)

    async def expect(self, reply: Method) -> tuple[Any, ...]:
        self.check()
        future: Reply = asyncio.get_running_loop().create_future()
        self._waiting.append((reply, future))
        return await future

    def write(self, method: Method, *arguments: Any) -> None:
        """For a method without a reply."""
        self._wire.write(method_frame(self._channel, method, *arguments))

    def take(self, arrived: ServerMethod) -> None:
        """Raises Malformed if this is not the reply that is due."""
        if not self._waiting or self._waiting[0][0] is not arrived.method:
            raise Malformed(f"{arrived.method.name} on channel {self._channel}, which was not requested")
        _, future = self._waiting.popleft()
        if not future.done():
            future.set_result(arrived.arguments)

    def check(self) -> None:
        """Raise why the channel has ended, if it has."""
        if self.why_ended is not None:
            raise copy.copy(self.why_ended)  # a copy, because each raise adds to the traceback

    def end(self, why: AmqpError) -> None:
        self.why_ended = why
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(copy.copy(why))
        self._waiting.clear()
