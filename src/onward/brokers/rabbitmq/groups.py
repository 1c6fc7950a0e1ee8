"""The groups of a broker. A group with order reads streams, one without order has a work queue."""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

from onward.brokers.base import (
    Asks,
    Change,
    GroupInfo,
    GroupSpec,
    MemberInfo,
    Ordering,
    Start,
    Supervised,
)
from onward.brokers.rabbitmq.amqp import AmqpError
from onward.brokers.rabbitmq.aside.aside import RabbitAside, RabbitAsides
from onward.brokers.rabbitmq.connecting import reconnecting
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.operate.group_objects import one_of_each
from onward.brokers.rabbitmq.operate.operations import RabbitOperations
from onward.brokers.rabbitmq.ordered.ordered import OrderedGroups, OrderedSubscription
from onward.brokers.rabbitmq.presence import living
from onward.brokers.rabbitmq.registry.registry import other_kind
from onward.brokers.rabbitmq.registry.registry_fold import GroupEntry, GroupKind, TopicEntry
from onward.brokers.rabbitmq.registry.topics import RabbitTopics
from onward.brokers.rabbitmq.work.work_groups import WorkGroups
from onward.brokers.rabbitmq.work.work_subscription import WorkSubscription
from onward.errors import BadSetting, BrokerError, OnwardError

RabbitSubscription = OrderedSubscription | WorkSubscription


