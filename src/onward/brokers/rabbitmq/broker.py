"""The RabbitMQ broker as the contract has it."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from onward.brokers.base import (
    Asks,
    Broker,
    Change,
    Durability,
    Features,
    Figure,
    Finding,
    GroupInfo,
    MemberInfo,
    Ordering,
    Relay,
    Start,
    Subscription,
    Supervised,
    TopicSpec,
    Topology,
)
from onward.brokers.core.publishing import check_events, check_relay, counted
from onward.brokers.core.subscription import check_start
from onward.brokers.rabbitmq.address import RabbitAddress
from onward.brokers.rabbitmq.aside.aside import RabbitAside
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.groups import RabbitGroups
from onward.brokers.rabbitmq.operate.management import ManagementApi, ManagementError
from onward.brokers.rabbitmq.operate.operations import RabbitOperations
from onward.brokers.rabbitmq.publish.courier import RabbitCourier
from onward.brokers.rabbitmq.publish.publisher import RabbitPublisher
from onward.brokers.rabbitmq.registry.topics import PublishRoute, RabbitTopics
from onward.errors import BrokerError, Closed, PublishError
from onward.event import Event
from onward.settings import Settings, check_name

log = logging.getLogger("onward")


async def open_broker(url: str, settings: Settings) -> Broker:
    """The server that the URL names. BrokerError: it does not answer, refuses the login, or cannot be used."""
    ground = RabbitGround(RabbitAddress.of(url, settings), settings)
    try:
        await ground.io.run(ground.registry.open())
        durability: Durability = "replicated" if await _nodes(ground.address) > 1 else "window"
        return RabbitBroker(ground, durability)
    except BaseException:
        await _closed(ground)
        raise


async def _nodes(address: RabbitAddress) -> int:
    """How many nodes have a copy of each stream: all of the cluster."""
    management = ManagementApi.of(address)
    if address.client.cluster_nodes is not None or management is None:
        return address.client.cluster_nodes or 1
    try:
        return len(await management.nodes())
    except ManagementError as error:
        log.warning("%s; so Onward does not know how many nodes have a copy of each event, and assumes one", error)
        return 1


async def _closed(ground: RabbitGround) -> None:
    await ground.io.run(ground.close())
    await ground.io.close()


class RabbitBroker:
    def __init__(self, ground: RabbitGround, durability: Durability) -> None:
        self.features = Features(
            stable_positions=True,
            fence=True,
            durability=durability,
            aside=True,
            starts=frozenset({"earliest", "latest", "time"}),
            shared=True,
        )
        self._ground = ground
        self._topics = RabbitTopics(ground)
        self._operations = RabbitOperations(ground)
        self._groups = RabbitGroups(ground, self._topics, self._operations)
        self._courier = RabbitCourier(ground, self._operations.counts)
        self._publisher = RabbitPublisher(self._courier, ground.settings)
        self._closing: asyncio.Future[None] | None = None

    async def publish(self, events: Sequence[Event], *, relay: Relay | None = None) -> None:
        self._check_open()
        check_relay(relay)
        check_events(events)
        if not events:
            return
        topics = {event.topic for event in events}
        known = {name: route for name in topics if (route := self._topics.known(name)) is not None}
        if len(known) < len(topics) or self._publisher.in_turn.locked():
            async with self._publisher.in_turn:
                sent = self._publisher.enter(events, await self._routes(events, topics))
        else:
            sent = self._publisher.enter(events, known)
        await sent

    async def _routes(self, events: Sequence[Event], topics: Iterable[str]) -> dict[str, PublishRoute]:
        try:
            return {name: self._topics.known(name) or await self._resolved(name) for name in topics}
        except Closed:
            raise
        except BrokerError as error:
            why = f"RabbitMQ: {counted(len(events))} not accepted: {error}"
            raise PublishError(why, refused=events) from error

    async def _resolved(self, name: str) -> PublishRoute:
        return await self._ground.io.run(self._topics.resolve(name))

    def append_in(self, connection: Any, events: Sequence[Event]) -> None:
        """The log is not in a database of the application."""

    async def subscribe(
        self,
        topics: Sequence[str],
        *,
        group: str,
        member: str,
        ordering: Ordering,
        start: Start,
        supervised: Supervised | None = None,
        asks: Asks | None = None,
    ) -> Subscription:
        self._check_open()
        check_name("group", group)
        check_start(start)
        return await self._groups.subscribe(
            list(dict.fromkeys(topics)),
            group=group,
            member=member,
            ordering=ordering,
            start=start,
            supervised=supervised,
            asks=asks,
        )

    def aside(self, group: str) -> RabbitAside:
        return self._groups.aside(group)

    async def declare(self, topology: Topology, *, apply: bool) -> Sequence[Change]:
        self._check_open()
        own = await self._ground.io.run(self._operations.declare(topology, apply=apply))
        topics = await self._ground.io.run(self._topics.declare(self._operations.declared, apply=apply))
        changes = [*own, *topics]
        if any(change.action == "refuse" for change in changes):
            return changes  # groups need their topics and queues
        return [*changes, *await self._groups.declare(topology.groups, apply=apply)]

    async def topics(self) -> Sequence[TopicSpec]:
        self._check_open()
        await self._ground.io.run(self._ground.registry.catch_up())
        registry = self._ground.registry
        own = [TopicSpec(topic.name, topic.partitions) for topic in registry.topics()]
        return sorted([*own, *(TopicSpec(name, 1) for name in registry.foreign_topics())], key=lambda spec: spec.name)

    async def groups(self, topic: str) -> Sequence[GroupInfo]:
        self._check_open()
        return await self._groups.groups(topic)

    async def owners(self, topic: str, group: str) -> Sequence[MemberInfo]:
        self._check_open()
        return await self._groups.owners(topic, group)

    async def drop_group(self, topic: str, group: str) -> None:
        self._check_open()
        await self._groups.drop_group(topic, group)

    async def drop_topic(self, topic: str) -> None:
        self._check_open()
        await self._groups.drop_topic(topic)

    def figures(self) -> Sequence[Figure]:
        return self._operations.figures()

    async def diagnose(self) -> Sequence[Finding]:
        self._check_open()
        return await self._ground.io.run(self._operations.diagnose())

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._groups.close()
            await self._publisher.close()
            await self._ground.io.run(self._operations.close())
            await self._ground.io.run(self._courier.close())
        finally:
            await _closed(self._ground)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise Closed(f"the broker on {self._ground.address.name} is closed")
