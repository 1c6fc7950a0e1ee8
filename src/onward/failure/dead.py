"""The dead letters of an application: list, show, replay, drop, export, send.

A replay publishes nothing: the event runs in the lane of its key, in its group only. Every operation works from any
process, whether the group runs or not: letters are moved by compare and set, and the partition's owner gets Moved.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypedDict, Unpack

import msgspec

from onward.brokers.base import Aside, AsideRecord, Broker, Count, Filter, State
from onward.clock import now
from onward.errors import BadSetting, ConfigError, NoSuchLetter
from onward.event import Event
from onward.failure.letter import as_json, copy
from onward.failure.watch import Tally
from onward.settings import check_name

_PAGE = 500
_STEP = 100  # letters moved, removed or published by one call
_PACE_S = 0.1  # a replay with a rate moves letters this often
_DEAD = frozenset({State.DEAD})


class LetterScan(msgspec.Struct, frozen=True):
    """A page of dead letters. Pass `after` to get the next page; None: this is the last one."""

    letters: Sequence[AsideRecord]
    after: str | None


class Replayed(msgspec.Struct, frozen=True):
    """`replayed`: made to wait again, due now. `failed`: no longer dead, because another process was faster. `left`:
    dead letters that still match."""

    replayed: int
    failed: int
    left: int


class Dropped(msgspec.Struct, frozen=True):
    dropped: int
    failed: int  # no longer dead, because another process was faster
    left: int


class Where(TypedDict, total=False):
    """The fields of LetterChoice, as keywords."""

    topic: str | None
    group: str | None
    key: str | None
    error: str | None
    text: str | None
    since: float | None
    until: float | None
    ids: Iterable[str] | str | None


class LetterChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which letters: every field that is set must match. `since` and `until` are Unix times of the last failure."""

    topic: str | None = None
    group: str | None = None
    key: str | None = None
    error: str | None = None  # the error's type, by name
    text: str | None = None  # contained in the error's message or in the value
    since: float | None = None
    until: float | None = None
    ids: frozenset[str] = frozenset()  # of letters, or of their events

    @property
    def anywhere(self) -> bool:
        """It sets neither a topic nor a group."""
        return self.topic is None and self.group is None

    @property
    def where(self) -> Filter:
        return Filter(_DEAD, self.topic, self.key, self.error, self.text, self.since, self.until)

    def names(self, record: AsideRecord) -> bool:
        return not self.ids or record.id in self.ids or record.event.id in self.ids


