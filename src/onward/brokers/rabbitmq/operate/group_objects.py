"""What a group that exists lacks at the server, and its topic: found for `onward topology plan`, created by `apply`."""

import time
from collections.abc import Iterator, Sequence

import msgspec

from onward.brokers.base import Change, GroupSpec
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import Connection
from onward.brokers.rabbitmq.operate.expected_queues import expected_queues
from onward.brokers.rabbitmq.operate.management import ManagementApi, ManagementError
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel
from onward.brokers.rabbitmq.operate.server_facts import ExpectedQueue
from onward.brokers.rabbitmq.operate.topology import Binding, Declared
from onward.brokers.rabbitmq.registry import topic_objects
from onward.brokers.rabbitmq.registry.registry import TopicRegistry
from onward.brokers.rabbitmq.registry.registry_fold import GroupEntry, TopicEntry
from onward.brokers.rabbitmq.work import work_objects
from onward.brokers.rabbitmq.work.tiers import WorkRoute
from onward.brokers.rabbitmq.work.work_place import place_of


class GroupObjects:
    """Of a group of the registry. `topic` is None for an exchange of the application. Raises AmqpError."""

    def __init__(self, topic: TopicEntry | None, group: GroupEntry, declared: Declared) -> None:
        self._topic = topic
        self._group = group
        self._declared = declared

    async def lost(self, connection: Connection, management: ManagementApi | None) -> list[Change]:
        """What is missing. Bindings can only be compared with `management`."""
        probe = ProbeChannel(connection)
        try:
            missing = [each for each in self._expected() if not await probe.has_queue(each.name)]
            found = [_lost_queue(each, self._topic) for each in missing]
            if self._has_exchange and not await probe.has_exchange(self._exchange):
                detail = f"create exchange {self._exchange} again, with the bindings of its groups"
                found.append(Change(f"exchange {self._exchange}", "create", detail))
        finally:
            await probe.close()
        return [*found, *await self._unbound(management)]

    async def restore(self, connection: Connection, registry: TopicRegistry, spec: GroupSpec) -> None:
        """Create what is missing, as a member would. The group keeps the routes that its last member gave it. Raises
        BrokerError too."""
        if self._topic is not None and self._topic.state == "created":
            await registry.create_topic(self._topic.name, self._topic.partitions)
        if self._group.kind == "ordered":
            await self._restore_tokens(connection)
            return
        if self._topic is not None and self._has_exchange:
            await work_objects.route_again(connection, self._topic, [])
        sources = self._declared.exchange(spec.topic), self._declared.queue(spec.group)
        place = place_of(spec.topic, spec.group, spec.asks, *sources)
        await work_objects.declare(connection, registry, place, joins=False)

    async def _restore_tokens(self, connection: Connection) -> None:
        """The next owner finds the last note of the progress in the aside."""
        channel = await connection.channel()
        for queue in self._expected():
            if queue.role != "log":
                await channel.declare_queue(queue.name, arguments=names.TOKEN_ARGUMENTS)
        await channel.close()

    @property
    def _exchange(self) -> str:
        declared = self._declared.exchange(self._group.topic)
        return names.exchange(self._group.topic) if declared is None else declared.name

    @property
    def _has_exchange(self) -> bool:
        """Whether the group needs the topic's own exchange."""
        return self._topic is not None and self._group.kind == "work"

    def _expected(self) -> list[ExpectedQueue]:
        """Also of a topic that is new: its group was registered after its queues had been declared."""
        topics = [] if self._topic is None else [msgspec.structs.replace(self._topic, state="ready")]
        found = expected_queues(topics, {self._group.topic: [self._group]}, self._declared, time.time())
        return [each for each in found if each.name != names.REGISTRY and not each.is_declared]

    async def _unbound(self, management: ManagementApi | None) -> list[Change]:
        wanted = list(_bindings(self._group, self._exchange))
        if management is None or not wanted:
            return []
        try:
            live = {each.identity for each in await management.bindings()}
        except ManagementError:
            return []  # the comparison of what the application declares has logged it
        missing = [each for each in wanted if each.identity not in live]
        return [Change(str(each), "create", f"create {each} again; events without it were lost") for each in missing]


def _bindings(group: GroupEntry, exchange: str) -> Iterator[Binding]:
    for route in map(WorkRoute.parse, sorted(work_objects.bindings_of(group))):
        queue, to_exchange = ("", route.target) if route.to_exchange else (route.target, "")
        yield Binding(route.source or exchange, queue, route.key, to_exchange)


def _lost_queue(queue: ExpectedQueue, topic: TopicEntry | None) -> Change:
    what = f"queue {queue.name}"
    if not queue.topic or topic is None:
        return Change(what, "create", f"create {what} again ({queue.what}); the messages in it are lost")
    if topic.may_lack_streams(time.time()):
        return Change(what, "create", f"create {what} ({queue.what})")
    cure = topic_objects.cure_of_a_deleted_stream(queue.topic)
    return Change(what, "refuse", f"{what} is missing ({queue.what}): it was deleted with all its events; {cure}")


def one_of_each(changes: Sequence[Change]) -> list[Change]:
    """Two groups may lack the same stream of their topic."""
    return list({each.what: each for each in changes}.values())
