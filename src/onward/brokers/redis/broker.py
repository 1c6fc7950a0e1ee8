"""The Redis broker as the contract has it."""

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from onward.brokers.base import (
    Asks,
    Broker,
    Change,
    Features,
    Figure,
    Finding,
    GroupInfo,
    MemberInfo,
    Ordering,
    Relay,
    Start,
    Supervised,
    TopicSpec,
    Topology,
)
from onward.brokers.core.bell import Bell
from onward.brokers.core.holdings import Holdings
from onward.brokers.core.publishing import check_events, check_relay, counted
from onward.brokers.core.subscription import check_start
from onward.brokers.redis import checkup, figures
from onward.brokers.redis.address import RedisAddress
from onward.brokers.redis.aside import RedisAside
from onward.brokers.redis.backlog import BacklogLimit
from onward.brokers.redis.cluster_link import new_link
from onward.brokers.redis.courier import RedisCourier
from onward.brokers.redis.doorbell import ClusterDoorbell, RedisDoorbell
from onward.brokers.redis.foreign.adoption import Adopter
from onward.brokers.redis.foreign.reclaim import Reclaimer, ReclaimLog, TopicReclaimer
from onward.brokers.redis.foreign.streams import mapped
from onward.brokers.redis.group_watch import GroupWatch
from onward.brokers.redis.joined_topics import JoinedTopics
from onward.brokers.redis.keys import Keyspace
from onward.brokers.redis.lease_keeper import Chores, LeaseKeeper
from onward.brokers.redis.lease_turn import RedisTurn
from onward.brokers.redis.link import TIMEOUT_S, Link, LinkDown, LinkThread, NoPermission, patiently
from onward.brokers.redis.member import RedisHoldings, RedisMember
from onward.brokers.redis.permissions import lacking
from onward.brokers.redis.publisher import RedisPublisher
from onward.brokers.redis.server_facts import ServerFacts, is_weaker
from onward.brokers.redis.stream_figures import StreamFigures
from onward.brokers.redis.subscription import RedisAccess, RedisSubscription
from onward.brokers.redis.topics import RedisTopics, listed
from onward.brokers.redis.trimmer import Trimmer
from onward.errors import BadSetting, BrokerError, Closed, OnwardError, PublishError
from onward.event import Event
from onward.settings import Settings, check_name

log = logging.getLogger("onward")

_LEAST_PATIENCE_S = 0.5  # with an answer about leases
_OPEN_S = 5.0  # for a server that does not answer yet


async def open_broker(url: str, settings: Settings) -> Broker:
    """The server that the URL names, asked what it is. BrokerError: it does not answer, or cannot be used.
    BadSetting: it is less durable than `durability` says."""
    address = RedisAddress.of(url, settings)
    facts = await asyncio.to_thread(_checked, address, settings)
    if is_weaker(facts.durability, settings.durability):
        fails_over = address.kind == "sentinel" or facts.replicas
        cure = "set replication=2 for events that survive a fail-over" if fails_over else ""
        raise BadSetting(
            f"durability={settings.durability!r}: Redis at {address.name} has {facts.durability!r}; "
            f"{cure or 'set appendonly yes and appendfsync always (for window: everysec) there'}, or leave the setting "
            "out"
        )
    for finding in facts.findings() if facts.durability == "memory" else ():
        if finding.level != "ok":
            log.warning("Redis at %s: %s; %s", address.name, finding.what, finding.cure)
    return RedisBroker(address, facts, settings)


def _checked(address: RedisAddress, settings: Settings) -> ServerFacts:
    link = new_link(address)
    try:
        facts = patiently(lambda: _usable(link, settings), _patience_s(settings))
        if missing := checkup.missing_commands(link):
            raise BrokerError(f"Redis at {address.name}: {lacking(missing)}")
        return facts
    finally:
        link.close()


def _patience_s(settings: Settings) -> float:
    """For a server that is away when it is needed for the first time."""
    return min(_OPEN_S, settings.publish_timeout_s)


