"""What operators ask of the broker: its topology, its health and its metrics."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from onward.brokers.base import Change, Figure, Finding, GroupSpec, Topology
from onward.brokers.rabbitmq.amqp import AmqpError, Connection
from onward.brokers.rabbitmq.connecting import reconnecting
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.operate import checkup, topology_server
from onward.brokers.rabbitmq.operate.depth import DepthProbe
from onward.brokers.rabbitmq.operate.expected_queues import expected_queues
from onward.brokers.rabbitmq.operate.figures import RabbitFigures
from onward.brokers.rabbitmq.operate.group_objects import GroupObjects
from onward.brokers.rabbitmq.operate.management import ManagementApi
from onward.brokers.rabbitmq.operate.server_facts import gathered
from onward.brokers.rabbitmq.operate.topology import Declared
from onward.brokers.rabbitmq.server_errors import explained
from onward.errors import BrokerError

T = TypeVar("T")
log = logging.getLogger("onward")


class RabbitOperations:
    """The coroutines run in the loop of the ground. `declared`: what the application has declared so far."""

    def __init__(self, ground: RabbitGround) -> None:
        self.declared = Declared()
        self.counts = RabbitFigures()
        self._ground = ground
        self._management = ManagementApi.of(ground.address)
        self._depths = DepthProbe(ground.query, self.counts, self._management)
        self._watching: asyncio.Task[None] | None = None

    async def declare(self, topology: Topology, *, apply: bool) -> list[Change]:
        """The differences of exchanges, queues and bindings. `declared.topics` are left to the caller.

        Without `auto_declare` the server is only asked whether they exist, unless its management API can compare them.
        Raises BadSetting or BrokerError."""
        declared = Declared.of(topology)
        compare = self._ground.settings.auto_declare
        try:
            connection = await self._ground.query()
            changes = await topology_server.declare(
                connection, declared, apply=apply, compare=compare, management=self._management
            )
        except AmqpError as error:
            raise BrokerError(f"RabbitMQ at {self._ground.address.name}: declaring the topology: {error}") from error
        self.declared = self.declared.joined(declared)
        return changes

    async def restore(self, connection: Connection) -> None:
        """Create what the server lacks of the application's exchanges, queues and bindings. Raises AmqpError."""
        changes = await topology_server.declare(connection, self.declared, apply=True, management=self._management)
        for change in changes:
            if change.action == "create":
                log.warning("RabbitMQ: %s was missing and is declared again; what it had is lost", change.what)
            else:
                log.warning("RabbitMQ: %s", change.detail)

    async def lost(self, spec: GroupSpec) -> list[Change]:
        """What a group lacks that the registry has. Raises BrokerError."""
        objects = self._objects(spec)
        return await self._asked(spec, lambda connection: objects.lost(connection, self._management))

    async def restore_group(self, spec: GroupSpec) -> None:
        """Create what such a group lacks. Raises BrokerError."""
        objects = self._objects(spec)
        await self._asked(spec, lambda connection: objects.restore(connection, self._ground.registry, spec))

    def _objects(self, spec: GroupSpec) -> GroupObjects:
        registry = self._ground.registry
        topic = None if self.declared.exchange(spec.topic) is not None else registry.topic(spec.topic)
        return GroupObjects(topic, registry.groups(spec.topic)[spec.group], self.declared)

    async def _asked(self, spec: GroupSpec, question: Callable[[Connection], Awaitable[T]]) -> T:
        async def ask() -> T:
            return await question(await self._ground.query())

        try:
            return await reconnecting(ask)
        except AmqpError as error:
            raise BrokerError(explained(error, f"group {spec.group} of topic {spec.topic}")) from error

    async def diagnose(self) -> list[Finding]:
        ground = self._ground
        try:
            await ground.registry.catch_up()
            topics = ground.registry.topics()
            readable = [*(topic.name for topic in topics), *self.declared.exchanges]
            groups = {name: ground.registry.groups(name).values() for name in readable}
            expected = expected_queues(topics, groups, self.declared, time.time())
            facts = await gathered(await ground.query(), ground.address, expected, self._management)
        except (AmqpError, BrokerError) as error:
            return [Finding("error", str(error), "start RabbitMQ, or correct the URL and the settings of the client")]
        return checkup.findings(facts, ground.settings)

    def figures(self) -> list[Figure]:
        return self.counts.figures()

    def watch_depths(self, queues: Callable[[], Collection[str]]) -> None:
        """Ask for the depths of the declared queues, and of these, from now on. Streams have none."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._depths.watch(lambda: {*queues(), *self._declared_queues()}))

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    def _declared_queues(self) -> Collection[str]:
        queues = [each for each in self.declared.queues.values() if each.kind != "stream"]
        return {name for queue in queues for name in queue.tier_queues.values()}
