"""The topics and groups of a virtual host, and how a topic is created and dropped.

A topic is created in steps, each of which another process can complete: the entry `created`, the exchange and the
streams, the entry `made`, and some seconds later the entry `ready`. Events are published only after `made`. A stream
that is missing after `ready`, or long after `made`, is an error: creating it again would hide that its events are gone.
`made` is needed because commands end before `ready`. To drop a topic, the entry `dropping` comes first, and `dropped`
when all is deleted.
"""

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from onward.brokers.rabbitmq.amqp import AmqpError, Connection, ConnectionLost
from onward.brokers.rabbitmq.connecting import pauses
from onward.brokers.rabbitmq.names import Place
from onward.brokers.rabbitmq.registry import topic_objects
from onward.brokers.rabbitmq.registry.registry_fold import (
    SETTLED_S,
    GenerationSet,
    GroupAdded,
    GroupEntry,
    GroupKind,
    GroupRemoved,
    GroupRouted,
    TopicChanged,
    TopicCreated,
    TopicEntry,
    TopicMade,
)
from onward.brokers.rabbitmq.registry.registry_log import RegistryLog
from onward.errors import BrokerError, PartitionsDiffer

log = logging.getLogger("onward")

NewConnection = Callable[[], Awaitable[Connection]]
_TRIES = 6


class TopicArguments:
    """Of the topics that this process creates."""

    def __init__(self, stream: Mapping[str, Any], exchange: Mapping[str, Any]) -> None:
        self.stream = dict(stream)
        self.exchange = dict(exchange)