def _usable(link: Link, settings: Settings) -> ServerFacts:
    """BrokerError: it cannot be used as the URL and the settings say."""
    facts, address = _facts(link, settings), link.address
    if link.risk:
        raise BrokerError(link.risk)
    if facts.is_cluster != (address.kind == "cluster"):
        cure = "redis+cluster://" if facts.is_cluster else "redis://"
        what = "it is a node of a cluster" if facts.is_cluster else "it is no cluster"
        raise BadSetting(f"Redis at {address.name}: {what}; write the URL as {cure}")
    wanted = (settings.replication or 1) - 1
    if facts.replicas < wanted:
        raise LinkDown(
            f"replication={settings.replication}: Redis at {address.name} has {facts.replicas} connected replicas, "
            f"{wanted} are needed; start more replicas, or lower the setting",
            sent=False,
        )
    return facts


def _facts(link: Link, settings: Settings) -> ServerFacts:
    return link.facts().promising(settings.replication or 1, fails_over=link.address.kind == "sentinel")


class RedisBroker:
    def __init__(self, address: RedisAddress, facts: ServerFacts, settings: Settings) -> None:
        self.features = Features(
            stable_positions=True,
            fence=True,
            durability=facts.durability,
            aside=True,
            starts=frozenset({"earliest", "latest", "time"}),
            fenced_publish=True,
        )
        self._address = address
        self._settings = settings
        self._topics = RedisTopics(settings, Keyspace(mapped(settings.streams)))
        self._figures = StreamFigures()
        self._thread = LinkThread(new_link(address), "query")
        backlog = BacklogLimit(self._topics, settings.max_backlog_bytes)
        link = new_link(address, min(TIMEOUT_S, settings.publish_timeout_s))
        courier = RedisCourier(link, self._topics, backlog, settings)
        self._publisher = RedisPublisher(courier, settings, self._topics.keyspace)
        self._epochs = itertools.count(1)
        self._subscriptions: set[RedisSubscription] = set()
        self._closed = False

    async def publish(self, events: Sequence[Event], *, relay: Relay | None = None) -> None:
        self._check_open()
        check_relay(relay)
        check_events(events)
        if not events:
            return
        names = {event.topic for event in events}
        known = {name: topic.partitions for name in names if (topic := self._topics.known(name)) is not None}
        if len(known) < len(names) or self._publisher.in_turn.locked():
            async with self._publisher.in_turn:
                sent = self._publisher.enter(events, await self._counts(events, names), relay)
        else:
            sent = self._publisher.enter(events, known, relay)
        await sent

    async def _counts(self, events: Sequence[Event], names: Iterable[str]) -> dict[str, int]:
        try:
            return {name: await self._count(name) for name in names}
        except Closed:
            raise
        except BrokerError as error:
            why = f"Redis: {counted(len(events))} not accepted: {error}"
            raise PublishError(why, refused=events) from error

    async def _count(self, name: str) -> int:
        known = self._topics.known(name)
        if known is None:
            within_s = self._settings.publish_timeout_s
            known = await self._thread.run(lambda link: self._topics.resolve(link, name), within_s=within_s)
        return known.partitions

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
    ) -> RedisSubscription:
        self._check_open()
        check_name("group", group)
        check_start(start)
        gone = frozenset[str]() if supervised is None else supervised.gone
        owner = f"{member}:{uuid.uuid4().hex}"
        enrolment = RedisMember(
            group, owner, list(dict.fromkeys(topics)), start, self._epochs, gone, self._topics.keyspace, self._figures
        )
        joining = asyncio.ensure_future(self._joined(enrolment))
        try:
            return await asyncio.shield(joining)
        except asyncio.CancelledError:
            joining.add_done_callback(_left)  # left alone it would own partitions until its lease ends
            raise

    async def _joined(self, member: RedisMember) -> RedisSubscription:
        settings, watch = self._settings, GroupWatch(member.owner, self._settings.lease_s)
        holdings: RedisHoldings = Holdings(Bell())
        patience_s = min(TIMEOUT_S, max(_LEAST_PATIENCE_S, settings.lease_s / 2))
        turn = RedisTurn(new_link(self._address, patience_s), member, watch, settings)
        chores = Chores(Trimmer(self._topics, settings, member), self._reclaimer(member, holdings))
        keeper = LeaseKeeper(turn, member, JoinedTopics(self._topics, member), holdings, chores)
        await asyncio.to_thread(patiently, keeper.join, _patience_s(settings))
        doorbell = self._doorbell(member, ring=holdings.bell.ring, tell=lambda: keeper.look_at(0.0))
        access = RedisAccess(LinkThread(new_link(self._address), f"reader-{member.group}"), doorbell)
        subscription = RedisSubscription(keeper, holdings, access, settings)
        self._subscriptions = {each for each in self._subscriptions if not each.is_closed} | {subscription}
        keeper.start()
        doorbell.start(member.group)
        return subscription

    def _doorbell(
        self, member: RedisMember, *, ring: Callable[[], None], tell: Callable[[], None]
    ) -> RedisDoorbell | ClusterDoorbell:
        news, address = [member.news(topic) for topic in member.topics], self._address
        if address.kind == "cluster":
            return ClusterDoorbell(lambda key: new_link(address, key=key), news, ring=ring, tell=tell)
        return RedisDoorbell(new_link(address), news, ring=ring, tell=tell)

    def _reclaimer(self, member: RedisMember, holdings: RedisHoldings) -> Reclaimer:
        """Temporary groups have no consumer group at the server, so they have nothing to adopt."""
        foreign = [each for each in member.topics if member.keyspace.mapped(each) and not member.is_passing]
        lines = ReclaimLog(member.group)
        return Reclaimer(
            {
                topic: TopicReclaimer(topic, Adopter(new_link(self._address), member, self._settings), holdings, lines)
                for topic in foreign
            }
        )

    def aside(self, group: str) -> RedisAside:
        return RedisAside(group, self._thread, self._topics.keyspace)

    async def declare(self, topology: Topology, *, apply: bool) -> Sequence[Change]:
        self._check_open()
        return await self._thread.run(lambda link: self._topics.declare(link, topology, apply=apply))

    async def topics(self) -> Sequence[TopicSpec]:
        self._check_open()
        return await self._thread.run(lambda link: listed(link, self._topics.keyspace))

    async def groups(self, topic: str) -> Sequence[GroupInfo]:
        self._check_open()
        return await self._thread.run(lambda link: figures.groups(link, self._topics, topic))

    async def owners(self, topic: str, group: str) -> Sequence[MemberInfo]:
        self._check_open()
        return await self._thread.run(lambda link: figures.owners(link, self._topics, topic, group))

    async def drop_group(self, topic: str, group: str) -> None:
        self._check_open()
        await self._thread.run(lambda link: figures.drop_group(link, self._topics, topic, group))

    async def drop_topic(self, topic: str) -> None:
        self._check_open()
        await self._thread.run(lambda link: figures.drop_topic(link, self._topics, topic))
        self._topics.forget(topic)

    def figures(self) -> Sequence[Figure]:
        return self._figures.figures()

    async def diagnose(self) -> Sequence[Finding]:
        self._check_open()
        try:
            return await self._thread.run(
                lambda link: checkup.findings(link, self._topics, self._settings, _facts(link, self._settings))
            )
        except NoPermission as error:
            return [Finding("error", str(error))]
        except BrokerError as error:
            return [Finding("error", str(error), "start Redis, or correct the URL and the settings of the client")]

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*[subscription.close() for subscription in self._subscriptions])
        await self._publisher.close()
        await self._thread.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the broker on {self._address.name} is closed")


def _left(joining: "asyncio.Future[RedisSubscription]") -> None:
    """Leave as soon as it has joined, if it does."""
    with contextlib.suppress(OnwardError, asyncio.CancelledError):
        closing = asyncio.ensure_future(joining.result().close())
        _leaving.add(closing)
        closing.add_done_callback(_leaving.discard)


_leaving: set["asyncio.Future[None]"] = set()
