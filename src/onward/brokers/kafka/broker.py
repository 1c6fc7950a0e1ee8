"""Implements the broker contract on Kafka."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
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
from onward.brokers.core.publishing import check_events, check_relay
from onward.brokers.core.subscription import check_start
from onward.brokers.kafka.aside import KafkaAside
from onward.brokers.kafka.aside_log import AsideLog
from onward.brokers.kafka.aside_owner import AsideOwner
from onward.brokers.kafka.aside_topics import groups_of, missing
from onward.brokers.kafka.closing import close_in_time
from onward.brokers.kafka.cluster_facts import gather
from onward.brokers.kafka.diagnosis import diagnose
from onward.brokers.kafka.group_consumer import JoinSpec
from onward.brokers.kafka.groups import Groups
from onward.brokers.kafka.hold import KafkaHoldings
from onward.brokers.kafka.membership import Membership
from onward.brokers.kafka.placement import KeyPlacement
from onward.brokers.kafka.publisher import KafkaPublisher
from onward.brokers.kafka.reader import LogReader
from onward.brokers.kafka.subscription import KafkaSubscription
from onward.brokers.kafka.topics import Cluster
from onward.errors import BrokerError, Closed
from onward.event import Event
from onward.settings import Settings, check_name

log = logging.getLogger("onward")


def open_broker(url: str, settings: Settings) -> Broker:
    """A broker for the cluster that the URL names. Sends nothing to it yet."""
    cluster = Cluster.at(url, settings)
    cluster.factory.producer()  # so that a wrong setting is refused now, not when the first event is published
    return KafkaBroker(cluster)


class KafkaBroker:
    features = Features(
        stable_positions=True,
        fence=True,
        durability="replicated",
        aside=True,
        starts=frozenset({"earliest", "latest", "time"}),
    )

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._groups = Groups(cluster)
        self._placement = KeyPlacement(cluster)
        self._publisher = KafkaPublisher(cluster.factory, cluster.settings)
        self._aside_logs: dict[str, AsideLog] = {}
        self._in_turn = asyncio.Lock()
        self._epochs = itertools.count(1)
        self._subscriptions: set[KafkaSubscription] = set()
        self._closed = False

    async def publish(self, events: Sequence[Event], *, relay: Relay | None = None) -> None:
        """`relay` is not checked: a Kafka transaction fences a producer by the producer's epoch, not by the relay's
        fence in the outbox database. A relay that was suspended may publish old events again, behind newer ones."""
        self._check_open()
        check_relay(relay)
        check_events(events)
        if not events:
            return
        topics = {event.topic for event in events}
        counts = self._placement.remembered(topics)
        if counts is None:
            self._publisher.warm()
        if counts is None or self._in_turn.locked():
            async with self._in_turn:  # calls take effect in their order, even while a topic is looked up
                sent = self._publisher.enter(events, await self._placement.counts(topics))
        else:
            sent = self._publisher.enter(events, counts)
        await sent

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
    ) -> KafkaSubscription:
        self._check_open()
        check_name("group", group)
        check_start(start)
        names = list(dict.fromkeys(topics))
        for topic in names:
            await self._placement.check(topic)
            if not await asyncio.to_thread(self._aside_log(group).prepare, topic):
                log.warning("Kafka: %s", missing(group, topic))
        subscription = self._subscribed(JoinSpec(group, member, names, start, supervised))
        self._subscriptions = {kept for kept in self._subscriptions if not kept.is_closed} | {subscription}
        return subscription

    def _subscribed(self, spec: JoinSpec) -> KafkaSubscription:
        cluster, group = self._cluster, spec.group
        holdings: KafkaHoldings = Holdings(Bell())
        aside = AsideOwner(self._aside_log(group), holdings, group)
        membership = Membership(cluster, spec, holdings, aside, self._epochs)
        reader = LogReader(cluster, holdings, group=group, topics=spec.topics, displaced=membership.displaced)
        timeout_s = cluster.settings.publish_timeout_s
        return KafkaSubscription(membership, reader, aside, holdings, cluster.admin.client, timeout_s=timeout_s)

    def aside(self, group: str) -> KafkaAside:
        return KafkaAside(self._aside_log(group), self._cluster.topics)

    def _aside_log(self, group: str) -> AsideLog:
        if group not in self._aside_logs:
            self._aside_logs[group] = AsideLog(self._cluster, group)
        return self._aside_logs[group]

    async def declare(self, topology: Topology, *, apply: bool) -> Sequence[Change]:
        self._check_open()
        return await asyncio.to_thread(self._placement.declare, topology, apply=apply)

    async def topics(self) -> Sequence[TopicSpec]:
        self._check_open()
        return await asyncio.to_thread(self._cluster.topics.specs)

    async def groups(self, topic: str) -> Sequence[GroupInfo]:
        self._check_open()
        return await asyncio.to_thread(self._groups.of, topic)

    async def owners(self, topic: str, group: str) -> Sequence[MemberInfo]:
        self._check_open()
        return await asyncio.to_thread(self._groups.owners, topic, group)

    async def drop_group(self, topic: str, group: str) -> None:
        self._check_open()
        await asyncio.to_thread(self._drop_group, topic, group)

    def _drop_group(self, topic: str, group: str) -> None:
        self._groups.drop(topic, group)
        self._aside_log(group).delete(topic)

    async def drop_topic(self, topic: str) -> None:
        self._check_open()
        await asyncio.to_thread(self._drop_topic, topic)

    def _drop_topic(self, topic: str) -> None:
        groups = [*self._groups.unused(topic), *groups_of(topic, self._cluster.topics.counts())]
        for group in dict.fromkeys(groups):
            self._drop_group(topic, group)
        self._cluster.topics.delete(topic)
        self._placement.forget(topic)

    def figures(self) -> Sequence[Figure]:
        return ()

    async def diagnose(self) -> Sequence[Finding]:
        self._check_open()
        try:
            facts = await asyncio.to_thread(gather, self._cluster, self._groups)
        except BrokerError as error:
            return [Finding("error", str(error), "start Kafka, or correct the URL and the settings of the client")]
        return diagnose(facts, self._cluster.settings)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*[subscription.close() for subscription in self._subscriptions])
        await self._publisher.close()
        await asyncio.gather(*[close_in_time(aside.close) for aside in self._aside_logs.values()])

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the broker on {self._cluster.factory.servers} is closed")