class TopicRegistry:
    """All coroutines run in the loop of the I/O thread. The other methods may be called in any thread."""

    def __init__(self, query: NewConnection, connect: NewConnection, arguments: TopicArguments) -> None:
        """`query`: the shared connection. `connect`: a new one, which the caller closes."""
        self._query = query
        self._connect = connect
        self._arguments = arguments
        self._log = RegistryLog(query)
        self._creating = asyncio.Lock()
        self._later: set[asyncio.Task[None]] = set()

    @property
    def new_stream_arguments(self) -> Mapping[str, Any]:
        """Of the streams of topics that this process creates."""
        return self._arguments.stream

    async def open(self) -> None:
        """Raises BrokerError."""
        await self._log.open()

    async def close(self) -> None:
        for task in tuple(self._later):
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)
        await self._log.close()

    async def catch_up(self) -> None:
        """Everything that was appended before this call is known when it returns. Raises BrokerError."""
        await self._log.catch_up()

    def watch(self, report: Callable[[], None]) -> Callable[[], None]:
        """Call `report`, in the loop of the I/O thread, when entries have arrived. Returns how to end that."""
        self._log.on_change.append(report)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._log.on_change.remove(report)

        return end

    def topic(self, name: str) -> TopicEntry | None:
        """None if it does not exist, or is being deleted."""
        known = self._log.fold.topics.get(name)
        return None if known is None or known.state == "dropping" else known

    def topics(self) -> list[TopicEntry]:
        """Sorted by name."""
        found = sorted(self._log.fold.topics.copy().values(), key=lambda topic: topic.name)
        return [topic for topic in found if topic.state != "dropping"]

    def foreign_topics(self) -> list[str]:
        """The exchanges of other programs that have a group, sorted."""
        return sorted(self._log.fold.names_with_groups() - self._log.fold.topics.keys())

    def groups(self, topic: str) -> dict[str, GroupEntry]:
        """By name."""
        return self._log.fold.groups(topic)

    def has_work_groups(self, topic: str) -> bool:
        """Whether there are queues that get copies of the topic's events; also if that is not known now."""
        return not self._log.is_current or any(each.kind == "work" for each in self.groups(topic).values())

    def group_topics(self, group: str) -> list[str]:
        """The topics in which the group exists, sorted. Exchanges of other programs are among them."""
        return self._log.fold.topics_of(group)

    def fence_floor(self, topic: str, group: str) -> int:
        """The highest fence of a former group of this name; 0 if there was none."""
        return self._log.fold.fence_floor(topic, group)

    def generation(self, topic: str, group: str, place: Place) -> int:
        return self._log.fold.generation(topic, group, place)

    async def create_topic(self, name: str, partitions: int) -> TopicEntry:
        """Create the topic, or complete what another process has begun. If the topic exists, it may have another number
        of partitions. Raises BrokerError."""
        async with self._creating:
            await self.catch_up()
            known = self._log.fold.topics.get(name)
            if known is not None and known.state == "dropping":
                await self._delete(known)
                known = None
            log_id = uuid.uuid4().hex
            if known is None:
                await self._check_unlisted(name, partitions)
                made = self._arguments
                await self._log.append(TopicCreated(name, partitions, log_id, made.stream, made.exchange, time.time()))
            return await self._completed(name, log_id)

    async def _check_unlisted(self, name: str, partitions: int) -> None:
        """Another process may create the topic meanwhile: its entry comes before its streams."""
        try:
            await topic_objects.check_unlisted(await self._query(), name, partitions)
        except PartitionsDiffer:
            await self.catch_up()
            if name not in self._log.fold.topics:
                raise
        except AmqpError as error:
            raise BrokerError(f"topic {name} could not be created: {error}") from error

    async def _completed(self, name: str, own_log_id: str) -> TopicEntry:
        """`own_log_id`: that of the entry which we have appended, if it counts."""
        topic = self.topic(name)
        if topic is None:
            raise BrokerError(f"topic {name} was dropped while it was created; try again")
        if topic.state == "created":
            try:
                await self._make(topic, is_new=topic.log_id == own_log_id)
            except AmqpError as error:
                raise BrokerError(f"topic {name} could not be created: {error}") from error
        return self.topic(name) or topic

    async def _make(self, topic: TopicEntry, *, is_new: bool) -> None:
        """Create what may be missing, and mark the topic as made or ready. A deleted stream stays missing: publishers
        and readers find that out."""
        now = time.time()
        if topic.is_settled(now) and not await topic_objects.missing(await self._query(), topic):
            await self._ready(topic)  # at once, because a command ends before a task of its own would run
        elif topic.may_lack_streams(now):
            await self._create(topic, is_new=is_new)
            if topic.made_at is None:
                await self._log.append(TopicMade(topic.name, topic.log_id, time.time()))
            self._start(self._ready_later(topic))

    async def _create(self, topic: TopicEntry, *, is_new: bool) -> None:
        """On a connection of its own, because the server may end it."""
        for pause_s in itertools.islice(pauses(), _TRIES):
            connection = await self._connect()
            try:
                await topic_objects.create(connection, topic, is_new=is_new)
            except ConnectionLost as error:
                log.debug("RabbitMQ: creating topic %s is tried again: %s", topic.name, error)
            else:
                return
            finally:
                await connection.close()
            await asyncio.sleep(pause_s)
            is_new = False
        raise BrokerError(f"topic {topic.name} could not be created: RabbitMQ ended {_TRIES} connections; see its log")

    async def _ready_later(self, topic: TopicEntry) -> None:
        """If this process ends before, the next one that uses the topic marks it."""
        await asyncio.sleep(SETTLED_S)
        await self._ready(topic)

    async def _ready(self, topic: TopicEntry) -> None:
        """Mark it, if all its streams exist."""
        try:
            known = self.topic(topic.name)
            is_open = known is not None and known.log_id == topic.log_id and known.state == "created"
            if is_open and not await topic_objects.missing(await self._query(), topic):
                await self._log.append(TopicChanged(topic.name, topic.log_id, "ready"))
        except (AmqpError, BrokerError) as error:
            log.debug("RabbitMQ: topic %s is not marked as ready yet: %s", topic.name, error)

    async def drop_topic(self, name: str) -> None:
        """Delete the topic with its events. Its groups must have been dropped. Does nothing if it does not exist."""
        async with self._creating:
            await self.catch_up()
            known = self._log.fold.topics.get(name)
            if known is not None:
                await self._log.append(TopicChanged(name, known.log_id, "dropping"))
                await self._delete(known)

    async def _delete(self, topic: TopicEntry) -> None:
        await topic_objects.delete(await self._query(), topic)
        await self._log.append(TopicChanged(topic.name, topic.log_id, "dropped"))

    async def add_group(self, topic: str, group: str, kind: GroupKind) -> GroupEntry:
        """The group, added if it does not exist. Raises BrokerError if it exists with another kind."""
        await self.catch_up()  # another process may have dropped it
        known = self.groups(topic).get(group)
        if known is None:
            await self._log.append(GroupAdded(topic, group, kind))
            known = self.groups(topic).get(group)
        if known is None:
            raise BrokerError(f"group {group} of topic {topic} was dropped while a member joined it; try again")
        if known.kind != kind:
            raise BrokerError(other_kind(known))
        return known

    async def drop_group(self, topic: str, group: str, fence: int) -> None:
        """`fence`: the highest that the group has used. A later group of this name starts above it."""
        await self._log.append(GroupRemoved(topic, group, fence))

    async def set_routes(self, topic: str, group: str, routes: Sequence[str]) -> None:
        """Remember which bindings the group's work queue may have: AMQP cannot list them."""
        await self._log.append(GroupRouted(topic, group, tuple(routes)))

    async def set_generation(self, topic: str, group: str, place: Place, generation: int) -> None:
        """Which stream holds the aside of this place. It never goes back to a lower one."""
        if generation > self.generation(topic, group, place):
            await self._log.append(GenerationSet(topic, group, place, generation))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)


def other_kind(known: GroupEntry) -> str:
    has = "with order" if known.kind == "ordered" else "without order"
    return (
        f"group {known.group} of topic {known.topic} reads {has}, and this member does not: use the same ordering, "
        "another group name, or delete the group first with `onward groups drop`"
    )