class DeadLetters:
    """The dead letters of a broker. `places`: the topics and groups that the application handles.

    A choice without a topic and a group means the application's topics. If the application has no handlers, it means
    every topic of the broker, and then only `list`, `show`, `count` and `export` are allowed without ids.
    """

    def __init__(self, broker: Broker, places: Iterable[tuple[str, str]]) -> None:
        self._broker = broker
        self._places = frozenset(places)

    async def list(self, *, after: str | None = None, limit: int = 50, **choice: Unpack[Where]) -> LetterScan:
        """A page of letters, ordered by group, partition and position. `choice`: any fields of LetterChoice."""
        chosen = _choice(choice)
        at, place = _cursor(after)
        groups = [group for group in await self._groups(chosen) if group >= at]
        found: list[AsideRecord] = []
        for group, following in pairwise([*groups, ""]):
            async for page, inner in self._pages(group, chosen, place if group == at else None, limit - len(found)):
                found += page
                if len(found) >= limit and (inner or following):
                    return LetterScan(found, f"{group}:{inner}" if inner else f"{following}:")
        return LetterScan(found, None)

    async def show(self, id_: str, *, group: str | None = None, topic: str | None = None) -> AsideRecord:
        """The letter that has this id, or whose event has it. NoSuchLetter if there is not exactly one."""
        chosen = LetterChoice(ids=frozenset({id_}), group=group, topic=topic)
        found = [record async for record in self._matching(chosen)]
        if not found:
            raise NoSuchLetter(
                f"no dead letter {id_!r}; it was replayed or dropped, the id is wrong, or it is in another group"
            )
        if len(found) > 1:
            groups = ", ".join(sorted(record.group for record in found))
            raise NoSuchLetter(f"event {id_!r} is dead in the groups {groups}; give one of these groups")
        return found[0]

    async def count(self, **choice: Unpack[Where]) -> int:
        return await self.total(_choice(choice))

    async def check(self, **choice: Unpack[Where]) -> None:
        """Raise NoSuchLetter if one of the `ids` is not a dead letter that matches. Raise ConfigError if there is no
        such group."""
        chosen = _choice(choice)
        await self._check_group(chosen)
        if not chosen.ids:
            return
        found = {name async for record in self._matching(chosen) for name in (record.id, record.event.id)}
        if missing := sorted(chosen.ids - found):
            raise NoSuchLetter(f"no dead letter {', '.join(missing)}; it was replayed or dropped, or the id is wrong")

    async def total(self, chosen: LetterChoice) -> int:
        if chosen.ids or chosen.text is not None:  # the letters must be read to find them
            return sum([1 async for _ in self._matching(chosen)])
        return (await self._counted(chosen)).records

    async def tally(self, topic: str, group: str) -> Tally:
        """How many letters there are, and how old the oldest is; for the monitor."""
        found = await self._counted(LetterChoice(topic=topic, group=group))
        age_s = 0.0 if found.oldest is None else max(0.0, time.time() - found.oldest)
        return Tally(topic, group, found.records, age_s)

    def replaying(self, *, limit: int | None = None, rate: float | None = None, **choice: Unpack[Where]) -> "Replay":
        """A replay that you can run, watch and stop: at most `limit` letters, and at most `rate` per second."""
        if rate is not None and not rate > 0:
            raise BadSetting(f"rate={rate}: give a number of letters per second, more than 0")
        if limit is not None and limit < 0:
            raise BadSetting(f"limit={limit}: give a number of letters, 0 or more")
        chosen = _choice(choice)
        self._check_named(chosen)
        return Replay(self, chosen, limit, rate)

    async def replay(
        self, *, limit: int | None = None, rate: float | None = None, dry_run: bool = False, **choice: Unpack[Where]
    ) -> Replayed:
        """Run letters again, each before the events of its key that have not run yet. Later events that ran while it
        was dead stay done. The attempts are counted from 1 again. With `dry_run` nothing changes, and the answer is how
        many would be replayed."""
        replay = self.replaying(limit=limit, rate=rate, **choice)
        return await replay.rehearse() if dry_run else await replay.run()

    async def drop(self, *, limit: int | None = None, dry_run: bool = False, **choice: Unpack[Where]) -> Dropped:
        """Delete letters for good."""
        chosen = _choice(choice)
        self._check_named(chosen)
        dropped = failed = 0
        async for group, ids in self.steps(chosen, limit, _STEP):
            removed = len(ids) if dry_run else await self.aside(group).remove(ids, expect=State.DEAD)
            dropped, failed = dropped + removed, failed + len(ids) - removed
        left = await self.total(chosen)
        return Dropped(dropped, failed, left - dropped if dry_run else left)

    async def export(self, **choice: Unpack[Where]) -> AsyncIterator[bytes]:
        """Each letter as a line of JSON, without the line end."""
        async for record in self._matching(_choice(choice)):
            yield as_json(record)

    async def send(self, to: str, *, limit: int | None = None, **choice: Unpack[Where]) -> int:
        """Publish copies of letters to a topic. The letters stay where they are. Returns how many were sent."""
        check_name("topic", to)
        chosen = _choice(choice)
        self._check_named(chosen)
        sent = 0
        batch: list[Event] = []
        async for record in self._matching(chosen):
            if limit is not None and sent + len(batch) >= limit:
                break
            batch.append(copy(record, to))
            if len(batch) == _STEP:
                await self._broker.publish(batch)
                sent, batch = sent + len(batch), []
        if batch:
            await self._broker.publish(batch)
        return sent + len(batch)

    def aside(self, group: str) -> Aside:
        return self._broker.aside(group)

    async def steps(
        self, chosen: LetterChoice, limit: int | None, size: int
    ) -> AsyncIterator[tuple[str, Sequence[str]]]:
        """The ids of matching letters in steps of at most `size`. Each step is of one group, in order of position."""
        left = limit
        step: list[AsideRecord] = []
        async for record in self._matching(chosen):
            if left is not None and left <= 0:
                break
            if step and (len(step) == size or step[0].group != record.group):
                yield step[0].group, [each.id for each in step]
                step = []
            step.append(record)
            left = left - 1 if left is not None else None
        if step:
            yield step[0].group, [each.id for each in step]

    async def _matching(self, chosen: LetterChoice) -> AsyncIterator[AsideRecord]:
        for group in await self._groups(chosen):
            async for page, _ in self._pages(group, chosen, None, _PAGE):
                for record in page:
                    yield record

    async def _pages(
        self, group: str, chosen: LetterChoice, after: str | None, limit: int
    ) -> AsyncIterator[tuple[Sequence[AsideRecord], str | None]]:
        while True:
            page = await self.aside(group).scan(chosen.where, after, max(1, limit))
            after = page.after
            yield [each for each in page.records if chosen.names(each) and self._is_ours(each, chosen)], after
            if after is None:
                return

    async def _counted(self, chosen: LetterChoice) -> Count:
        """Counts without reading the letters."""
        topics: Iterable[str | None] = self._topics if chosen.anywhere and self._places else [chosen.topic]
        wheres = [msgspec.structs.replace(chosen.where, topic=topic) for topic in topics]
        groups = await self._groups(chosen)
        found = [await self.aside(group).count(where) for group in groups for where in wheres]
        oldest = [each.oldest for each in found if each.oldest is not None]
        return Count(sum(each.records for each in found), min(oldest, default=None))

    @property
    def _topics(self) -> set[str]:
        return {topic for topic, _ in self._places}

    def _is_ours(self, record: AsideRecord, chosen: LetterChoice) -> bool:
        """A choice without topic and group means the application's topics. Its groups may read other topics too."""
        return not chosen.anywhere or not self._places or record.partition.topic in self._topics

    async def _groups(self, chosen: LetterChoice) -> Sequence[str]:
        """The groups to look at."""
        if not self._broker.features.aside:
            raise ConfigError("this broker cannot browse its dead letters")
        if chosen.group is not None:
            return [check_name("group", chosen.group)]
        topics = {chosen.topic} if chosen.topic is not None else self._topics or await self._every_topic()
        known = {group for topic, group in self._places if topic in topics}
        for topic in topics:
            known |= {info.group for info in await self._broker.groups(topic)}
        if not known and chosen.topic is not None:
            raise ConfigError(
                f"no group has ever read topic {chosen.topic}, so it has no dead letters; is the name right?"
            )
        return sorted(known)

    async def _every_topic(self) -> set[str]:
        return {spec.name for spec in await self._broker.topics()}

    async def _check_group(self, chosen: LetterChoice) -> None:
        """A group that the broker has forgotten may still have letters."""
        name = chosen.group
        if name is None or name in {group for _, group in self._places} or await self.total(LetterChoice(group=name)):
            return
        for topic in await self._every_topic():
            if name in {info.group for info in await self._broker.groups(topic)}:
                return
        raise ConfigError(f"no topic has a group {name}, so it has no dead letters; is the name right?")

    def _check_named(self, chosen: LetterChoice) -> None:
        """A mistake must not change the letters of every application that uses the broker."""
        if chosen.anywhere and not self._places and not chosen.ids:
            raise ConfigError(
                "this would change the dead letters of every topic: give a topic, a group, ids of letters, or the "
                "application that handles them (--app)"
            )


