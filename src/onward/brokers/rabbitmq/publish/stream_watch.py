"""Whether what we publish to exists: the streams of a topic, and its exchange if there are work groups.

The server returns an event for a stream that does not exist. But work queues may have its copy then, so it is better to
know before it is sent.
"""

import asyncio
import logging

from onward import clock
from onward.brokers.rabbitmq.amqp import AmqpError, Connection
from onward.brokers.rabbitmq.registry import topic_objects
from onward.brokers.rabbitmq.registry.registry import TopicRegistry
from onward.brokers.rabbitmq.registry.registry_fold import TopicEntry
from onward.brokers.rabbitmq.work import work_objects
from onward.errors import BrokerError

log = logging.getLogger("onward")

INTERVAL_S = 4.0
_IDLE_S = 30.0  # after this time without an event, a topic is no longer looked at


class StreamWatch:
    """Of one connection. It looks at a topic at first use, and every few seconds while it is used.

    `creates`: it makes a missing exchange again, with the bindings of all work groups."""

    def __init__(self, connection: Connection, registry: TopicRegistry, *, creates: bool) -> None:
        self._connection = connection
        self._registry = registry
        self._creates = creates
        self._missing: dict[str, frozenset[int]] = {}  # by log id
        self._used: dict[str, tuple[TopicEntry, float]] = {}  # by log id: when it was last used
        self._task = asyncio.create_task(self._look_for_ever())

    async def missing(self, topic: TopicEntry) -> frozenset[int]:
        """The partitions without a stream, or all if the exchange that the topic needs is missing. Raises AmqpError or
        BrokerError if that cannot be found out."""
        self._used[topic.log_id] = topic, clock.now()
        known = self._missing.get(topic.log_id)
        return known if known is not None else await self._look(topic)

    def forget(self) -> None:
        """Look again before the next use: something went wrong."""
        self._missing.clear()

    def close(self) -> None:
        self._task.cancel()

    async def _look(self, topic: TopicEntry) -> frozenset[int]:
        found = frozenset(await topic_objects.missing(self._connection, topic))
        current = self._registry.topic(topic.name)
        if current is not None and current.log_id == topic.log_id:
            if found and current.state == "created":
                await self._registry.create_topic(topic.name, topic.partitions)
                found = frozenset(await topic_objects.missing(self._connection, topic))
            if self._registry.has_work_groups(topic.name) and not await self._has_exchange(topic):
                found = frozenset(range(topic.partitions))
        self._missing[topic.log_id] = found
        return found

    async def _has_exchange(self, topic: TopicEntry) -> bool:
        """Make it again where that is allowed."""
        if await topic_objects.has_exchange(self._connection, topic):
            return True
        if not self._creates:
            return False
        groups = [each for each in self._registry.groups(topic.name).values() if each.kind == "work"]
        await work_objects.route_again(self._connection, topic, groups)
        log.warning(
            "RabbitMQ: the exchange of topic %s was missing, and was created again with its bindings", topic.name
        )
        return True

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
