"""Ordered groups: the subscription of a member, and the groups of a broker."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import msgspec

from onward.brokers.base import (
    PASSING,
    AsideRecord,
    BrokerLag,
    GroupInfo,
    MemberInfo,
    Progress,
    Start,
    Supervised,
)
from onward.brokers.core.bell import Bell
from onward.brokers.core.holdings import Holdings
from onward.brokers.core.subscription import Keeper, SubscriptionShell
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError
from onward.brokers.rabbitmq.aside.aside import RabbitAsides
from onward.brokers.rabbitmq.aside.aside_entries import AsidePlace
from onward.brokers.rabbitmq.connecting import reconnecting
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.operate.probe_channel import conflict
from onward.brokers.rabbitmq.ordered import ordered_groups
from onward.brokers.rabbitmq.ordered.group_start import FirstTokens, first_token, joined, start_tokens
from onward.brokers.rabbitmq.ordered.log_lag import lag_of
from onward.brokers.rabbitmq.ordered.log_reader import PartitionReader
from onward.brokers.rabbitmq.ordered.membership import OrderedMember, OrderedMembership
from onward.brokers.rabbitmq.ordered.ordered_hold import OrderedHold, OrderedHoldings, OrderedOwn
from onward.brokers.rabbitmq.ordered.ordered_settle import OrderedSettle
from onward.brokers.rabbitmq.ordered.passing import PassingMembership, PassingParts
from onward.brokers.rabbitmq.ordered.tenancy_parts import TenancyParts
from onward.brokers.rabbitmq.ordered.token import LONGEST_LEASE_S, Token
from onward.brokers.rabbitmq.registry.registry import TopicRegistry
from onward.brokers.rabbitmq.registry.registry_fold import GroupEntry, TopicEntry
from onward.brokers.rabbitmq.server_errors import undeclared
from onward.errors import BrokerError, Closed
from onward.event import Partition
from onward.settings import Settings

T = TypeVar("T")


class OrderedKeeper(Keeper, Protocol):
    """Keeps a member in an ordered group. Its coroutines run in the loop of the I/O thread."""

    def kick(self) -> None: ...
    async def settle(self, hold: OrderedHold, progress: Progress) -> bool: ...
    async def store(self, hold: OrderedHold, records: Sequence[AsideRecord]) -> str | None: ...
    async def remove(self, hold: OrderedHold, ids: Sequence[str]) -> None: ...
    def reader_of(self, hold: OrderedHold) -> PartitionReader | None: ...
    async def release(self, holds: Collection[OrderedHold], *, drained: bool) -> None: ...
    async def leave(self) -> None: ...


class OrderedSubscription(SubscriptionShell[OrderedOwn]):
    def __init__(
        self,
        keeper: OrderedKeeper,
        holdings: OrderedHoldings,
        ground: RabbitGround,
        stalled: Collection[PartitionReader],
    ) -> None:
        super().__init__(keeper, holdings)
        self._members = keeper
        self._ground = ground
        self._stalled = stalled
        self._deadline = holdings.deadline

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        holds, lost = self._holdings.settleable(progress, aside)
        if self.is_closed:
            return list(lost | dict.fromkeys(each.partition for each in progress))
        return await self._answer(OrderedSettle(self._members, holds, lost).run(progress, aside, gone))

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        holds = self._holdings.known(partitions)
        if holds and not self.is_closed:
            await self._answer(self._members.release(holds, drained=drained))

    async def resume(self, partitions: Sequence[Partition]) -> None:
        await super().resume(partitions)
        self._ground.io.post(self._members.kick)

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        holds = self._holdings.announced()
        return await self._answer(self._lags(holds)) if holds and not self.is_closed else {}

    async def _lags(self, holds: Sequence[OrderedHold]) -> dict[Partition, BrokerLag]:
        connection = await self._ground.query()
        found = await asyncio.gather(*[lag_of(connection, hold, self._members.reader_of(hold)) for hold in holds])
        return {hold.partition: lag for hold, lag in zip(holds, found, strict=True)}

    def _collected(self, now: float, *, sure: bool) -> None:
        holdings = self._holdings
        if holdings.deadline != self._deadline:
            self._deadline = holdings.deadline
            self._ground.io.post(self._members.kick)
        if self._stalled and holdings.hungry.is_set():
            self._ground.io.post(_resume, self._stalled)

    async def _answer(self, work: Coroutine[Any, Any, T]) -> T:
        timeout_s = self._ground.settings.publish_timeout_s
        try:
            return await self._ground.io.run(_bounded(work, timeout_s))
        except TimeoutError:
            raise BrokerError(f"RabbitMQ did not answer in {timeout_s:g} s; {'; '.join(self.troubles())}") from None
        except AmqpError as error:
            raise BrokerError(f"RabbitMQ: {error}") from error

    async def _leave(self) -> None:
        try:
            await self._ground.io.run(self._members.leave())
        except Closed:
            pass  # the broker was closed first, and with it every connection
        finally:
            with self._holdings.lock:
                self._holdings.held.clear()


def _bounded_lease(settings: Settings) -> Settings:
    """No token may name a longer lease."""
    return msgspec.structs.replace(settings, lease_s=min(settings.lease_s, LONGEST_LEASE_S))


async def _bounded(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    async with asyncio.timeout(timeout_s):
        return await work


def _resume(stalled: Collection[PartitionReader]) -> None:
    for reader in tuple(stalled):
        reader.resume()


class OrderedGroups:
    """The ordered groups of a broker. Called in the application's loop."""

    def __init__(self, ground: RabbitGround, asides: RabbitAsides, epochs: Iterator[int] | None = None) -> None:
        self._ground = ground
        self._asides = asides
        self._epochs = itertools.count(1) if epochs is None else epochs

    async def subscribe(
        self,
        topics: Sequence[TopicEntry],
        *,
        group: str,
        member: str,
        start: Start,
        supervised: Supervised | None = None,
    ) -> OrderedSubscription:
        """Join the group. Creates it if it does not exist. Raises BrokerError."""
        if group.startswith(PASSING):
            return await self._ground.io.run(self._pass(topics, group, start))
        gone = supervised.gone if supervised is not None else frozenset[str]()
        joining = OrderedMember(member, list(topics), gone, uuid4().hex)
        return await self._ground.io.run(self._join(joining, group, start))

    async def create(self, topic: TopicEntry, group: str, start: Start) -> None:
        """Create the group if it does not exist."""
        await self._ask(lambda: self._created(topic, group, start))

    async def conflict(self, topic: TopicEntry, group: str) -> str:
        """Why the group cannot be created. Creates nothing."""
        queues = [names.token_queue(topic.name, index, group) for index in range(topic.partitions)]

        async def look() -> str:
            return await conflict(await self._ground.query(), dict.fromkeys(queues, names.TOKEN_ARGUMENTS))

        return await self._ask(look)

    async def groups(self, topic: TopicEntry, entries: Sequence[GroupEntry]) -> list[GroupInfo]:
        return await self._ask(lambda: ordered_groups.infos(self._ground, topic, entries))

    async def owners(self, topic: TopicEntry, group: str) -> list[MemberInfo]:
        return await self._ask(lambda: ordered_groups.owners(self._ground, topic, group))

    async def drop_group(self, topic: TopicEntry, entry: GroupEntry) -> None:
        """Raises BrokerError while a member is alive."""
        await self._ask(lambda: ordered_groups.drop(self._ground, self._asides, topic, entry.group))

    async def _ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._ground.io.run(reconnecting(work))
        except AmqpError as error:
            raise BrokerError(f"RabbitMQ: {error}") from error

    # -- in the loop of the I/O thread ------------------------------------------------------------------------------

    async def _join(self, member: OrderedMember, group: str, start: Start) -> OrderedSubscription:
        ground, registry = self._ground, self._ground.registry
        tokens: dict[Partition, Token] = {}
        for topic in member.topics:
            tokens |= await reconnecting(partial(self._joined, topic, group, start))
        holdings: OrderedHoldings = Holdings(Bell())
        parts = TenancyParts(
            group=group,
            member=MemberInfo.parse(member.text).name,
            settings=_bounded_lease(ground.settings),
            holdings=holdings,
            asides=self._asides,
            epochs=self._epochs,
            topic_ids={topic.name: topic.log_id for topic in member.topics},
            first_token=FirstTokenOf(member.topics, tokens, registry, group),
            stalled=set(),
        )
        membership = OrderedMembership(ground, member, parts)
        membership.start()
        return OrderedSubscription(membership, holdings, ground, parts.stalled)

    async def _joined(self, topic: TopicEntry, group: str, start: Start) -> FirstTokens:
        registry = self._ground.registry
        await registry.catch_up()
        if not self._ground.settings.auto_declare and group not in registry.groups(topic.name):
            raise BrokerError(undeclared(f"group {group} of topic {topic.name}"))
        return await self._created(topic, group, start)

    async def _created(self, topic: TopicEntry, group: str, start: Start) -> FirstTokens:
        return await joined(await self._ground.query(), self._ground.registry, topic, group, start)

    async def _passing_tokens(self, topic: TopicEntry, start: Start) -> FirstTokens:
        return await start_tokens(await self._ground.query(), topic, start)

    async def _pass(self, topics: Sequence[TopicEntry], group: str, start: Start) -> OrderedSubscription:
        tokens: dict[Partition, Token] = {}
        for topic in topics:
            tokens |= await reconnecting(partial(self._passing_tokens, topic, start))
        holdings: OrderedHoldings = Holdings(Bell())
        asides = {each: self._asides.passing(AsidePlace(each.topic, group, each.index)) for each in tokens}
        parts = PassingParts(group, self._ground.settings.lease_s, holdings, asides, set(), self._epochs)
        membership = PassingMembership(self._ground, parts, tokens)
        membership.start()
        return OrderedSubscription(membership, holdings, self._ground, parts.stalled)


class FirstTokenOf:
    """The first token of a partition whose queue has none. A member that has created the group knows where it starts.
    For others the safe place is the beginning."""

    def __init__(self, topics: Sequence[TopicEntry], written: FirstTokens, registry: TopicRegistry, group: str) -> None:
        self._topics = {topic.name: topic for topic in topics}
        self._written = written
        self._registry = registry
        self._group = group

    def __call__(self, partition: Partition) -> Token:
        floor = self._registry.fence_floor(partition.topic, self._group)
        return self._written.get(partition) or first_token(self._topics[partition.topic], floor)
