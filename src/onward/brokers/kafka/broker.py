"""The Kafka broker as the contract has it; the work is done by its publisher, memberships and readers."""

import asyncio
import itertools
import logging
from collections.abc import Sequence

from onward.brokers.base import Broker, Change, Features, GroupInfo, Ordering, Start, Topology
from onward.brokers.kafka.aside import KafkaAside
from onward.brokers.kafka.client import Client
from onward.brokers.kafka.groups import Groups
from onward.brokers.kafka.holdings import Holdings
from onward.brokers.kafka.letters import Letters, missing
from onward.brokers.kafka.membership import Enrolment, Membership
from onward.brokers.kafka.parting import parted
from onward.brokers.kafka.publisher import Publisher
from onward.brokers.kafka.reader import Reader
from onward.brokers.kafka.subscription import KafkaSubscription
from onward.brokers.kafka.topics import Catalogue, Cluster
from onward.brokers.kafka.warden import Warden
from onward.errors import BadSetting, Closed
from onward.event import Event
from onward.settings import Settings, check_name

log = logging.getLogger("onward")


def open_broker(url: str, settings: Settings) -> Broker:
    """The cluster that the URL names. Nothing is asked of it yet."""
    client = Client(url, settings)
    client.producer()  # a setting that cannot be is refused now, not when the first event is published
    return KafkaBroker(client, settings)


class KafkaBroker:
    def __init__(self, client: Client, settings: Settings) -> None:
        self.features = Features(
            stable_positions=True,
            fence=True,
            durability="replicated",
            aside=True,
            starts=frozenset({"earliest", "latest", "time"}),
        )
        self._client = client
        self._settings = settings
        self._catalogue = Catalogue(client, settings)
        self._groups = Groups(client, self._catalogue)
        self._publisher = Publisher(client, settings)
        self._letters: dict[str, Letters] = {}
        self._in_turn = asyncio.Lock()
        self._epochs = itertools.count(1)
        self._subscriptions: set[KafkaSubscription] = set()
        self._closed = False

    async def publish(self, events: Sequence[Event]) -> None:
        self._check_open()
        if not events:
            return
        topics = {event.topic for event in events}
        counts = self._counts(topics)
        if counts is None:
            self._publisher.warm()
        if counts is None or self._in_turn.locked():
            async with self._in_turn:  # calls take effect as they were entered, also while a topic is looked up
                counts = {name: (await self._catalogue.resolve(name)).partitions for name in topics}
                sent = self._enter(events, counts)
        else:
            sent = self._enter(events, counts)
        await sent

    def _enter(self, events: Sequence[Event], counts: dict[str, int]) -> "asyncio.Future[None]":
        return self._publisher.enter(self._publisher.pack(events, counts))

    def _counts(self, topics: set[str]) -> dict[str, int] | None:
        found = {name: self._catalogue.remembered(name) for name in topics}
        known = {name: topic.partitions for name, topic in found.items() if topic is not None}
        return known if len(known) == len(topics) else None

    async def subscribe(
        self, topics: Sequence[str], *, group: str, member: str, ordering: Ordering, start: Start
    ) -> KafkaSubscription:
        self._check_open()
        check_name("group", group)
        if not isinstance(start, int | float) and start not in ("earliest", "latest"):
            raise BadSetting(f"start={start!r}: use earliest, latest or a Unix time")
        for topic in dict.fromkeys(topics):
            await self._catalogue.resolve(topic)
            if not await asyncio.to_thread(self._of_group(group).prepare, topic):
                log.warning("Kafka: %s", missing(group, topic))
        holdings = Holdings()
        warden = Warden(self._of_group(group), holdings, group)
        cluster = Cluster(self._client, self._catalogue, self._settings)
        enrolment = Enrolment(group, member, list(dict.fromkeys(topics)), start)
        membership = Membership(cluster, enrolment, holdings, warden, self._epochs)
        reader = Reader(cluster, holdings, group=group, displaced=membership.displaced)
        subscription = KafkaSubscription(
            membership, reader, warden, holdings, self._catalogue.admin, timeout_s=self._settings.publish_timeout_s
        )
        self._subscriptions = {kept for kept in self._subscriptions if not kept.is_closed} | {subscription}
        return subscription

    def aside(self, group: str) -> KafkaAside:
        return KafkaAside(self._of_group(group), self._catalogue)

    def _of_group(self, group: str) -> Letters:
        if group not in self._letters:
            self._letters[group] = Letters(self._client, self._catalogue, self._settings, group)
        return self._letters[group]

    async def declare(self, topology: Topology, *, apply: bool) -> Sequence[Change]:
        self._check_open()
        return await asyncio.to_thread(self._catalogue.declare, topology.topics, apply=apply)

    async def groups(self, topic: str) -> Sequence[GroupInfo]:
        self._check_open()
        return await asyncio.to_thread(self._groups.of, topic)

    async def drop_group(self, topic: str, group: str) -> None:
        self._check_open()
        await asyncio.to_thread(self._groups.drop, topic, group)
        await asyncio.to_thread(self._of_group(group).delete, topic)

    async def drop_topic(self, topic: str) -> None:
        """Delete the topic and what is in it."""
        self._check_open()
        await asyncio.to_thread(self._catalogue.delete, topic)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*[subscription.close() for subscription in self._subscriptions])
        await self._publisher.close()
        await asyncio.gather(*[parted(letters.close) for letters in self._letters.values()])

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the broker on {self._client.servers} is closed")
