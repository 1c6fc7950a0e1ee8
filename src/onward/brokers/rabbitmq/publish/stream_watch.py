"""Whether the streams that we publish to exist and are bound.

An event goes to an exchange, and the server reports it as undeliverable only if no queue at all is bound there. With a
work queue beside it, a stream that was deleted, or whose binding was removed, would not be noticed.
"""

import asyncio
import logging

from onward import clock
from onward.brokers.rabbitmq.amqp import AmqpError, ChannelClosed, Connection
from onward.brokers.rabbitmq.registry import topic_objects
from onward.brokers.rabbitmq.registry.registry import TopicRegistry
from onward.brokers.rabbitmq.registry.registry_fold import TopicEntry
from onward.errors import BrokerError

log = logging.getLogger("onward")

INTERVAL_S = 4.0
_IDLE_S = 30.0  # after this time without an event, a topic is no longer looked at


class StreamWatch:
    """Of one connection. It looks at the streams of a topic at first use, and every few seconds while it is used.

    `binds`: it also binds them again each time."""

    def __init__(self, connection: Connection, registry: TopicRegistry, *, binds: bool) -> None:
        self._connection = connection
        self._registry = registry
        self._binds = binds
        self._missing: dict[str, frozenset[int]] = {}  # by log id
        self._used: dict[str, tuple[TopicEntry, float]] = {}  # by log id: when it was last used
        self._task = asyncio.create_task(self._look_for_ever())

    async def missing(self, topic: TopicEntry) -> frozenset[int]:
        """The partitions without a stream. Raises AmqpError or BrokerError if that cannot be found out."""
        self._used[topic.log_id] = topic, clock.now()
        known = self._missing.get(topic.log_id)
        return known if known is not None else await self._look(topic)

    def forget(self) -> None:
        """Look again before the next use: something went wrong."""
        self._missing.clear()

    def close(self) -> None:
        self._task.cancel()

    async def _look(self, topic: TopicEntry) -> frozenset[int]:
        found = await self._found_missing(topic)
        current = self._registry.topic(topic.name)
        if found and current is not None and current.log_id == topic.log_id and current.state == "created":
            await self._registry.create_topic(topic.name, topic.partitions)
            found = await self._found_missing(topic)
        if self._binds and not found:
            await self._bind(topic)
        self._missing[topic.log_id] = found
        return found

    async def _bind(self, topic: TopicEntry) -> None:
        try:
            await topic_objects.bind_again(self._connection, topic)
        except ChannelClosed as error:  # a publisher needs no right to bind
            log.debug("RabbitMQ: the streams of topic %s were not bound again: %s", topic.name, error)

    async def _found_missing(self, topic: TopicEntry) -> frozenset[int]:
        """All of them, if the exchange is missing."""
        if not await topic_objects.has_exchange(self._connection, topic):
            return frozenset(range(topic.partitions))
        return frozenset(await topic_objects.missing(self._connection, topic))

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            for log_id, (topic, used) in tuple(self._used.items()):
                if clock.now() - used > _IDLE_S:
                    del self._used[log_id]
                    self._missing.pop(log_id, None)
                    continue
                try:
                    await self._look(topic)
                except (AmqpError, BrokerError) as error:
                    log.debug("RabbitMQ: cannot look at the streams of topic %s: %s", topic.name, error)
