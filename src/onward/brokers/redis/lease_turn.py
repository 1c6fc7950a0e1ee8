"""One turn of a member's leases at the server: first it renews and looks, then it carries decisions out."""

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import ResponseError

from onward import clock
from onward.brokers.base import Assigned
from onward.brokers.core.holdings import Hold
from onward.brokers.core.leasing import Decisions, TopicView
from onward.brokers.core.share import Seat
from onward.brokers.redis import lease_scripts as scripts
from onward.brokers.redis.foreign.projection import Projection
from onward.brokers.redis.foreign.scripts import CLAIM_STREAM
from onward.brokers.redis.foreign.shard import StreamShard
from onward.brokers.redis.group_watch import (
    UNKNOWN,
    GroupWatch,
    LeaseView,
    ListedMember,
    MemberList,
    member_of,
    member_place,
    owner_of,
)
from onward.brokers.redis.link import Link
from onward.brokers.redis.log_scripts import HEARD, NEWS
from onward.brokers.redis.member import RedisHold, RedisMember, RedisPlace
from onward.brokers.redis.progress import decoded
from onward.brokers.redis.scripts import Command
from onward.brokers.redis.server_errors import damaged_key, explained, is_passing
from onward.event import Partition
from onward.settings import Settings

log = logging.getLogger("onward")

_NOTICES = 1_000  # taken at once


class Look(msgspec.Struct):
    """What the server answered to the renewals, and what it shows."""

    sent: float  # before the renewals went out
    renewed: list[RedisHold] = []
    lost: list[RedisHold] = []
    views: dict[Partition, LeaseView] = {}
    broken: dict[Partition, str] = {}  # why a partition cannot be looked at
    members: dict[str, dict[str, ListedMember]] = {}  # by topic
    unlisted: dict[str, str] = {}  # by topic: why its members could not be read
    damaged: dict[str, str] = {}  # by topic: what is among its members and is none
    is_partial: bool = False  # a node did not answer, or a slot is on its way to another one: look again soon
    notices: dict[RedisHold, list[bytes]] = {}
    read: dict[RedisHold, int] = {}  # of streams of others: the next position to read, before the look

    @property
    def moved_logs(self) -> list[RedisHold]:
        """Held partitions whose log is another one now: they begin again."""
        found = [(hold, self.views.get(hold.partition)) for hold in self.renewed]
        return [hold for hold, view in found if view and not self._is_same(hold, view)]

    def _is_same(self, hold: RedisHold, view: LeaseView) -> bool:
        if not view.has_stream or view.current_log != hold.log_id:
            return False
        return view.has_given(self.read.get(hold, 0))


class TurnDone(NamedTuple):
    """What became of the decisions."""

    claimed: list[RedisHold]
    missed: bool  # a claim was not granted: look again soon


