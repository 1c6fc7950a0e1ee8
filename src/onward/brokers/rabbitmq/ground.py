"""What all parts of the broker share: the thread for I/O, the settings, and connections."""

import asyncio
import weakref
from collections.abc import Callable

from onward.brokers.rabbitmq.address import RabbitAddress
from onward.brokers.rabbitmq.amqp import Connection
from onward.brokers.rabbitmq.connecting import connected, connected_at_last
from onward.brokers.rabbitmq.hosts import HostOrder
from onward.brokers.rabbitmq.io_thread import IoThread
from onward.brokers.rabbitmq.names import stream_arguments
from onward.brokers.rabbitmq.registry.registry import TopicArguments, TopicRegistry
from onward.errors import Closed
from onward.settings import Settings

PATIENCE_S = 5.0  # with a server that does not answer


class RabbitGround:
    """Every coroutine here runs in the loop of `io`."""

    def __init__(self, address: RabbitAddress, settings: Settings) -> None:
        self.address = address
        self.settings = settings
        self.io = IoThread("onward-rabbitmq")
        alternate = address.client.alternate_exchange
        self.registry = TopicRegistry(
            self.query,
            self._new,
            TopicArguments(
                stream_arguments(settings.retention_s), {"alternate-exchange": alternate} if alternate else {}
            ),
        )
        self._hosts = HostOrder(address.hosts)
        self._query: Connection | None = None
        self._querying = asyncio.Lock()
        self._opened: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._closed = False

    async def connect(self, name: str, *, report: Callable[[str], None]) -> Connection:
        """A new connection, tried for ever. `report` is called with the reason why there is none yet. The caller closes
        the connection."""
        connection = await connected_at_last(self.address, name=f"onward {name}", hosts=self._hosts, report=report)
        self._opened.add(connection)
        return connection

    async def query(self) -> Connection:
        """The connection for declares and for what operators ask. Raises BrokerError if there is none in 5 s."""
        async with self._querying:
            if self._closed:
                raise Closed(f"the broker on {self.address.name} is closed")
            if self._query is not None and self._query.blocked is not None:
                # During an alarm the server answers nothing on a connection that has sent messages.
                await self._query.close(timeout_s=0.1)
            if self._query is None or self._query.is_closed:
                self._query = await self._new()
            return self._query

    async def connect_within(self, name: str, patience_s: float) -> Connection:
        """A new connection. Raises BrokerError if there is none in time. The caller closes it."""
        connection = await connected(self.address, name=f"onward {name}", patience_s=patience_s, hosts=self._hosts)
        self._opened.add(connection)
        return connection

    async def _new(self) -> Connection:
        return await self.connect_within("query", min(PATIENCE_S, self.settings.publish_timeout_s))

    async def close(self) -> None:
        """Close every connection, also one whose owner was cancelled. The thread ends later, with `io.close`."""
        self._closed = True
        await self.registry.close()
        async with self._querying:
            for connection in tuple(self._opened):
                await connection.close()