class Replay:
    """One replay, to `run` once. Meanwhile `replayed`, `failed` and `total` show its progress. `stop` ends it between
    two steps: letters that were moved run, the others stay dead."""

    def __init__(self, dead: DeadLetters, chosen: LetterChoice, limit: int | None, rate: float | None) -> None:
        self._dead = dead
        self._chosen = chosen
        self._limit = limit
        self._rate = rate
        self._stopped = asyncio.Event()
        self.total: int | None = None  # how many there are to replay, once counted
        self.replayed = 0
        self.failed = 0

    def stop(self) -> None:
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    async def rehearse(self) -> Replayed:
        """What `run` would do."""
        matching = await self._dead.total(self._chosen)
        would = matching if self._limit is None else min(matching, self._limit)
        return Replayed(would, 0, matching - would)

    async def run(self, progress: Callable[["Replay"], None] = lambda _: None) -> Replayed:
        """Move the letters that match now. Events that die meanwhile, also for the second time, stay dead."""
        self.total = (await self.rehearse()).replayed
        progress(self)
        begun = now()
        async for group, ids in self._dead.steps(self._chosen, self.total, self._step):
            if self.stopped:
                break
            aside = self._dead.aside(group)
            moved = await aside.move(ids, expect=State.DEAD, to=State.WAITING, due=time.time())
            self.replayed += moved
            self.failed += len(ids) - moved
            progress(self)
            await self._pace(begun)
        left = await self._dead.total(self._chosen)
        return Replayed(self.replayed, self.failed, left)

    @property
    def _step(self) -> int:
        return _STEP if self._rate is None else max(1, min(_STEP, int(self._rate * _PACE_S)))

    async def _pace(self, begun: float) -> None:
        """Wait until the rate allows the next step, or until stopped."""
        tried = self.replayed + self.failed
        if self._rate is None or tried >= (self.total or 0):
            return
        wait_s = begun + tried / self._rate - now()
        if wait_s > 0:
            try:
                await asyncio.wait_for(self._stopped.wait(), wait_s)
            except TimeoutError:
                return


def _choice(where: Where) -> LetterChoice:
    ids = where.get("ids")
    if ids is None:
        names: frozenset[str] = frozenset()
    else:
        names = frozenset([ids] if isinstance(ids, str) else ids)
        if not names:
            raise BadSetting("ids=[]: give at least one id, or leave `ids` out for all that match")
    rest: dict[str, Any] = {name: value for name, value in where.items() if name != "ids"}
    return LetterChoice(**rest, ids=names)


def _cursor(after: str | None) -> tuple[str, str | None]:
    """The group, and the place in it, where a page begins."""
    group, separator, place = (after or ":").partition(":")
    if not separator:
        raise BadSetting(f"after={after!r} is not the cursor of an earlier page; start again without it")
    return group, place or None
