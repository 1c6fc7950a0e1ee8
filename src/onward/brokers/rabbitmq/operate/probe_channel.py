"""Questions that the server may answer by closing the channel."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from onward.brokers.rabbitmq.amqp import Channel, ChannelClosed, Connection, QueueState
from onward.brokers.rabbitmq.server_errors import LOCKED, is_missing
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


def _exists(refusal: ChannelClosed | None) -> bool:
    if refusal is None or refusal.code == LOCKED:
        return True
    if is_missing(refusal):
        return False
    raise BrokerError(f"RabbitMQ cannot tell whether an object exists: {refusal.text}; try again when all nodes are up")