class RedisTurn:
    def __init__(self, link: Link, member: RedisMember, watch: GroupWatch, settings: Settings) -> None:
        self.link = link
        self.settings = settings
        self.watch = watch
        self._member = member
        self.broken: dict[Partition, str] = {}  # why a partition could not be looked at
        self.unlisted: dict[str, str] = {}  # by topic: why its members could not be read
        self.damaged: dict[str, str] = {}  # by topic: what is among its members and is none
        self.unclaimed: dict[Partition, str] = {}  # why a partition could not be claimed
        self._listed: dict[str, dict[str, ListedMember]] = {}  # by topic: the members that were listed last
        self._views: dict[Partition, LeaseView] = {}  # of the last look

    def is_certain(self, hold: RedisHold) -> bool:
        """No claim of another member can be lost: the server is the one that confirmed ours."""
        return self.watch.is_certain(hold.partition, hold.own.token, self._incarnation(hold.partition))

    def _incarnation(self, partition: Partition) -> str:
        """Of the server that has this partition."""
        return self.link.incarnation(self._member.key(partition))

    # -- looking --------------------------------------------------------------------------------------------------

    def look(self, partitions: Sequence[Partition], held: Sequence[RedisHold]) -> Look:
        """Renew what is held, then look. A renewal comes first and has one key, so that it needs nothing else. Its time
        is taken before we make sure that the server is the right one: no other server was before that time."""
        look = Look(clock.now())
        read = {hold: hold.ahead.position for hold in held if hold.own.shard is not None}
        self.link.confirm()
        before, held = held, _unlapsed(held)
        look.broken = {hold.partition: "its lease has lapsed" for hold in before if hold not in held}
        topics = self._member.topics
        commands = [*map(self._renewal, held), *map(self._view, partitions), *map(self._list, topics)]
        replies = iter(self.link.call(*commands))
        void = self._renewals(look, held, replies) | self._views_of(look, partitions, replies)
        self._members(look, topics, replies)
        if void:
            self._revalidate(look, void, [hold for hold in held if hold.partition in void])
        look.read = {hold: position for hold, position in read.items() if self._is_verified(hold)}
        for hold in look.renewed:
            self.watch.confirmed(hold.partition, hold.own.token, self._incarnation(hold.partition))
        self._read_notices(look)
        self._views = look.views
        return look

    def _is_verified(self, hold: RedisHold) -> bool:
        """It was read from the server as it is now. After a restart the reader compares what it has read."""
        shard = hold.own.shard
        return shard is not None and shard.incarnation == self._incarnation(hold.partition)

    def glance(self) -> None:
        """Between two turns: look at the partitions of the members that have renewed since, so that the time of a
        member's last renewal is known well, and with it the end of its lease."""
        topics, before, look = self._member.topics, self._beats(), Look(clock.now())
        self._members(look, topics, iter(self.link.call(*map(self._list, topics))))
        renewed = {name for name, beat in self._beats().items() if beat != before.get(name)} - {self._member.owner}
        partitions = [each for each, view in self._views.items() if owner_of(view.owner) in renewed]
        if not partitions:
            return
        self._views_of(look, partitions, iter(self.link.call(*map(self._view, partitions))))
        self._views |= look.views
        self.watch.begin()
        for partition, view in self._views.items():
            if view.is_there:
                self.watch.seat(partition, view, self._incarnation(partition), look.sent)
        for topic, listed in self._listed.items():
            self.watch.members(topic, listed, look.sent)

    def _beats(self) -> dict[str, str]:
        return {name: each.beat for listed in self._listed.values() for name, each in listed.items()}

    def _list(self, topic: str) -> Command:
        return ("HGETALL", self._member.members(topic))

    def _members(self, look: Look, topics: Iterable[str], replies: Iterator[Any]) -> None:
        """While a node does not answer, the members that were listed last count. A list that cannot be read at all
        leaves its topic out, so that no partition of it changes its owner."""
        for topic, pairs in zip(topics, replies, strict=True):
            if not isinstance(pairs, ResponseError):
                found = MemberList.of(pairs)
                self._listed[topic] = look.members[topic] = found.members
                if found.damaged:
                    look.damaged[topic] = _no_member(self._member.members(topic), found.damaged[0])
                continue
            look.unlisted[topic] = explained(pairs)
            if is_passing(pairs) and topic in self._listed:
                look.members[topic] = self._listed[topic]

    def _read_notices(self, look: Look) -> None:
        noticed = [hold for hold in look.renewed if (view := look.views.get(hold.partition)) and view.notices]
        if noticed:
            names = [self._member.keyspace.of(hold.partition).moves(self._member.group) for hold in noticed]
            replies = self.link.call(*[("LRANGE", name, 0, _NOTICES - 1) for name in names])
            look.notices = dict(zip(noticed, map(_succeeded, replies), strict=True))

    def seats(self, look: Look, partitions: Iterable[Partition], now: float) -> list[TopicView]:
        """As leasing takes it."""
        self.watch.begin()
        seats: dict[str, list[Seat]] = {topic: [] for topic in look.members}
        renewed = {hold.partition: hold for hold in look.renewed}
        for partition in partitions:
            if partition.topic in seats:
                seats[partition.topic].append(self._seat(look, partition, renewed.get(partition), now))
        return [TopicView(topic, found, self._alive(look, topic, now)) for topic, found in seats.items()]

    def _seat(self, look: Look, partition: Partition, renewed: RedisHold | None, now: float) -> Seat:
        """What cannot be looked at is ours if we renewed it. Otherwise it counts as owned, and no member claims it."""
        view = look.views.get(partition)
        if renewed is not None and view is None:
            return Seat(partition, self._member.owner, renewed.fence)
        is_broken = renewed is None and partition in look.broken
        if view is None or is_broken or not view.is_there or view.incarnation != self._incarnation(partition):
            return Seat(partition, UNKNOWN, -1)
        return self.watch.seat(partition, view, view.incarnation, now)

    def _alive(self, look: Look, topic: str, now: float) -> dict[str, bool]:
        """If the list had no answer, its members count as alive, and their silence is measured from now on."""
        listed = look.members.get(topic, {})
        if topic not in look.unlisted:
            return self.watch.members(topic, listed, now)
        self.watch.forget((), [member_place(topic, name) for name in listed])
        return dict.fromkeys(listed, True)

    def _revalidate(self, look: Look, void: set[Partition], held: Sequence[RedisHold]) -> None:
        """The server was restarted or replaced since these were written. Read its incarnation again and write it; then
        what we hold can be renewed, and every other member waits for a lease."""
        self.link.refresh()
        held = _unlapsed(held)
        partitions = sorted(void)
        voids = [scripts.VOID([self._member.key(each)], self._incarnation(each)) for each in partitions]
        commands = [*voids, *map(self._renewal, held), *map(self._view, partitions)]
        replies = iter(self.link.call(*commands)[len(voids) :])
        self._renewals(look, held, replies)
        self._views_of(look, partitions, replies)

    def _renewal(self, hold: RedisHold) -> Command:
        waits = "0" if hold.announced else "1" if hold.assigned.unclean and not hold.own.is_gone else "0"
        inc = self._incarnation(hold.partition)
        return scripts.RENEW([self._member.key(hold.partition)], inc, hold.own.token, waits, self._member.ttl_ms)

    def _view(self, partition: Partition) -> Command:
        keys = self._member.keyspace.of(partition)
        names = [keys.group(self._member.group), keys.meta, keys.stream, keys.moves(self._member.group)]
        return scripts.VIEW(names, int(self._member.keyspace.mapped(partition.topic) is not None))

    def _renewals(self, look: Look, held: Iterable[RedisHold], replies: Any) -> set[Partition]:
        void = set()
        for hold in held:
            reply = next(replies)
            if reply == b"ok":
                look.renewed.append(hold)
            elif reply == b"void":
                void.add(hold.partition)
            elif isinstance(reply, ResponseError):
                look.broken[hold.partition] = explained(reply)
                look.is_partial |= is_passing(reply)
            else:
                look.lost.append(hold)
        return void

    def _views_of(self, look: Look, partitions: Iterable[Partition], replies: Any) -> set[Partition]:
        void = set()
        for partition in partitions:
            reply = next(replies)
            if isinstance(reply, ResponseError):
                look.broken[partition] = explained(reply)
                look.is_partial |= is_passing(reply)
                continue
            try:
                view = look.views[partition] = LeaseView.of(reply)
            except ValueError as error:
                look.broken[partition] = damaged_key(self._member.key(partition), error)
                continue
            if view.is_there and view.incarnation != self._incarnation(partition):
                void.add(partition)
        return void

    # -- carrying out ---------------------------------------------------------------------------------------------

    def act(self, look: Look, decisions: Decisions[RedisPlace], dropped: Sequence[RedisHold]) -> TurnDone:
        """`dropped`: given back uncleanly, because their lease lapsed or their log is another one."""
        free = [(hold, clean, False) for hold, clean in decisions.released.items()]
        free += [(hold, False, False) for hold in (*decisions.overdue, *dropped)]
        free += [(hold, not hold.assigned.unclean, hold.own.is_gone) for hold in decisions.unannounced]
        releases = [self._release(hold, clean=clean, gone=gone) for hold, clean, gone in free]
        listing = self._listing(look, decisions)
        claims = [self._claim(seat, look.views[seat.partition]) for seat in decisions.claims]
        heard = [self._heard(hold, len(found)) for hold, found in look.notices.items()]
        is_news = bool(free) or self._changes_list(look, decisions)
        news = [self._news(topic) for topic in self._member.topics if is_news]
        copies = (self.settings.replication or 1) - 1 if claims else 0
        replies = self.link.call(*releases, *listing, *claims, *heard, *news, copies=copies)
        self.watch.forget([hold.partition for hold, _, _ in free])
        answers = replies[len(releases) + len(listing) :][: len(claims)]
        self.unclaimed = {each: why for each, why in self.unclaimed.items() if not self._is_held(look, each)}
        claimed = {
            seat.partition: self._claimed(seat, answer) for seat, answer in zip(decisions.claims, answers, strict=True)
        }
        missed = any(hold is None and each not in self.unclaimed for each, hold in claimed.items())
        return TurnDone([hold for hold in claimed.values() if hold is not None], missed)

    def _is_held(self, look: Look, partition: Partition) -> bool:
        """By another member: then it is not for us to report."""
        view = look.views.get(partition)
        return view is not None and view.owner not in ("", UNKNOWN) and owner_of(view.owner) != self._member.owner

    def free_gone(self, look: Look) -> None:
        """Free what members without a process own, for any member, and take them off the list. We are on it first, so
        that no other member takes our share."""
        gone = self._member.gone
        commands = [self._enlist(topic) for topic in look.members]
        commands += [
            scripts.FREE([self._member.key(partition)], self._incarnation(partition), view.owner)
            for partition, view in look.views.items()
            if member_of(owner_of(view.owner)).name in gone
        ]
        for topic, listed in look.members.items():
            names = [name for name in listed if member_of(name).name in gone]
            commands += [("HDEL", self._member.members(topic), *names)] if names else []
        self.link.call(*commands, *map(self._news, self._member.topics))

    def leave(self, releases: Mapping[RedisHold, tuple[bool, bool]]) -> None:
        """By hold: whether it ends cleanly, and whether no process of the owner before is left."""
        me = self._member
        commands = [self._release(hold, clean=clean, gone=gone) for hold, (clean, gone) in releases.items()]
        commands += [("HDEL", me.members(topic), me.owner) for topic in me.topics]
        self.link.call(*commands, *map(self._news, me.topics))

    def _release(self, hold: RedisHold, *, clean: bool, gone: bool) -> Command:
        key, inc = self._member.key(hold.partition), self._incarnation(hold.partition)
        return scripts.RELEASE([key], inc, hold.own.token, int(clean), int(gone))

    def _listing(self, look: Look, decisions: Decisions[RedisPlace]) -> list[Command]:
        """Keep the list of members true: the dead are struck off, and so are we when we retire."""
        me, commands = self._member, []
        for topic in look.members:
            struck = decisions.struck.get(topic, [])
            self.watch.forget((), [member_place(topic, name) for name in struck])
            commands += [("HDEL", me.members(topic), *struck)] if struck else []
            if not decisions.retires:
                commands.append(self._enlist(topic))
        return commands

    def _enlist(self, topic: str) -> Command:
        me, lease_ms = self._member, int(self.settings.lease_s * 1000)
        return scripts.ENLIST([me.members(topic)], me.owner, time.monotonic_ns(), lease_ms, me.ttl_ms)

    def _changes_list(self, look: Look, decisions: Decisions[RedisPlace]) -> bool:
        """Whether a member comes or goes, which all others must hear of."""
        struck = any(set(names) & look.members.get(topic, {}).keys() for topic, names in decisions.struck.items())
        joins = not decisions.retires and any(self._member.owner not in listed for listed in look.members.values())
        return struck or joins

    def _claim(self, seat: Seat, view: LeaseView) -> Command:
        waits = int(not seat.clean and not seat.is_gone and self.settings.takeover_grace_s > 0)
        streams = self._member.keyspace.mapped(seat.partition.topic)
        claim = scripts.CLAIM if streams is None else CLAIM_STREAM
        return claim(
            self._member.claim_keys(seat.partition),
            self._incarnation(seat.partition),
            view.owner,
            view.beat,
            self._member.owner,
            self.watch.highest_fence(seat.partition),
            int(self.settings.lease_s * 1000),
            waits,
            uuid.uuid4().hex,
            self._member.real_group,
        )

    def _claimed(self, seat: Seat, answer: Any) -> RedisHold | None:
        """None: it was not granted, or its progress is damaged. In that case it is tried again after the lease."""
        self.unclaimed.pop(seat.partition, None)
        if isinstance(answer, ResponseError):
            if not is_passing(answer):
                self.unclaimed[seat.partition] = explained(answer)
            return None
        if answer[0] != b"ok":
            return None
        try:
            return self._hold(seat, answer)
        except (ValueError, msgspec.MsgspecError) as error:
            self.unclaimed[seat.partition] = damaged_key(self._member.key(seat.partition), error)
            return None

    def _hold(self, seat: Seat, answer: Sequence[Any]) -> RedisHold:
        token, log_id, news = (field.decode() for field in answer[1:4])
        partition, fence = seat.partition, int(token.partition(":")[0])
        epoch = next(self._member.epochs)
        stored = decoded(partition, epoch, answer[4])
        count = int(answer[4][3]) if answer[4][3] else None
        self.watch.confirmed(partition, token, self._incarnation(partition))
        self.watch.saw_fence(partition, fence)
        if news:
            log.error("%s of group %s begins again: %s", partition, self._member.group, _NEWS[news])
        assigned = Assigned(partition, epoch, fence, log_id, stored, not seat.clean)
        position = int(answer[4][0], 16)
        place = RedisPlace(token, is_gone=seat.is_gone, count=count, shard=self._shard(assigned, position))
        return Hold(assigned, place, position=position)

    def _shard(self, assigned: Assigned, position: int) -> StreamShard | None:
        streams = self._member.keyspace.mapped(assigned.partition.topic)
        if streams is None:
            return None
        projection = Projection(assigned.stored, position) if self._member.real_group else None
        shard = StreamShard(assigned, streams.stream(assigned.partition.index), streams, projection)
        shard.incarnation = self._incarnation(assigned.partition)
        return shard

    def _heard(self, hold: RedisHold, count: int) -> Command:
        keys = self._member.keyspace.of(hold.partition)
        return HEARD([keys.group(self._member.group), keys.moves(self._member.group)], hold.own.token, count)

    def _news(self, topic: str) -> Command:
        return NEWS([self._member.news(topic)], self._member.ttl_ms)


_NEWS = {
    "missing": "its stream was deleted; what was in it is lost, and its log has a new id",
    "shorter": "its stream is shorter than what was done of it; events are lost, and its log has a new id",
    "new": "its log is another one; all of its events run",
}


def _unlapsed(held: Iterable[RedisHold]) -> list[RedisHold]:
    """Without what has lapsed, which must not be renewed any more."""
    now = clock.now()
    return [hold for hold in held if now < hold.own.sure_until]


def _no_member(key: str, field: str) -> str:
    return (
        f"field {field} of key {key} is no member: another program wrote or damaged it; if it stays, remove it: "
        f"HDEL {key} {field}"
    )


def _succeeded(reply: Any) -> list[bytes]:
    return [] if isinstance(reply, ResponseError) else reply
