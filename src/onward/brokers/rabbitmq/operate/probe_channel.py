"""Questions that the server may answer by closing the channel."""

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from onward.brokers.rabbitmq.amqp import Channel, ChannelClosed, Connection, QueueState
from onward.brokers.rabbitmq.server_errors import LOCKED, explained, is_missing
from onward.errors import BrokerError

T = TypeVar("T")


class ProbeChannel:
    """A channel of its own. If an answer closes it, the next question opens another."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel: Channel | None = None

    async def ask(self, question: Callable[[Channel], Awaitable[T]]) -> T:
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._connection.channel()
        return await question(self._channel)

    async def refusal(self, question: Callable[[Channel], Awaitable[object]]) -> ChannelClosed | None:
        """Why the server refused. None: it did not."""
        try:
            await self.ask(question)
        except ChannelClosed as error:
            if not error.code:  # closed by us
                raise
            return error
        return None

    async def has_exchange(self, name: str) -> bool:
        """Raises BrokerError if the server cannot tell."""
        return _exists(await self.refusal(lambda channel: channel.declare_exchange(name, "", passive=True)))

    async def has_queue(self, name: str) -> bool:
        """Raises BrokerError if the server cannot tell."""
        return _exists(await self.refusal(lambda channel: channel.declare_queue(name, passive=True)))

    async def queue(self, name: str) -> QueueState:
        """Raises ChannelClosed if there is no such queue, or its node is down."""
        return await self.ask(lambda channel: channel.declare_queue(name, passive=True))

    async def close(self) -> None:
        if self._channel is not None and not self._channel.is_closed:
            await self._channel.close()


async def conflict(
    connection: Connection, queues: Mapping[str, Mapping[str, Any]], exchanges: Mapping[str, str] | None = None
) -> str:
    """Why the first of these cannot be declared: it exists and differs. Empty: all of them can. Creates nothing.

    `queues`: the arguments by name. `exchanges`: the kinds by name."""
    probe = ProbeChannel(connection)
    try:
        for name, arguments in queues.items():
            declare = functools.partial(Channel.declare_queue, name=name, arguments=arguments)
            if await probe.has_queue(name) and (refusal := await probe.refusal(declare)) is not None:
                return explained(refusal, f"queue {name}")
        for name, kind in (exchanges or {}).items():
            again = functools.partial(Channel.declare_exchange, name=name, kind=kind)
            if await probe.has_exchange(name) and (refusal := await probe.refusal(again)) is not None:
                return explained(refusal, f"exchange {name}")
        return ""
    finally:
        await probe.close()


def _exists(refusal: ChannelClosed | None) -> bool:
    if refusal is None or refusal.code == LOCKED:
        return True
    if is_missing(refusal):
        return False
    raise BrokerError(f"RabbitMQ cannot tell whether an object exists: {refusal.text}; try again when all nodes are up")
