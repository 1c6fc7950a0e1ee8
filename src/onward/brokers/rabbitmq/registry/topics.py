"""The topics that this process uses: created on first use, and refused where it expects another partition count."""

import msgspec

from onward.brokers.base import Change, TopicSpec, Topology
from onward.brokers.core.topic_rules import TopicRules
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError, Connection
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel, conflict
from onward.brokers.rabbitmq.operate.topology import Declared
from onward.brokers.rabbitmq.registry.registry_fold import TopicEntry
from onward.brokers.rabbitmq.server_errors import explained
from onward.errors import BrokerError


class PublishRoute(msgspec.Struct, frozen=True):
    """Where the events of a topic go. `entry` is None for an exchange of the application."""

    topic: str
    exchange: str
    partitions: int
    entry: TopicEntry | None = None


class RabbitTopics:
    """The coroutines run in the loop of the I/O thread."""

    def __init__(self, ground: RabbitGround) -> None:
        self.declared = Declared()
        self._query = ground.query
        self._registry = ground.registry
        self._auto_declare = ground.settings.auto_declare
        self._rules = TopicRules(ground.settings)
        self._known: dict[str, PublishRoute] = {}

    def known(self, name: str) -> PublishRoute | None:
        """None: ask `resolve`. Any thread may call it."""
        route = self._known.get(name)
        if route is None or route.entry is None:
            return route
        current = self._registry.topic(name)
        return route if current is not None and current.log_id == route.entry.log_id else None

    async def resolve(self, name: str) -> PublishRoute:
        """The topic as the server has it, created where that is allowed. Raises BrokerError, or PartitionsDiffer if it
        is not as this process expects."""
        if (exchange := self.declared.exchange(name)) is not None:
            await _check_exchange(await self._query(), exchange.name)
            route = PublishRoute(name, exchange.name, 1)
        else:
            known, entry = self._known.get(name), await self.entry(name)
            self._rules.check(name, entry.partitions, known.partitions if known else None)
            route = PublishRoute(name, names.exchange(name), entry.partitions, entry)
        self._known[name] = route
        return route

    async def entry(self, name: str) -> TopicEntry:
        """The topic, created where that is allowed. Raises BrokerError."""
        found = self._registry.topic(name)
        if found is None:
            await self._registry.catch_up()
            found = self._registry.topic(name)
        if found is None:
            if why := await self._taken(name):
                raise BrokerError(why)
            return await self._registry.create_topic(name, self._rules.for_new(name))
        if found.state == "created" and self._auto_declare:
            return await self._registry.create_topic(name, found.partitions)
        return found

    def forget(self, name: str) -> None:
        self._known.pop(name, None)

    async def declare(self, declared: Declared, *, apply: bool) -> list[Change]:
        """The differences of our own topics. Topics that are exchanges of the application are compared elsewhere."""
        self.declared = declared
        for name in declared.exchanges:
            self.forget(name)
        await self._registry.catch_up()
        wanted: dict[str, TopicSpec] = {}

        def create(spec: TopicSpec) -> None:
            wanted[f"topic {spec.name}"] = spec

        changes = self._rules.plan(Topology(declared.topics), self._count, create if apply else None)
        new = {f"topic {spec.name}": spec for spec in declared.topics if self._count(spec.name) is None}
        refused = {what: why for what, spec in new.items() if (why := await self._conflict(spec))}
        for what, spec in wanted.items():
            if what not in refused:
                await self._registry.create_topic(spec.name, spec.partitions)
        return [Change(each.what, "refuse", refused[each.what]) if each.what in refused else each for each in changes]

    async def _taken(self, name: str) -> str:
        """Why there can be no new topic of this name: an exchange has it, and events would go to the wrong one of the
        two. Empty: there can."""
        probe = ProbeChannel(await self._query())
        try:
            if name not in self._registry.foreign_topics() and not await probe.has_exchange(name):
                return ""
        except AmqpError as error:
            raise BrokerError(explained(error, f"exchange {name}")) from error
        finally:
            await probe.close()
        return (
            f"there is no topic {name}, but an exchange of this name; to use the exchange, declare it with "
            f"app.topology(Exchange({name!r})) (in a command: --app MODULE:APP), otherwise choose another topic"
        )

    async def _conflict(self, spec: TopicSpec) -> str:
        """Why a new topic cannot be created. Creates nothing."""
        streams = [names.stream(spec.name, index) for index in range(spec.partitions)]
        try:
            return await self._taken(spec.name) or await conflict(
                await self._query(),
                dict.fromkeys(streams, self._registry.new_stream_arguments),
                {names.exchange(spec.name): "topic"},
            )
        except AmqpError as error:
            raise BrokerError(explained(error, f"topic {spec.name}")) from error

    def _count(self, name: str) -> int | None:
        found = self._registry.topic(name)
        return None if found is None else found.partitions


async def _check_exchange(connection: Connection, name: str) -> None:
    try:
        channel = await connection.channel()
        await channel.declare_exchange(name, "topic", passive=True)
        await channel.close()
    except AmqpError as error:
        why = explained(error, f"exchange {name}")
        raise BrokerError(f"{why}; create it with `onward topology apply --app MODULE:APP`") from error
