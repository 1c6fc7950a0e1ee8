"""Publishing: the caller's thread packs events by partition, and the writer appends those of many calls at once."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from onward.brokers.base import Relay
from onward.brokers.core.partitioner import key_hashes
from onward.brokers.core.publishing import BEHIND, Key
from onward.brokers.sqlite import log
from onward.brokers.sqlite.backlog import Backlog
from onward.brokers.sqlite.database import Database
from onward.brokers.sqlite.log import Pack, Tail
from onward.brokers.sqlite.topics import Catalogue, Topic
from onward.errors import Backlogged, BrokerError, OnwardError, PublishError, RelayFenced, TooLarge, Unserialisable
from onward.event import Event

_SLICE_EVENTS = 1_000
_SLICE_BYTES = 4 << 20  # a larger call is split over several transactions, so that each of them is short
_SEEN = "SELECT fence FROM onward_relay WHERE shard = ?"
_SEE = "INSERT OR REPLACE INTO onward_relay (shard, fence) VALUES (?, ?)"


class TopicLoad(msgspec.Struct):
    """The events of a parcel for one topic, spread over the number of partitions that its publisher expected."""

    partitions: int
    packs: list[tuple[int, Pack]]  # each with its partition index
    size: int


class Bundle:
    """Packed events. Either all of them are appended or none."""

    __slots__ = ("_lanes", "events", "relay", "size", "topics")

    def __init__(self, events: Sequence[Event], topics: Mapping[str, TopicLoad]) -> None:
        self.events = events
        self.topics = topics
        self.relay: Relay | None = None
        self._lanes: frozenset[Key] | None = None
        self.size = sum(load.size for load in topics.values())

    @property
    def lanes(self) -> frozenset[Key]:
        """The topics and keys of its events. Needed only after a failure."""
        if self._lanes is None:
            self._lanes = frozenset((event.topic, event.key) for event in self.events if event.key is not None)
        return self._lanes


class Parcel(Bundle):
    """A publish call, or a slice of one, in the writer's queue."""

    __slots__ = ("answered", "future", "loop")

    def __init__(self, bundle: Bundle, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(bundle.events, bundle.topics)
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.answered = False  # the caller has its answer, or no longer waits for it


AnyBundle = TypeVar("AnyBundle", bound=Bundle)


class Packer:
    """Encodes events as record batches. It decodes each batch again, so every stored batch is readable."""

    def __init__(self, catalogue: Catalogue, max_event_bytes: int) -> None:
        self.catalogue = catalogue
        self._max_event_bytes = max_event_bytes
        self._spread = itertools.count()

    def bundles(self, events: Sequence[Event]) -> list[Bundle]:
        """Pack the events of a call, in slices. Raises PayloadError before anything is written."""
        slices = [events[at : at + _SLICE_EVENTS] for at in range(0, len(events), _SLICE_EVENTS)]
        return [bundle for part in slices for bundle in self._cut(part)]

    def _cut(self, events: Sequence[Event]) -> list[Bundle]:
        bundle = Bundle(events, self.pack(events))
        if bundle.size <= _SLICE_BYTES or len(events) == 1:
            return [bundle]
        half = len(events) // 2
        return self._cut(events[:half]) + self._cut(events[half:])

    def pack(self, events: Sequence[Event]) -> dict[str, TopicLoad]:
        try:
            return {topic: self._load(lists) for topic, lists in self._sorted(events).items()}
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise Unserialisable(_unstorable(events, error)) from error

    def _sorted(self, events: Sequence[Event]) -> dict[str, list[list[Event]]]:
        """The events by topic and partition. All events without a key of one call go to the same partition, so that
        batches stay large."""
        topics: dict[str, list[list[Event]]] = {}
        hashes = key_hashes
        keyless = next(self._spread)
        name, lists, partitions = "", [], 1
        for event in events:
            if event.topic != name:
                name = event.topic
                if name not in topics:
                    topics[name] = [[] for _ in range(self.catalogue.expected(name))]
                lists = topics[name]
                partitions = len(lists)
            key = event.key
            lists[(keyless if key is None else hashes[key]) % partitions].append(event)
        return topics

    def _load(self, lists: list[list[Event]]) -> TopicLoad:
        packs = [(index, pack) for index, events in enumerate(lists) if events for pack in self._encoded(events)]
        return TopicLoad(len(lists), packs, sum([len(pack.data) for _, pack in packs]))

    def _encoded(self, events: list[Event]) -> list[Pack]:
        data = log.encode(events)
        if len(data) > log.ROW_BYTES and len(events) > 1:
            half = len(events) // 2
            return self._encoded(events[:half]) + self._encoded(events[half:])
        if len(data) > self._max_event_bytes:
            self._check_sizes(events)
        log.decode(data)
        return [Pack(len(events), data)]

    def _check_sizes(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.size > self._max_event_bytes:
                raise TooLarge(
                    f"event {event.id} has {event.size} bytes, max_event_bytes is {self._max_event_bytes}; "
                    "store the value elsewhere and publish a reference, or raise the limit"
                )


def _unstorable(events: Sequence[Event], error: Exception) -> str:
    """Which event cannot be stored and, if it is known, which part of it."""
    for event in events:
        texts = {
            "key": event.key,
            "type": event.type,
            **{f"header {name!r}": f"{name}{event.headers[name]}" for name in event.headers},
        }
        for what, text in texts.items():
            if isinstance(text, str) and any("\ud800" <= char <= "\udfff" for char in text):
                return f"an event for topic {event.topic!r} cannot be stored: its {what} holds half a surrogate pair"
    return f"an event cannot be stored: {error}; the value must be bytes, and headers must map str to str"


class Shipment:
    """The bundles of one transaction, sorted by their partitions."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.topics: dict[str, tuple[Topic, int]] = {}  # with the bytes ever appended before this transaction
        self.sizes: dict[str, int] = {}
        self.packs: dict[str, dict[int, list[Pack]]] = {}  # by topic and partition id
        self.closed: set[Key] = set()  # the keys of refused bundles: later bundles with one of them are refused too

    def add(self, topic: Topic, load: TopicLoad) -> None:
        self.sizes[topic.name] = self.sizes.get(topic.name, 0) + load.size
        parts = self.packs.setdefault(topic.name, {})
        for index, pack in load.packs:
            parts.setdefault(topic.parts[index], []).append(pack)


class Appended(NamedTuple, Generic[AnyBundle]):
    refused: dict[AnyBundle, OnwardError]  # each with the reason
    parts: list[int]  # the ids of the partitions that got events
    totals: dict[str, int]  # by log id: all bytes ever appended to its topic


class Appender:
    """Appends bundles inside a transaction, in this order. It remembers the ends of partitions for the next call, so
    `forget` must follow a transaction that was rolled back."""

    def __init__(self, catalogue: Catalogue, packer: Packer, backlog: Backlog) -> None:
        self._catalogue = catalogue
        self._packer = packer
        self._backlog = backlog
        self._tails: dict[int, tuple[int, dict[int, Tail]]] = {}  # by topic: its total, and the ends of its partitions

    def append(self, db: Database, bundles: Sequence[AnyBundle], wall: float) -> Appended[AnyBundle]:
        refused: dict[AnyBundle, OnwardError] = {}
        shipment = Shipment(db)
        for bundle in bundles:
            try:
                for topic, load in self._admitted(shipment, bundle):
                    shipment.add(topic, load)
            except OnwardError as error:
                refused[bundle] = error
                shipment.closed |= bundle.lanes
        totals = {}
        for name, packs in shipment.packs.items():
            topic, total = shipment.topics[name]
            totals[topic.log_id] = self._write(db, topic, total, packs, wall)
        return Appended(refused, [part for packs in shipment.packs.values() for part in packs], totals)

    def forget(self) -> None:
        """Forget everything that was remembered of a transaction, because it was rolled back."""
        self._catalogue.forget()
        self._backlog.forget()
        self._tails.clear()

    def _admitted(self, shipment: Shipment, bundle: Bundle) -> list[tuple[Topic, TopicLoad]]:
        """The bundle's events for each topic. All checks are done before any event is added."""
        if shipment.closed and not shipment.closed.isdisjoint(bundle.lanes):
            raise PublishError(BEHIND.why, refused=bundle.events)
        if bundle.relay is not None:
            _check_relay(shipment.db, bundle.relay, bundle.events)
        loads = []
        for name, load in bundle.topics.items():
            topic, appended = self._resolved(shipment, name, bundle)
            if load.partitions != len(topic.parts):
                load = self._packer.pack([event for event in bundle.events if event.topic == name])[name]
            if self._backlog.is_over(shipment.db, topic, appended + shipment.sizes.get(name, 0) + load.size):
                raise Backlogged(self._backlog.complaint(shipment.db, topic), refused=bundle.events)
            loads.append((topic, load))
        return loads

    def _resolved(self, shipment: Shipment, name: str, bundle: Bundle) -> tuple[Topic, int]:
        if name not in shipment.topics:
            try:
                shipment.topics[name] = self._catalogue.resolve(shipment.db, name)
            except BrokerError as error:
                raise PublishError(str(error), refused=bundle.events) from error
        return shipment.topics[name]

    def _write(self, db: Database, topic: Topic, total: int, packs: Mapping[int, Sequence[Pack]], wall: float) -> int:
        """Append to the log. Returns the topic's new total."""
        remembered, tails = self._tails.get(topic.id, (-1, {}))
        # Every append changes the topic's total. If the total is the same, the remembered tails are still right.
        if remembered != total or len(tails) != len(topic.parts):
            tails = log.tails(db, topic.id)
        total += log.append(db, packs, tails, wall)
        db.execute("UPDATE onward_topic SET bytes = ? WHERE id = ?", (total, topic.id))
        self._tails[topic.id] = (total, tails)
        return total


def _check_relay(db: Database, relay: Relay, events: Sequence[Event]) -> None:
    shard, fence = relay
    row = db.execute(_SEEN, (shard,)).fetchone()
    if row is not None and row[0] > fence:
        raise RelayFenced(
            f"outbox shard {shard} belongs to a relay with fence {row[0]}; this relay has fence {fence} and has lost "
            "its lease",
            refused=events,
            seen=row[0],
        )
    if row is None or row[0] < fence:
        db.execute(_SEE, (shard, fence))


def combined(failures: Sequence[tuple[Parcel, Exception]]) -> Exception:
    """One error for a call that was written in several slices."""
    first = failures[0][1]
    if len(failures) == 1:
        return first
    refused: list[Event] = []
    unknown: list[Event] = []
    for parcel, error in failures:
        refused += error.refused if isinstance(error, PublishError) else parcel.events
        unknown += error.unknown if isinstance(error, PublishError) else ()
    if isinstance(first, RelayFenced):
        return RelayFenced(str(first), refused=refused, unknown=unknown, seen=first.seen)
    kind = type(first) if isinstance(first, PublishError) else PublishError
    return kind(str(first), refused=refused, unknown=unknown)
