"""The asides of a broker: those that its members own, and those that an operator reads."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from onward.brokers.base import AsideRecord, Count, Filter, Page, State
from onward.brokers.core.aside_pages import AsideScan, by_partition, count, divided, loadable
from onward.brokers.core.asides import RecordPlace, fitting
from onward.brokers.core.folded_aside import BodyRoom, MoveRequest
from onward.brokers.rabbitmq.amqp import AmqpError, Connection, ConnectionLost
from onward.brokers.rabbitmq.aside.aside_entries import AsidePlace
from onward.brokers.rabbitmq.aside.aside_log import AsideStream
from onward.brokers.rabbitmq.aside.aside_reader import AsideMissing, AsideSource
from onward.brokers.rabbitmq.aside.aside_writing import EntryChannel
from onward.brokers.rabbitmq.aside.passing_aside import PassingAside
from onward.brokers.rabbitmq.connecting import reconnecting
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.names import Place
from onward.brokers.rabbitmq.server_errors import is_interrupted
from onward.errors import BrokerError
from onward.event import Partition

__all__ = ["AsidePlace", "RabbitAside", "RabbitAsides"]

T = TypeVar("T")

_TRIES = 3  # of a call whose stream is deleted meanwhile
_AT_ONCE = 16  # asides that are read at the same time
_MOST_IDS = 10_000  # in one request
_OTHER_GENERATIONS = range(-2, 2)  # streams that a rewriting may have left, beside the registered one

AnyAside = AsideStream | PassingAside
AnAside = TypeVar("AnAside", AsideStream, PassingAside)
Asides = dict[Partition, AnyAside]


class RabbitAsides:
    """The asides of one broker object. Except for `of`, everything runs in the loop of the I/O thread.

    Bodies use at most `max_in_flight_bytes` over all tables."""

    def __init__(self, ground: RabbitGround) -> None:
        self._ground = ground
        self._room = BodyRoom(ground.settings.max_in_flight_bytes)
        self._owned: dict[AsidePlace, list[AnyAside]] = {}  # of members that own the place, or want to
        self._followed: dict[AsidePlace, AsideStream] = {}
        self._channels: dict[Connection, EntryChannel] = {}
        self._opening: dict[AsidePlace, asyncio.Lock] = {}

    def of(self, group: str) -> "RabbitAside":
        return RabbitAside(self._ground, self, group)

    # -- members --------------------------------------------------------------------------------------------------

    def owned(self, connection: Connection, place: AsidePlace) -> AsideStream:
        """For the owner of the place, or the mover of a work group. The caller closes it."""
        return self._noted(self._stream(connection, place))

    def letters(self, connection: Connection, place: AsidePlace) -> AsideStream:
        """For a member of a work group, which only stores dead letters. It keeps no records in memory. The caller
        closes it."""
        return self._stream(connection, place, keeps_rows=False)

    def passing(self, place: AsidePlace) -> PassingAside:
        """For a member of a temporary group. Nothing is stored at the server."""
        return self._noted(PassingAside(place))

    def _noted(self, aside: AnAside) -> AnAside:
        living: list[AnyAside] = [each for each in self._owned.get(aside.place, ()) if not each.is_closed]
        self._owned[aside.place] = [*living, aside]
        return aside

    def _stream(self, connection: Connection, place: AsidePlace, *, keeps_rows: bool = True) -> AsideStream:
        self._channels = {each: channel for each, channel in self._channels.items() if not each.is_closed}
        channel = self._channels.setdefault(connection, EntryChannel(connection))
        source = AsideSource(connection, self._ground.registry, place, self._room, self._lock(place), keeps_rows)
        return AsideStream(source, channel)

    def _lock(self, place: AsidePlace) -> asyncio.Lock:
        return self._opening.setdefault(place, asyncio.Lock())

    # -- operators ------------------------------------------------------------------------------------------------

    def places(self, group: str, topic: str | None = None) -> dict[Partition, AsidePlace]:
        """Where the group may have records. A work group has one place in each topic."""
        registry = self._ground.registry
        found: dict[Partition, AsidePlace] = {}
        for name in registry.group_topics(group) if topic is None else [topic]:
            known, entry = registry.groups(name).get(group), registry.topic(name)
            if known is not None and known.kind == "work":
                found[Partition(name, 0)] = AsidePlace(name, group, "work")
            elif known is not None and entry is not None:
                found |= {Partition(name, index): AsidePlace(name, group, index) for index in range(entry.partitions)}
        for place in self._owned:
            is_passing = isinstance(self.owned_by_us(place), PassingAside) and isinstance(place.place, int)
            if is_passing and place.group == group and topic in (None, place.topic):
                found[Partition(place.topic, int(place.place))] = place
        return found

    def owned_by_us(self, place: AsidePlace) -> AnyAside | None:
        """The aside of a member of this process that owns the place, or owned it last and still reads it."""
        claimed = [each for each in self._owned.get(place, ()) if each.is_claimed and not each.is_closed]
        return max(claimed, key=lambda aside: aside.fence_seen, default=None)

    async def reading(self, places: Mapping[Partition, AsidePlace]) -> Asides:
        """Those of them that have an aside, read up to now. BrokerError: one cannot be read."""
        some = asyncio.Semaphore(_AT_ONCE)

        async def read(place: AsidePlace) -> AnyAside | None:
            async with some:
                return await self.caught_up(place)

        found = await asyncio.gather(*(read(place) for place in places.values()))
        return {each: aside for each, aside in zip(places, found, strict=True) if aside is not None}

    async def caught_up(self, place: AsidePlace) -> AnyAside | None:
        """None: the place has no records. BrokerError: it cannot be read."""
        try:
            return await reconnecting(partial(self._caught_up, place))
        except (AmqpError, BrokerError) as error:
            raise BrokerError(f"RabbitMQ: {place} cannot be read: {error}") from error

    async def _caught_up(self, place: AsidePlace) -> AnyAside | None:
        for left in reversed(range(_TRIES)):
            try:
                aside = self.owned_by_us(place) or await self._follow(place)
                if aside is not None:
                    await aside.catch_up()
                return aside
            except (AmqpError, BrokerError) as error:
                if not left or is_interrupted(error):
                    raise
                await self._ground.registry.catch_up()
        raise AssertionError("the last try returns or raises")

    async def _follow(self, place: AsidePlace) -> AsideStream | None:
        async with self._lock(place):
            known = self._followed.get(place)
            if known is not None and not known.is_closed:
                return known
            if known is not None:
                del self._followed[place]
                await known.close()
            generation = self._ground.registry.generation(*place)
            stream = self._stream(await self._ground.query(), place)
            try:
                await stream.follow()
            except AsideMissing:
                await self._ground.registry.catch_up()
                if self._ground.registry.generation(*place) != generation:
                    raise
                return None
            self._followed[place] = stream
            return stream

    async def delete(self, connection: Connection, topic: str, group: str, places: Iterable[Place]) -> None:
        """Delete all records of these places. AmqpError, BrokerError: not all are deleted."""
        for place in places:
            at = AsidePlace(topic, group, place)
            source = AsideSource(connection, self._ground.registry, at, self._room, self._lock(at))
            for distance in _OTHER_GENERATIONS:
                await source.delete(source.registered() + distance)

    async def close(self) -> None:
        owned = [each for asides in self._owned.values() for each in asides]
        for aside in (*self._followed.values(), *owned):
            await aside.close()


class RabbitAside:
    """Implements the aside of the broker contract."""

    def __init__(self, ground: RabbitGround, asides: RabbitAsides, group: str) -> None:
        self._ground = ground
        self._asides = asides
        self._group = group

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        return await self._run(lambda: self._load(partition, after, limit, max_bytes, dead))

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        least = None if after is None else RecordPlace.parse(after)
        return await self._run(lambda: self._scan(where, least, limit))

    async def count(self, where: Filter) -> Count:
        return await self._run(lambda: self._count(where))

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        return await self._asked(MoveRequest(list(ids), expect, to, due))

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        return await self._asked(MoveRequest(list(ids), expect, None, None))

    async def _run(self, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """It only reads, so it may be done again."""
        return await self._answer(reconnecting(read))

    async def _asked(self, request: MoveRequest) -> int:
        return await self._answer(self._request(request))

    async def _answer(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._ground.io.run(coroutine)
        except AmqpError as error:
            raise BrokerError(f"RabbitMQ: the records of group {self._group} cannot be read: {error}") from error

    async def _load(
        self, partition: Partition, after: int | None, limit: int, max_bytes: int, dead: bool
    ) -> list[AsideRecord]:
        place = AsidePlace(partition.topic, self._group, partition.index)
        aside = self._asides.owned_by_us(place)
        if aside is None:
            await self._ground.registry.catch_up()
            aside = await self._asides.caught_up(place)
        while aside is not None:
            rows = loadable(aside.table, self._log_id(partition, aside), after, limit, dead=dead)
            page = fitting(rows, limit, max_bytes)
            records = await aside.records(page)
            if records or not page:
                return records
            after = page[-1].position  # all of these were removed meanwhile; there may be more records after them
        return []

    async def _scan(self, where: Filter, after: RecordPlace | None, limit: int) -> Page:
        asides = await self._read(where.topic)
        scan = AsideScan({each: aside.table for each, aside in asides.items()}, where, after, limit)
        while placed := scan.step():
            for partition, rows in by_partition(placed):
                scan.take(partition, await asides[partition].records(rows))
        return scan.page()

    async def _count(self, where: Filter) -> Count:
        asides = await self._read(where.topic)
        return count([aside.table for aside in asides.values()], where)

    async def _request(self, request: MoveRequest) -> int:
        asides = await self._read(None)
        logs = {each: self._log_id(each, aside) for each, aside in asides.items()}
        asked = divided({each: aside.table for each, aside in asides.items()}, logs, request)
        return sum([await self._ask(asides[partition].place, each) for partition, each in asked.items()])

    async def _ask(self, place: AsidePlace, request: MoveRequest) -> int:
        moved = 0
        for at in range(0, len(request.ids), _MOST_IDS):
            some = msgspec.structs.replace(request, ids=request.ids[at : at + _MOST_IDS])
            moved += await self._ask_once(place, some)
        return moved

    async def _ask_once(self, place: AsidePlace, request: MoveRequest) -> int:
        """After a lost connection the same request is written again; it counts once."""
        name = uuid4().hex

        async def ask() -> int:
            aside = await self._asides.caught_up(place)
            if aside is None:
                return 0
            try:
                return await aside.request(name, request)
            except BrokerError as error:
                if aside.is_closed and not is_interrupted(error):
                    raise BrokerError(str(error)) from ConnectionLost("its connection has ended")
                raise

        return await reconnecting(ask)

    async def _read(self, topic: str | None) -> Asides:
        await self._ground.registry.catch_up()
        return await self._asides.reading(self._asides.places(self._group, topic))

    def _log_id(self, partition: Partition, aside: AnyAside) -> str | None:
        """The id of the partition's log. None in a work group, where each member has logs of its own."""
        if aside.place.place == "work":
            return None
        entry = self._ground.registry.topic(partition.topic)
        return aside.log_id or (entry.log_id if entry is not None else "")
