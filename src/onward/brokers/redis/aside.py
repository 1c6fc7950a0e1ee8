"""The aside: records out of the flow, in hashes beside their partition's log."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onward.brokers.base import AsideRecord, Count, Filter, Page, State
from onward.brokers.core.asides import RecordPlace, buried, fitting, matches, mentions, oldest
from onward.brokers.redis import aside_rows
from onward.brokers.redis.aside_rows import RecordRow
from onward.brokers.redis.keys import Keyspace, TopicKeys
from onward.brokers.redis.link import Link, LinkThread
from onward.brokers.redis.log_scripts import BURY, MOVE, NEWS
from onward.brokers.redis.positions import hex_of
from onward.brokers.redis.topics import listed
from onward.event import Partition

_PAGE = 500  # rows looked at together
_RECREATED = "the log of its partition is another one now; its place in it is another event's"
_TRIES = 20  # of a move whose record changes meanwhile

Target = tuple[State, float | None]  # a state and when it is due


class FoundRow(NamedTuple):
    partition: Partition
    place: str
    row: RecordRow

    # as asides.Listed
    @property
    def size(self) -> int:
        return self.row.size

    @property
    def state(self) -> State:
        return self.row.state

    @property
    def key(self) -> str | None:
        return self.row.key

    @property
    def error(self) -> str | None:
        return self.row.error

    @property
    def failed_at(self) -> float | None:
        return self.row.failed_at


class RedisAside:
    def __init__(self, group: str, thread: LinkThread, keyspace: Keyspace) -> None:
        self._records = GroupRecords(group, keyspace)
        self._thread = thread

    async def load(
        self, partition: Partition, *, after: int | None, limit: int, max_bytes: int, dead: bool = False
    ) -> Sequence[AsideRecord]:
        return await self._thread.run(lambda link: self._records.load(link, partition, after, (limit, max_bytes, dead)))

    async def scan(self, where: Filter, after: str | None, limit: int) -> Page:
        place = None if after is None else RecordPlace.parse(after)
        return await self._thread.run(lambda link: self._records.scan(link, where, place, limit))

    async def count(self, where: Filter) -> Count:
        return await self._thread.run(lambda link: self._records.count(link, where))

    async def move(self, ids: Sequence[str], *, expect: State, to: State, due: float | None) -> int:
        return await self._changed(lambda link: self._records.move(link, ids, expect, (to, due)))

    async def remove(self, ids: Sequence[str], *, expect: State) -> int:
        return await self._changed(lambda link: self._records.move(link, ids, expect, None))

    async def _changed(self, change: Callable[[Link], int]) -> int:
        """Not repeated: what the first call moved would not be counted."""
        return await self._thread.run(change, repeat=False)


class GroupRecords:
    """The records of one group, in a thread that has a connection."""

    def __init__(self, group: str, keyspace: Keyspace) -> None:
        self._group = group
        self._keyspace = keyspace

    def load(
        self, link: Link, partition: Partition, after: int | None, limits: tuple[int, int, bool]
    ) -> list[AsideRecord]:
        limit, max_bytes, dead = limits
        (log_id,) = link.ask(("HGET", self._keyspace.of(partition).meta, "log"))
        current = (log_id or b"").decode()
        found: list[FoundRow] = []
        for page in self._pages(link, partition, "-" if after is None else f"[{hex_of(after + 1)}"):
            self._bury(link, [each for each in page if aside_rows.log_at(each.place) != current])
            mine = [each for each in page if aside_rows.log_at(each.place) == current]
            found += [each for each in mine if dead or each.state is not State.DEAD]
            if len(found) >= limit or sum(each.size for each in found) > max_bytes:
                break
        return [record for _, record in self._records(link, fitting(found, limit, max_bytes))]

    def scan(self, link: Link, where: Filter, after: RecordPlace | None, limit: int) -> Page:
        """Pages follow the place of a record, which never changes."""
        found: list[tuple[FoundRow, AsideRecord]] = []
        for page in self._matching(link, where, after):
            records = self._records(link, page)
            found += [each for each in records if where.text is None or mentions(each[1], where.text)]
            if len(found) > limit:
                break
        more = len(found) > limit
        return Page([record for _, record in found[:limit]], self._cursor(found[limit - 1][0]) if more else None)

    def count(self, link: Link, where: Filter) -> Count:
        assert where.text is None, "a text is found in records, not in their rows"
        rows = [each for page in self._matching(link, where, None) for each in page]
        return Count(len(rows), oldest(rows))

    def move(self, link: Link, ids: Sequence[str], expect: State, to: Target | None) -> int:
        """Compare and set, or, with `to` None, compare and remove. The owner gets Moved in its next turn."""
        wanted: dict[int, list[str]] = {}
        for id_ in dict.fromkeys(ids):
            if aside_rows.is_id(id_):
                wanted.setdefault(aside_rows.index_of(id_), []).append(aside_rows.place_of(id_))
        homes = [
            Partition(spec.name, index)
            for spec in listed(link, self._keyspace)
            for index in wanted
            if index < spec.partitions
        ]
        has_rows = link.ask(*[("EXISTS", self._keyspace.of(each).rows(self._group)) for each in homes]) if homes else ()
        moved: dict[Partition, int] = {}
        for home, exists in zip(homes, has_rows, strict=True):
            if exists and (count := self._move(link, home, wanted[home.index], expect, to)):
                moved[home] = count
        if moved:
            named = {home.topic: None for home in moved}
            link.ask(*[NEWS([TopicKeys(topic).news(self._group)], "") for topic in named])
        return sum(moved.values())

    def _move(self, link: Link, partition: Partition, places: Sequence[str], expect: State, to: Target | None) -> int:
        """A record that changes between our read and our write is read again."""
        keys, moved = self._keyspace.of(partition), 0
        (log_id,) = link.ask(("HGET", keys.meta, "log"))
        for _ in range(_TRIES):
            if not places:
                break
            (rows,) = link.ask(("HMGET", keys.rows(self._group), *places))
            current = (log_id or b"").decode()
            changes = list(self._changes(partition, zip(places, rows, strict=True), expect, to, current))
            if not changes:
                break
            names = [keys.group(self._group), *keys.aside(self._group), keys.meta, keys.moves(self._group)]
            (answers,) = link.ask(MOVE(names, *[value for change in changes for value in change]))
            moved += sum(answers)
            places = [change[0] for change, done in zip(changes, answers, strict=True) if not done]
        return moved

    def _changes(
        self,
        partition: Partition,
        rows: "zip[tuple[str, bytes | None]]",
        expect: State,
        to: Target | None,
        current: str,
    ) -> Iterator[tuple[str, bytes, bytes, bytes]]:
        """What MOVE takes. A record of a former log can be removed, not moved: its position is another event's."""
        for place, data in rows:
            row = aside_rows.row_of(data) if data is not None else None
            if data is None or row is None or row.state is not expect:
                continue
            if to is not None and aside_rows.log_at(place) != current:
                continue
            id_ = aside_rows.id_at(self._group, partition, place)
            new = b"" if to is None else aside_rows.moved(row, *to)
            state, due = (None, None) if to is None else to
            yield place, data, new, aside_rows.notice(id_, state, due)

    def _bury(self, link: Link, found: Sequence[FoundRow]) -> None:
        """Make dead letters of what waits in the aside of a former log: its positions belong to other events now."""
        open_ = [each for each in found if each.state is not State.DEAD]
        for each, record in self._records(link, open_):
            _, row, body = aside_rows.stored(buried(record, _RECREATED, time.time()))
            keys = self._keyspace.of(each.partition)
            names = [keys.group(self._group), *keys.aside(self._group), keys.meta]
            link.ask(BURY(names, each.place, aside_rows.encoded(each.row), row, body))

    def _matching(self, link: Link, where: Filter, after: RecordPlace | None) -> Iterator[list[FoundRow]]:
        for spec in listed(link, self._keyspace):
            if where.topic not in (None, spec.name) or (after is not None and spec.name < after.topic):
                continue
            for index in range(spec.partitions):
                start = "-"
                if after is not None and spec.name == after.topic:
                    if index < after.index:
                        continue
                    if index == after.index:
                        start = f"({aside_rows.place_of(after.id)}"
                for page in self._pages(link, Partition(spec.name, index), start):
                    yield [each for each in page if matches(each, where)]

    def _pages(self, link: Link, partition: Partition, start: str) -> Iterator[list[FoundRow]]:
        keys = self._keyspace.of(partition)
        while True:
            (places,) = link.ask(("ZRANGEBYLEX", keys.places(self._group), start, "+", "LIMIT", 0, _PAGE))
            if not places:
                return
            (rows,) = link.ask(("HMGET", keys.rows(self._group), *places))
            yield list(self._found(partition, dict(zip(places, rows, strict=True))))
            start = f"({places[-1].decode()}"
            if len(places) < _PAGE:
                return

    def _found(self, partition: Partition, rows: Mapping[bytes, bytes | None]) -> Iterator[FoundRow]:
        for place, data in rows.items():
            row = aside_rows.row_of(data) if data is not None else None
            if row is not None:
                yield FoundRow(partition, place.decode(), row)
            elif data is not None:
                aside_rows.complain(aside_rows.id_at(self._group, partition, place.decode()), "its row cannot be read")

    def _records(self, link: Link, found: Sequence[FoundRow]) -> list[tuple[FoundRow, AsideRecord]]:
        """With their bodies; a damaged one, or one that was removed since, is left out."""
        if not found:
            return []
        bodies = link.ask(
            *[("HGET", self._keyspace.of(each.partition).bodies(self._group), each.place) for each in found]
        )
        records = []
        for each, body in zip(found, bodies, strict=True):
            id_ = aside_rows.id_at(self._group, each.partition, each.place)
            if body is not None and (record := aside_rows.record_of(id_, each.row, body)) is not None:
                records.append((each, record))
        return records

    def _cursor(self, found: FoundRow) -> str:
        id_ = aside_rows.id_at(self._group, found.partition, found.place)
        return RecordPlace(*found.partition, int(found.place.partition(":")[0], 16), id_).cursor()
