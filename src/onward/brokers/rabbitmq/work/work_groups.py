"""Work groups of a broker: members join them, operators list and drop them."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from uuid import uuid4

from onward.brokers.base import Asks, GroupInfo, GroupSpec, MemberInfo, Standing, Start, Supervised
from onward.brokers.core.bell import Bell
from onward.brokers.core.holdings import Holdings
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError
from onward.brokers.rabbitmq.aside.aside import RabbitAsides
from onward.brokers.rabbitmq.connecting import reconnecting
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.operate.operations import RabbitOperations
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel, conflict
from onward.brokers.rabbitmq.operate.topology import Declared
from onward.brokers.rabbitmq.presence import PresenceSelf, asked, living
from onward.brokers.rabbitmq.registry.registry_fold import GroupEntry
from onward.brokers.rabbitmq.server_errors import undeclared
from onward.brokers.rabbitmq.work import work_objects
from onward.brokers.rabbitmq.work.tiers import NORMAL_TIER
from onward.brokers.rabbitmq.work.work_member import WorkMember, WorkOwnership, WorkTools
from onward.brokers.rabbitmq.work.work_place import WorkPlace, check_asks, place_of
from onward.brokers.rabbitmq.work.work_subscription import WorkMembers, WorkSubscription
from onward.errors import BadSetting, BrokerError

log = logging.getLogger("onward")


class WorkGroups:
    """All methods are called in the caller's loop."""

    def __init__(
        self,
        ground: RabbitGround,
        asides: RabbitAsides,
        operations: RabbitOperations,
        epochs: Iterator[int] | None = None,
    ) -> None:
        self._ground = ground
        self._asides = asides
        self._tools = WorkTools(ground, asides, operations.counts, epochs or itertools.count(1), operations.restore)

    async def subscribe(
        self,
        topics: Sequence[str],
        declared: Declared,
        *,
        group: str,
        member: str,
        start: Start,
        asks: Asks | None = None,
        supervised: Supervised | None = None,
    ) -> WorkSubscription:
        """Join the group in these topics, which exist. `declared`: the application's own exchanges and queues."""
        _check_start(start)
        settings = self._ground.settings
        gone = supervised.gone if supervised is not None else frozenset()
        me = PresenceSelf(uuid4().hex, member, settings.lease_s, gone)
        holdings: Holdings[WorkOwnership] = Holdings(Bell())
        members: dict[str, WorkMember] = {}
        for topic in topics:
            place = _place(topic, group, asks, declared)
            if group not in self._ground.registry.groups(topic):
                if not settings.auto_declare:
                    raise BrokerError(undeclared(str(place)))
                if start == "earliest":
                    log.info("%s: without an order it gets the events that are published from now on", place)
            self._tools.counts.consumes(topic, group, place.queues[NORMAL_TIER])
            members[topic] = WorkMember(self._tools, place, me, asks, holdings)
        subscription = WorkSubscription(
            WorkMembers(group, members), holdings, self._ground.io, timeout_s=settings.publish_timeout_s
        )
        try:
            for each in members.values():
                await self._ground.io.run(each.start())
        except BaseException:
            await subscription.close()
            raise
        return subscription

    async def create(self, spec: GroupSpec, declared: Declared) -> None:
        """Create a group of a topic that exists, so that it gets events before its first member joins."""
        _check_start(spec.start)
        place = _place(spec.topic, spec.group, spec.asks, declared)

        async def create() -> None:
            await work_objects.declare(await self._ground.query(), self._ground.registry, place, joins=True)

        await self._ground.io.run(reconnecting(create))

    async def conflict(self, spec: GroupSpec, declared: Declared) -> str:
        """Why the group cannot be created. Creates nothing."""
        _check_start(spec.start)
        place = _place(spec.topic, spec.group, spec.asks, declared)
        queues = [*(place.queues.values() if place.is_own else ()), place.suspects]

        async def look() -> str:
            return await conflict(await self._ground.query(), dict.fromkeys(queues, names.WORK_ARGUMENTS))

        return await self._ground.io.run(reconnecting(look))

    async def groups(self, entries: Sequence[GroupEntry], declared: Declared) -> list[GroupInfo]:
        """Of these work groups: their members, and how many events wait."""
        return [
            GroupInfo(
                each.group,
                each.topic,
                await self.owners(each.topic, each.group),
                {0: Standing(0, await self._depth(each, declared), None, None)},
            )
            for each in entries
        ]

    async def _depth(self, entry: GroupEntry, declared: Declared) -> int | None:
        queues = work_objects.queues_of(entry, declared.queue(entry.group))

        async def look() -> int:
            probe = ProbeChannel(await self._ground.query())
            try:
                return sum([(await probe.queue(queue)).messages for queue in queues])
            finally:
                await probe.close()

        try:
            return await self._ground.io.run(reconnecting(look))
        except (AmqpError, BrokerError):
            return None

    async def owners(self, topic: str, group: str) -> list[MemberInfo]:
        """The live members: each of them owns the shared partition."""
        return await self._ground.io.run(reconnecting(partial(self._owners, topic, group)))

    async def drop_group(self, topic: str, group: str) -> None:
        """Delete the group's queues with their messages, and its dead letters. Raises BrokerError while a member is
        alive."""
        await self._ground.io.run(reconnecting(partial(self._drop, topic, group)))

    async def _owners(self, topic: str, group: str) -> list[MemberInfo]:
        try:
            notes = await asked(await self._ground.query(), topic, group)
        except AmqpError as error:
            raise BrokerError(f"RabbitMQ: the members of group {group} cannot be asked: {error}") from error
        return [MemberInfo.parse(text) for text in sorted(note.member for note in notes)]

    async def _drop(self, topic: str, group: str) -> None:
        connection = await self._ground.query()
        try:
            if alive := await living(connection, topic, group):
                raise BrokerError(f"group {group} of topic {topic} is in use by {', '.join(alive)}; stop them first")
            await self._asides.delete(connection, topic, group, ["work"])
        except AmqpError as error:
            raise BrokerError(f"RabbitMQ: the dead letters of group {group} cannot be deleted: {error}") from error
        await work_objects.delete(connection, topic, group)
        await self._ground.registry.drop_group(topic, group, 0)


def _check_start(start: Start) -> None:
    if not isinstance(start, str):
        raise BadSetting(
            f"start={start!r}: a group with ordering='none' has no history; use 'latest', or another ordering"
        )


def _place(topic: str, group: str, asks: Asks | None, declared: Declared) -> WorkPlace:
    place = place_of(topic, group, asks, declared.exchange(topic), declared.queue(group))
    check_asks(asks, place)
    return place
