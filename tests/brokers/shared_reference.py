"""A reference broker in memory that has only shared partitions. It is the smallest broker that the contract allows.

It proves that the scenarios of `onward.testing.shared` can pass. test_shared_defects.py breaks it to prove that each of
them can fail. A `Store` is the state of the server. Its methods take and return plain values, so that other processes
can call them too. A topic has one partition without history: a group gets the events that are published after its first
member joined.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from onward.brokers.base import (
    AsideRecord,
    Asks,
    Assigned,
    BrokerLag,
    Change,
    Count,
    Features,
    Fenced,
    Figure,
    Filter,
    Finding,
    GroupInfo,
    MemberInfo,
    Message,
    Ordering,
    Page,
    Progress,
    Relay,
    Standing,
    Start,
    State,
    Supervised,
    TopicSpec,
    Topology,
    Tries,
)
from onward.brokers.core.asides import matches, mentions, oldest
from onward.clock import now
from onward.errors import BadSetting, BrokerError, Closed
from onward.event import Delivery, Event, Partition
from onward.settings import Settings

POLL_S = 0.005


class Item(msgspec.Struct, frozen=True):
    event: Event
    tries: Tries | None = None  # only for a retry


class Channel(msgspec.Struct):
    """One ownership, with the events that were delivered to it and are not settled."""

    topic: str
    group: str
    member: str
    gap_s: float
    seen: float
    open: dict[int, Item] = {}
    given: int = 0


class Store:
    def __init__(self) -> None:
        self.queues: dict[tuple[str, str], deque[Item]] = {}  # by topic and group
        self.channels: dict[str, Channel] = {}  # by log id
        self.records: dict[str, AsideRecord] = {}  # by id, for all groups

    def publish(self, events: Sequence[Event]) -> None:
        for event in events:
            for (topic, _), queue in self.queues.items():
                if topic == event.topic:
                    queue.append(Item(event))

    def join(self, topic: str, group: str) -> None:
        self.queues.setdefault((topic, group), deque())

    def open(self, topic: str, group: str, member: str, gap_s: float) -> str:
        """Open a new channel, and return its log id."""
        log_id = uuid4().hex
        self.channels[log_id] = Channel(topic, group, member, gap_s, now())
        return log_id

    def take(self, log_id: str, limit: int, max_bytes: int) -> list[tuple[int, Item]] | None:
        """Deliver events, each with its position. None if the channel is closed. Each call renews the channel."""
        channel = self._live(log_id)
        if channel is None:
            return None
        channel.seen = now()
        self.ripen(time.time())
        return list(self.give(channel, limit, max_bytes))

    def give(self, channel: Channel, limit: int, max_bytes: int) -> Iterator[tuple[int, Item]]:
        queue = self.queues[channel.topic, channel.group]
        room = max_bytes
        for number in range(limit):
            if not queue or (number and queue[0].event.size > room):
                return
            item = queue.popleft()
            room -= item.event.size
            channel.given += 1
            channel.open[channel.given] = item
            yield channel.given, item

    def ripen(self, wall: float) -> None:
        """Put the waiting records that are due into the queues of their groups."""
        for record in list(self.records.values()):
            if record.state is State.WAITING and (record.due or 0.0) <= wall:
                del self.records[record.id]
                self.queues[record.partition.topic, record.group].append(Item(record.event, record.tries))

    def settle(self, log_id: str, progress: Sequence[Progress], aside: Sequence[AsideRecord]) -> bool:
        """Store what is done. False if the channel is closed; then nothing was stored."""
        channel = self._live(log_id)
        if channel is None:
            return False
        for record in aside:
            if record.position in channel.open:  # otherwise an earlier call has stored it
                self.set_aside(record)
        for position in (position for each in progress for position in each.fresh):
            channel.open.pop(position, None)
        return True

    def set_aside(self, record: AsideRecord) -> None:
        if record.due is not None and record.wait_s is not None:
            record = msgspec.structs.replace(record, due=min(record.due, time.time() + record.wait_s))
        self.records[record.id] = record

    def close(self, log_id: str) -> None:
        """Close the channel. Its unsettled events go to another channel."""
        channel = self.channels.pop(log_id, None)
        if channel is not None and (channel.topic, channel.group) in self.queues:
            self.queues[channel.topic, channel.group].extendleft(reversed(channel.open.values()))

    def depth(self, topic: str, group: str) -> int:
        return len(self.queues[topic, group])

    def members(self) -> list[tuple[str, str, str]]:
        """The topic, group and name of each member."""
        self._expire()
        return [(each.topic, each.group, each.member) for each in self.channels.values()]

    def groups(self, topic: str) -> list[str]:
        return [group for known, group in self.queues if known == topic]

    def drop(self, topic: str, group: str) -> None:
        self.queues.pop((topic, group), None)
        for record in self.found(group, Filter(topic=topic)):
            del self.records[record.id]

    def found(self, group: str, where: Filter) -> list[AsideRecord]:
        """The matching records, sorted by id."""
        chosen = [record for record in self.records.values() if record.group == group and _fits(record, where)]
        return sorted(chosen, key=lambda record: record.id)

    def move(self, ids: Sequence[str], expect: State, to: State, due: float | None) -> int:
        chosen = self._expected(ids, expect)
        self.records |= {record.id: record.moved(to, due) for record in chosen}
        return len(chosen)

    def remove(self, ids: Sequence[str], expect: State) -> int:
        chosen = self._expected(ids, expect)
        for record in chosen:
            del self.records[record.id]
        return len(chosen)

    def _expected(self, ids: Sequence[str], expect: State) -> list[AsideRecord]:
        found = [self.records.get(id_) for id_ in dict.fromkeys(ids)]
        return [record for record in found if record is not None and record.state is expect]

    def _live(self, log_id: str) -> Channel | None:
        self._expire()
        return self.channels.get(log_id)

    def _expire(self) -> None:
        for log_id, channel in list(self.channels.items()):
            if now() > channel.seen + channel.gap_s:
                self.close(log_id)


class ReferenceSubscription:
    def __init__(self, store: Store, epochs: Iterator[int], place: tuple[str, str, str], gap_s: float) -> None:
        self.store = store
        self.partition = Partition(place[0], 0)
        self.own: Assigned | None = None  # the Assigned that was reported
        self.paused = False
        self._epochs = epochs
        self._place = place
        self._gap_s = gap_s
        self._sure_until = 0.0
        self._left = False
        self._closed = asyncio.Event()

    async def receive(self, limit: int, max_bytes: int, wait_s: float) -> Sequence[Message]:
        if self._closed.is_set():
            raise Closed("the subscription is closed")
        end = now() + wait_s
        await asyncio.sleep(0)  # let other members run
        while True:
            messages = self.collect(limit, max_bytes)
            if messages or now() >= end or self._closed.is_set():
                return messages
            await asyncio.sleep(POLL_S)

    def collect(self, limit: int, max_bytes: int) -> list[Message]:
        if self._left:
            return []
        if self.own is None:
            self.own = self.assign()
            return [self.own]
        own, asked_at = self.own, now()
        taken = self.store.take(own.log_id, 0 if self.paused else limit, max_bytes)
        if taken is None:
            self.own = None
            return [Fenced([self.partition])]
        self._sure_until = asked_at + self._gap_s
        return [self.delivery(own, position, item) for position, item in taken]

    def assign(self) -> Assigned:
        log_id = self.store.open(*self._place, self._gap_s)
        return Assigned(self.partition, next(self._epochs), None, log_id, None, False, shared=True)

    def delivery(self, own: Assigned, position: int, item: Item) -> Delivery:
        return Delivery(item.event, self.partition, position, own.epoch, log_id=own.log_id, tries=item.tries)

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        assert not gone, "a waiting record is delivered again, so there is none to remove"
        if self.own is None or any(each.epoch != self.own.epoch for each in progress):
            return [self.partition]
        return [] if self.store.settle(self.own.log_id, list(progress), list(aside)) else [self.partition]

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        if self.partition in partitions and self.own is not None:
            self._left = True
            self._end()

    def troubles(self) -> Sequence[str]:
        return ()

    def sure_until(self) -> float:
        return self._sure_until if self.own is not None else 0.0

    async def pause(self, partitions: Sequence[Partition]) -> None:
        self.paused = self.paused or self.partition in partitions

    async def resume(self, partitions: Sequence[Partition]) -> None:
        self.paused = self.paused and self.partition not in partitions

    async def lag(self) -> dict[Partition, BrokerLag]:
        if self.own is None:
            return {}
        return {self.partition: BrokerLag(self.store.depth(*self._place[:2]), None)}

    async def close(self) -> None:
        self._closed.set()
        self._left = True
        self._end()

    def _end(self) -> None:
        if self.own is not None:
            self.store.close(self.own.log_id)
            self.own = None


class ReferenceAside:
    def __init__(self, store: Store, group: str) -> None:
        self._store = store
        self._group = group

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        raise AssertionError(f"{partition} is shared: its records are not loaded")

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        found = [record for record in self._store.found(self._group, where) if after is None or record.id > after]
        return Page(found[:limit], found[limit - 1].id if len(found) > limit else None)

    async def count(self, where: Filter) -> Count:
        found = self._store.found(self._group, where)
        return Count(len(found), oldest(map(_Row, found)))

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        return self._store.move(list(ids), expect, to, due)

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        return self._store.remove(list(ids), expect)


class ReferenceBroker:
    features = Features(
        stable_positions=False,
        fence=False,
        durability="memory",
        aside=True,
        starts=frozenset({"latest"}),
        shared=True,
    )

    subscription = ReferenceSubscription

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._gap_s = settings.max_poll_gap_s
        self._subscriptions: list[ReferenceSubscription] = []
        self._epochs = itertools.count(1)

    async def publish(self, events: Sequence[Event], *, relay: Relay | None = None) -> None:
        self._store.publish(list(events))

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
    ) -> ReferenceSubscription:
        self.check(ordering)
        (topic,) = topics
        self._store.join(topic, group)
        subscription = self.subscription(self._store, self._epochs, (topic, group, member), self._gap_s)
        self._subscriptions.append(subscription)
        return subscription

    def check(self, ordering: Ordering) -> None:
        if ordering != "none":
            raise BadSetting(f"ordering={ordering!r}: the reference broker has shared partitions only; use 'none'")

    def aside(self, group: str) -> ReferenceAside:
        return ReferenceAside(self._store, group)

    async def declare(self, topology: Topology, *, apply: bool) -> Sequence[Change]:
        missing = [spec for spec in topology.groups if spec.group not in self._store.groups(spec.topic)]
        for spec in missing if apply else ():
            self._store.join(spec.topic, spec.group)
        whats = [f"group {spec.group} of topic {spec.topic}" for spec in missing]
        return [Change(what, "create", f"create {what}") for what in whats]

    async def topics(self) -> Sequence[TopicSpec]:
        raise NotImplementedError

    async def groups(self, topic: str) -> Sequence[GroupInfo]:
        members = self._store.members()
        return [
            GroupInfo(group, topic, self._alive(members, topic, group), {0: Standing(0, None, None, None)})
            for group in self._store.groups(topic)
        ]

    async def owners(self, topic: str, group: str) -> Sequence[MemberInfo]:
        return self._alive(self._store.members(), topic, group)

    async def drop_group(self, topic: str, group: str) -> None:
        if self._alive(self._store.members(), topic, group):
            raise BrokerError(f"group {group} has members; stop them first")
        self._store.drop(topic, group)

    async def drop_topic(self, topic: str) -> None:
        for group in self._store.groups(topic):
            await self.drop_group(topic, group)

    def figures(self) -> Sequence[Figure]:
        return ()

    async def diagnose(self) -> Sequence[Finding]:
        return ()

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()

    @staticmethod
    def _alive(members: Sequence[tuple[str, str, str]], topic: str, group: str) -> list[MemberInfo]:
        return [MemberInfo.parse(name) for *place, name in members if place == [topic, group]]


class _Row:
    """A record as a filter sees it."""

    def __init__(self, record: AsideRecord) -> None:
        self.state = record.state
        self.key = record.event.key
        self.error = record.failure.error if record.failure else None
        self.failed_at = record.failure.last if record.failure else None
        self.size = record.event.size


def _fits(record: AsideRecord, where: Filter) -> bool:
    if where.topic not in (None, record.partition.topic) or not matches(_Row(record), where):
        return False
    return where.text is None or mentions(record, where.text)