class RabbitGroups:
    """All methods are called in the caller's loop."""

    def __init__(self, ground: RabbitGround, topics: RabbitTopics, operations: RabbitOperations) -> None:
        self._ground = ground
        self._topics = topics
        self._operations = operations
        self._asides = RabbitAsides(ground)
        epochs = itertools.count(1)
        self._ordered = OrderedGroups(ground, self._asides, epochs)
        self._work = WorkGroups(ground, self._asides, operations, epochs)
        self._subscriptions: set[RabbitSubscription] = set()
        self._work_queues: set[str] = set()  # of the groups that this process has joined

    async def subscribe(
        self,
        topics: Sequence[str],
        *,
        group: str,
        member: str,
        ordering: Ordering,
        start: Start,
        supervised: Supervised | None,
        asks: Asks | None,
    ) -> RabbitSubscription:
        """If the call is cancelled, the member leaves as soon as it has joined."""
        if ordering == "none":
            joining: asyncio.Future[RabbitSubscription] = asyncio.ensure_future(
                self._share(topics, group, member, start, supervised, asks)
            )
        else:
            joining = asyncio.ensure_future(self._own(topics, group, member, start, supervised))
        try:
            subscription = await asyncio.shield(joining)
        except asyncio.CancelledError:
            joining.add_done_callback(_left)
            raise
        self._ground.io.post(self._operations.watch_depths, lambda: self._work_queues)
        self._subscriptions = {each for each in self._subscriptions if not each.is_closed} | {subscription}
        return subscription

    async def _own(
        self, topics: Sequence[str], group: str, member: str, start: Start, supervised: Supervised | None
    ) -> RabbitSubscription:
        entries = [await self._entry(name) for name in topics]
        return await self._ordered.subscribe(entries, group=group, member=member, start=start, supervised=supervised)

    async def _share(
        self,
        topics: Sequence[str],
        group: str,
        member: str,
        start: Start,
        supervised: Supervised | None,
        asks: Asks | None,
    ) -> RabbitSubscription:
        declared = self._topics.declared
        for name in topics:
            await self._ground.io.run(self._topics.resolve(name))
        subscription = await self._work.subscribe(
            topics, declared, group=group, member=member, start=start, asks=asks, supervised=supervised
        )
        self._work_queues |= subscription.own_queues
        return subscription

    def _check_stores(self, topic: str) -> None:
        if self._topics.declared.exchange(topic) is not None:
            raise BadSetting(
                f"topic {topic} is an exchange of the application, which stores no events: they cannot be read in "
                "order, or again. Its handlers need ordering='none', and `onward tail` cannot show it; to see its "
                "messages, bind a queue of your own"
            )

    async def _entry(self, name: str) -> TopicEntry:
        self._check_stores(name)
        entry = (await self._ground.io.run(self._topics.resolve(name))).entry
        assert entry is not None, "a topic that is no exchange of the application"
        return entry

    def aside(self, group: str) -> RabbitAside:
        return self._asides.of(group)

    async def declare(self, specs: Sequence[GroupSpec], *, apply: bool) -> list[Change]:
        """The groups that do not exist, lack something at the server, or have another kind. With `apply`, create what
        is missing."""
        await self._ground.io.run(self._ground.registry.catch_up())
        return one_of_each([change for spec in specs for change in await self._declare(spec, apply=apply)])

    async def _declare(self, spec: GroupSpec, *, apply: bool) -> list[Change]:
        what = f"group {spec.group} of topic {spec.topic}"
        kind: GroupKind = "work" if spec.ordering == "none" else "ordered"
        known = self._ground.registry.groups(spec.topic).get(spec.group)
        if known is not None and known.kind != kind:
            return [Change(what, "refuse", other_kind(known))]
        try:
            if why := await self._conflict(spec):
                return [Change(what, "refuse", f"{what}: {why}")]
            if known is not None:
                return await self._compare(spec, apply=apply)
            if apply:
                await self._create(spec)
        except (BadSetting, BrokerError) as error:
            return [Change(what, "refuse", f"{what}: {error}")]
        return [Change(what, "create", f"create {what}")]

    async def _compare(self, spec: GroupSpec, *, apply: bool) -> list[Change]:
        """What an existing group lacks. `apply` declares and binds it again in any case, because AMQP cannot list
        bindings."""
        lost = await self._ground.io.run(self._operations.lost(spec))
        if apply:
            await self._ground.io.run(self._operations.restore_group(spec))
        return lost

    async def _conflict(self, spec: GroupSpec) -> str:
        """Why the group cannot be created, or is not as it was created. Creates nothing."""
        if spec.ordering == "none":
            return await self._work.conflict(spec, self._topics.declared)
        self._check_stores(spec.topic)
        entry = self._ground.registry.topic(spec.topic)
        return "" if entry is None else await self._ordered.conflict(entry, spec.group)

    async def _create(self, spec: GroupSpec) -> None:
        if spec.ordering == "none":
            await self._ground.io.run(self._topics.resolve(spec.topic))
            await self._work.create(spec, self._topics.declared)
        else:
            await self._ordered.create(await self._entry(spec.topic), spec.group, spec.start)

    async def groups(self, topic: str) -> list[GroupInfo]:
        """Every group of the topic, sorted by name. Empty if the topic does not exist."""
        entry, groups = await self._known(topic)
        ordered = [each for each in groups.values() if each.kind == "ordered"]
        found = await self._work.groups(
            [each for each in groups.values() if each.kind == "work"], self._topics.declared
        )
        if entry is not None:
            found = [*found, *await self._ordered.groups(entry, ordered)]
        return sorted(found, key=lambda each: each.group)

    async def owners(self, topic: str, group: str) -> list[MemberInfo]:
        entry, groups = await self._known(topic)
        kind = groups[group].kind if group in groups else None
        if kind == "work":
            return list(await self._work.owners(topic, group))
        return [] if entry is None else list(await self._ordered.owners(entry, group))

    async def drop_group(self, topic: str, group: str) -> None:
        entry, groups = await self._known(topic)
        if group in groups:
            await self._drop(topic, entry, groups[group])

    async def drop_topic(self, topic: str) -> None:
        entry, groups = await self._known(topic)
        for each in groups.values():
            if members := await self._members(topic, each.group):
                raise BrokerError(
                    f"topic {topic} is in use: group {each.group} has members ({', '.join(members)}); stop them first"
                )
        for each in groups.values():
            await self._drop(topic, entry, each)
        await self._ground.io.run(self._ground.registry.drop_topic(topic))
        self._topics.forget(topic)

    async def close(self) -> None:
        """End all subscriptions."""
        await asyncio.gather(*[subscription.close() for subscription in self._subscriptions])
        await self._ground.io.run(self._asides.close())

    async def _known(self, topic: str) -> tuple[TopicEntry | None, dict[str, GroupEntry]]:
        registry = self._ground.registry
        await self._ground.io.run(registry.catch_up())
        return registry.topic(topic), registry.groups(topic)

    async def _members(self, topic: str, group: str) -> Sequence[str]:
        """The names of the live members."""
        ground = self._ground

        async def ask() -> list[str]:
            return await living(await ground.query(), topic, group)

        try:
            return await ground.io.run(reconnecting(ask))
        except AmqpError as error:
            raise BrokerError(f"RabbitMQ: the members of group {group} cannot be asked: {error}") from error

    async def _drop(self, topic: str, entry: TopicEntry | None, group: GroupEntry) -> None:
        if group.kind == "work":
            await self._work.drop_group(topic, group.group)
        elif entry is not None:
            await self._ordered.drop_group(entry, group)


def _left(joining: "asyncio.Future[RabbitSubscription]") -> None:
    """Leave as soon as it has joined, if it does."""
    with contextlib.suppress(OnwardError, asyncio.CancelledError):
        closing = asyncio.ensure_future(joining.result().close())
        _leaving.add(closing)
        closing.add_done_callback(_leaving.discard)


_leaving: set["asyncio.Future[None]"] = set()
