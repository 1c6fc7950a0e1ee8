"""Which topics and groups exist: the entries of the registry, and what follows from all of them. Pure.

The registry is a stream that every process of a virtual host reads. The order of its entries decides: of two processes
that create a topic at the same time, the first entry counts.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from onward.brokers.rabbitmq.names import Place

GroupKind = Literal["ordered", "work"]
TopicState = Literal["created", "ready", "dropping"]

# RabbitMQ 3.10 writes a declaration to disk some 2 s later. If the node dies before that, the stream is gone.
SETTLED_S = 5.0
FORGOTTEN_S = 60.0  # as long as a node may take to start again, and clocks of machines may differ


class TopicEntry(msgspec.Struct, frozen=True):
    """A topic.

    - `log_id` names this life of it. A topic that was dropped and created again has another.
    - `arguments`: of its streams, and `exchange_arguments`, so that all processes declare them alike.
    - `made_at`: when all its streams existed. None: they never did, so no event was published, and any process creates
      what is missing.
    - `created`: the server may still forget its streams. `ready`: they exist, and a missing one is an error.
      `dropping`: they are being deleted."""

    name: str
    partitions: int
    log_id: str
    arguments: Mapping[str, Any]
    exchange_arguments: Mapping[str, Any] = {}
    created_at: float = 0.0  # Unix time
    state: TopicState = "created"
    made_at: float | None = None  # Unix time

    def is_settled(self, now: float) -> bool:
        """Whether its streams were written to disk, so the server does not forget them. `now`: Unix time."""
        return self.state == "ready" or (self.made_at is not None and abs(now - self.made_at) > SETTLED_S)

    def may_lack_streams(self, now: float) -> bool:
        """Whether a missing stream is created. Otherwise it was deleted, and creating it would hide that its events are
        gone. `now`: Unix time.

        One case remains: a stream that is deleted in the first minute, before a process has marked the topic as ready,
        looks like one that a killed server has forgotten."""
        return self.state == "created" and (self.made_at is None or abs(now - self.made_at) < FORGOTTEN_S)


class GroupEntry(msgspec.Struct, frozen=True):
    """A group. `fence_floor`: the highest fence of a former group of this name. `routes`: the bindings that its work
    queue may have."""

    topic: str
    group: str
    kind: GroupKind
    fence_floor: int = 0
    routes: tuple[str, ...] = ()


class Founded(msgspec.Struct, frozen=True, tag="founded"):
    """Only says that the registry exists, so that it is never empty."""


class TopicCreated(msgspec.Struct, frozen=True, tag="topic created"):
    name: str
    partitions: int
    log_id: str
    arguments: dict[str, Any]
    exchange_arguments: dict[str, Any]
    at: float


class TopicMade(msgspec.Struct, frozen=True, tag="topic made"):
    """All streams of the topic exist, for the first time."""

    name: str
    log_id: str
    at: float


class TopicChanged(msgspec.Struct, frozen=True, tag="topic changed"):
    """`to`: dropped, when everything of it is deleted."""

    name: str
    log_id: str
    to: Literal["ready", "dropping", "dropped"]


class GroupAdded(msgspec.Struct, frozen=True, tag="group added"):
    topic: str
    group: str
    kind: GroupKind


class GroupRouted(msgspec.Struct, frozen=True, tag="group routed"):
    topic: str
    group: str
    routes: tuple[str, ...]


class GroupRemoved(msgspec.Struct, frozen=True, tag="group removed"):
    topic: str
    group: str
    fence: int


class GenerationSet(msgspec.Struct, frozen=True, tag="generation"):
    topic: str
    group: str
    place: Place
    generation: int


RegistryEntry = (
    Founded | TopicCreated | TopicMade | TopicChanged | GroupAdded | GroupRouted | GroupRemoved | GenerationSet
)  # a process ignores entries of a later version that it does not know

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[RegistryEntry] = msgspec.msgpack.Decoder(RegistryEntry)


def encoded(entry: RegistryEntry) -> bytes:
    return _encode(entry)


def decoded(body: bytes) -> RegistryEntry | None:
    """None: it is of a later version, or not ours."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class RegistryFold:
    def __init__(self) -> None:
        self.topics: dict[str, TopicEntry] = {}
        self._groups: dict[str, dict[str, GroupEntry]] = {}  # by topic
        self._floors: dict[tuple[str, str], int] = {}
        self._generations: dict[tuple[str, str], dict[Place, int]] = {}
        self._least_generation: dict[tuple[str, str], int] = {}  # of a group whose former life used lower ones

    def groups(self, topic: str) -> dict[str, GroupEntry]:
        return dict(self._groups.get(topic, {}))

    def names_with_groups(self) -> set[str]:
        """The topics that have a group. Exchanges of other programs are among them."""
        return {topic for topic, groups in self._groups.copy().items() if groups}

    def topics_of(self, group: str) -> list[str]:
        """The topics in which the group exists."""
        return sorted(topic for topic, groups in self._groups.copy().items() if group in groups)

    def fence_floor(self, topic: str, group: str) -> int:
        """The highest fence of a former group of this name."""
        return self._floors.get((topic, group), 0)

    def generation(self, topic: str, group: str, place: Place) -> int:
        least = self._least_generation.get((topic, group), 0)
        return max(least, self._generations.get((topic, group), {}).get(place, 0))

    def apply(self, entry: RegistryEntry) -> None:
        match entry:
            case TopicCreated():
                if entry.name not in self.topics:
                    facts = entry.arguments, entry.exchange_arguments, entry.at
                    self.topics[entry.name] = TopicEntry(entry.name, entry.partitions, entry.log_id, *facts)
            case TopicMade():
                known = self.topics.get(entry.name)
                if known is not None and known.log_id == entry.log_id and known.made_at is None:
                    self.topics[entry.name] = msgspec.structs.replace(known, made_at=entry.at)
            case TopicChanged():
                self._change(entry)
            case GroupAdded():
                self._add(entry)
            case GroupRouted():
                if (group := self._groups.get(entry.topic, {}).get(entry.group)) is not None:
                    routed = msgspec.structs.replace(group, routes=entry.routes)
                    self._groups[entry.topic][entry.group] = routed
            case GroupRemoved():
                self._remove(entry.topic, entry.group, entry.fence)
            case GenerationSet():
                places = self._generations.setdefault((entry.topic, entry.group), {})
                places[entry.place] = max(places.get(entry.place, 0), entry.generation)

    def _change(self, entry: TopicChanged) -> None:
        """An entry about a former life of the topic has no effect."""
        known = self.topics.get(entry.name)
        if known is None or known.log_id != entry.log_id:
            return
        if entry.to == "dropped":
            del self.topics[entry.name]
            for group in self.groups(entry.name):
                self._remove(entry.name, group, 0)
        elif entry.to == "dropping" or known.state == "created":
            self.topics[entry.name] = msgspec.structs.replace(known, state=entry.to)

    def _add(self, entry: GroupAdded) -> None:
        groups = self._groups.setdefault(entry.topic, {})
        if entry.group not in groups:
            floor = self._floors.get((entry.topic, entry.group), 0)
            groups[entry.group] = GroupEntry(entry.topic, entry.group, entry.kind, floor)

    def _remove(self, topic: str, group: str, fence: int) -> None:
        """A later group of this name starts above the fences of this one, and reads none of its asides."""
        name = topic, group
        if (known := self._groups.get(topic, {}).pop(group, None)) is not None:
            fence = max(fence, known.fence_floor)
        self._floors[name] = max(fence, self._floors.get(name, 0))
        used = max([self._least_generation.get(name, 0), *self._generations.pop(name, {}).values()])
        self._least_generation[name] = used + 2  # a rewriting that was interrupted may have created the next one
