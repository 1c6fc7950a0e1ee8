"""Adoption: what other consumers of a group have left in a stream becomes ours, before the partition is assigned.

The group's pending list is read in pages. Entries of other consumers are claimed, those that were trimmed leave a stub
in the dead letters, and the progress of the partition follows from the list."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from onward import clock
from onward.brokers.base import Progress
from onward.brokers.redis.foreign import adoption_scripts as scripts
from onward.brokers.redis.foreign.leftovers import (
    Leftovers,
    LostEntry,
    PageWork,
    PendingPage,
    Stocktaking,
    fitting_position,
)
from onward.brokers.redis.foreign.lost_entries import report, report_unread, stub
from onward.brokers.redis.foreign.other_consumers import ActiveConsumer, beside_us, waiting
from onward.brokers.redis.foreign.reading import buried
from onward.brokers.redis.foreign.shard import StreamShard
from onward.brokers.redis.link import Link
from onward.brokers.redis.member import RedisHold, RedisMember
from onward.brokers.redis.positions import id_of
from onward.brokers.redis.progress import encoded
from onward.brokers.redis.scripts import Command, Script
from onward.errors import BrokerError
from onward.settings import Settings

_TRIES = 3  # of an adoption during which the group moves on


class Adopted(NamedTuple):
    """The partition can be assigned."""

    progress: Progress
    leftovers: Leftovers
    pending: Mapping[int, int]  # by position: how often it was delivered
    before: int | None  # how many entries were appended before the watermark; None: unknown
    taken: int  # entries of other consumers


class Waits(NamedTuple):
    """It cannot be adopted yet."""

    why: str
    for_s: float
    is_disturbed: bool = False  # by other consumers


class _Stopped(Exception):
    """A script answered that it does nothing: `lost`, `void`, `group`, `busy` or `again`."""

    def __init__(self, answer: Sequence[Any]) -> None:
        super().__init__(answer[0].decode())
        self.answer = answer


class Adopter:
    """Adopts partitions, one after another."""

    def __init__(self, link: Link, member: RedisMember, settings: Settings) -> None:
        self._link = link
        self._member = member
        self._idle_ms = int(settings.reclaim_idle_s * 1000)
        self._calm_ms = min(self._idle_ms, int(settings.lease_s * 1000))
        self._batch = settings.reclaim_batch
        self.every_s = settings.reclaim_every_s
        self.look_s = settings.lease_s / 3  # between two attempts
        self._figures = member.figures

    def adopt(self, hold: RedisHold) -> Adopted | Waits | None:
        """None: the partition is not ours any more."""
        for _ in range(_TRIES):
            try:
                return self._adopt(hold)
            except _Stopped as stopped:
                tag, answer = str(stopped), stopped.answer
            if tag == "lost":
                return None
            if tag == "busy":
                return self._busy(*answer[1:])
            if tag == "void":
                self._link.refresh()
                return Waits("the server was restarted or replaced; ownership is being checked", self.look_s)
            if tag == "group":  # it was destroyed since we claimed; the first settle creates it where our progress is
                stored = _stored(hold)
                return Adopted(stored, Leftovers((), ()), {}, hold.own.count.before(stored.watermark), 0)
        return Waits("other consumers of the group go on; stop them", self.look_s)

    def others(self, hold: RedisHold) -> tuple[str, bool]:
        """Why other consumers of the group are in the way, and whether some have left entries."""
        sent = clock.now()
        try:
            (answer,) = self._asked(self._call(scripts.OTHERS, hold))
        except _Stopped:
            return "", False  # no group is normal, and what is not ours is not looked at
        self._figures.reclaimed(hold.partition, 0, clock.now() - sent)
        active = _names(answer[1])
        return beside_us(_shard(hold).stream, self._member.group, active) if active else "", bool(answer[2])

    def close(self) -> None:
        self._link.close()

    def _busy(self, wait_ms: int, names: Sequence[bytes], idles: Sequence[int], limit_ms: int) -> Waits:
        consumers = [ActiveConsumer(name, ms / 1000) for name, ms in zip(_names(names), idles, strict=True)]
        setting = "reclaim_idle_s" if limit_ms == self._idle_ms else "lease_s"
        why = waiting(consumers, wait_ms / 1000, setting)
        return Waits(why, min(wait_ms / 1000, self.look_s), is_disturbed=True)

    def _adopt(self, hold: RedisHold) -> Adopted:
        (left,) = self._link.ask(("HGET", self._member.key(hold.partition), "left"))
        found, work, start, taken = None, PageWork(), "-", 0
        while True:
            sent = clock.now()
            *took, reply = self._asked(*self._takes(hold, work), self._call(scripts.LOOK, hold, start, self._batch))
            count = sum(answer[1] for answer in took)
            self._figures.reclaimed(hold.partition, count, clock.now() - sent)
            taken += count
            page = PendingPage.of(reply)
            if found is None:
                found = Stocktaking(_stored(hold) if page.is_ours else None, page.ours, Leftovers.decode(left))
            if not page.ids:
                return self._finished(hold, page.last, found, taken)
            start, work = f"({page.ids[-1].decode()}", found.page(page)

    def _finished(self, hold: RedisHold, last: bytes, found: Stocktaking, taken: int) -> Adopted:
        progress, leftovers = found.result(hold.partition, hold.epoch, last)
        is_known = not found.is_changed and progress.watermark == _stored(hold).watermark
        before = hold.own.count.before(progress.watermark) if is_known else None
        passed = id_of(found.passed(progress)) if found.passed(progress) > fitting_position(last) else ""
        ((_, count, missing),) = self._asked(
            self._call(scripts.ADOPTED, hold, last, *encoded(progress, before), passed, leftovers.encoded())
        )
        report_unread(self._member, hold.partition, missing)
        return Adopted(progress, leftovers, found.pending, int(count) if count else None, taken)

    def _takes(self, hold: RedisHold, work: PageWork) -> list[Command]:
        if not work.takes and not work.lost:
            return []
        self._bury(hold, work.lost)
        return [self._call(scripts.TAKE, hold, len(work.takes), *work.takes, *(entry.id for entry in work.lost))]

    def _bury(self, hold: RedisHold, lost: Sequence[LostEntry]) -> None:
        """Store their stubs, before they are acknowledged."""
        if lost:
            letters = [stub(self._member.group, _shard(hold), entry) for entry in lost]
            if why := buried(self._link, self._member, hold, letters):
                raise BrokerError(f"the dead letters of entries that were removed cannot be stored: {why}")
            report(self._member, _shard(hold), lost)

    def _call(self, script: Script, hold: RedisHold, *arguments: Any) -> Command:
        self._link.connect()
        keys, group = self._member.keyspace.of(hold.partition), self._member.group
        inc, limits = self._link.incarnation(keys.meta), (self._idle_ms, self._calm_ms)
        return script([keys.group(group), keys.stream], inc, hold.own.token, group, *limits, *arguments)

    def _asked(self, *commands: Command) -> list[Any]:
        answers = self._link.ask(*commands)
        for answer in answers:
            if answer[0] not in (b"ok", b"page"):
                raise _Stopped(answer)
        return answers


def _shard(hold: RedisHold) -> StreamShard:
    assert hold.own.shard is not None, "a stream of others"
    return hold.own.shard


def _stored(hold: RedisHold) -> Progress:
    return hold.assigned.stored or Progress(hold.partition, hold.epoch, 0)


def _names(names: Sequence[bytes]) -> list[str]:
    return [name.decode(errors="replace") for name in names]
