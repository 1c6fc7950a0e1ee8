"""A member of a group: receives what its partitions hold and settles what is done."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from onward import clock
from onward.brokers.base import AsideRecord, BrokerLag, Progress
from onward.brokers.core.holdings import Chunk
from onward.brokers.core.subscription import SubscriptionShell
from onward.brokers.redis import reader, settling
from onward.brokers.redis.doorbell import ClusterDoorbell, RedisDoorbell
from onward.brokers.redis.foreign.lost_entries import report_unread
from onward.brokers.redis.foreign.scripts import LAG_STREAM
from onward.brokers.redis.keys import Keyspace, PartitionKeys
from onward.brokers.redis.lease_keeper import LeaseKeeper
from onward.brokers.redis.link import Link, LinkThread
from onward.brokers.redis.log_scripts import LAG
from onward.brokers.redis.member import RedisHold, RedisHoldings, RedisPlace
from onward.brokers.redis.positions import hex_of, id_of, ms_of
from onward.brokers.redis.scripts import Command
from onward.errors import AsideError, BrokerError
from onward.event import Partition
from onward.settings import Settings

log = logging.getLogger("onward")

_LEAVE_S = 2.0  # to report that we leave; otherwise the others notice when our leases end
_PROJECT_S = 0.5  # how long a pending list may lack what was handed out
_LOOK_S = 1.0  # how long a lost ring of the doorbell may go unnoticed


class RedisAccess(NamedTuple):
    """The subscription's ways to the server."""

    thread: LinkThread
    doorbell: RedisDoorbell | ClusterDoorbell


class RedisSubscription(SubscriptionShell[RedisPlace]):
    def __init__(self, keeper: LeaseKeeper, holdings: RedisHoldings, access: RedisAccess, settings: Settings) -> None:
        super().__init__(keeper, holdings, look_s=min(_LOOK_S, settings.max_poll_gap_s / 3))
        self._leases = keeper
        self._thread, self._doorbell = access
        self._timeout_s = settings.publish_timeout_s
        keyspace = keeper.member.keyspace
        self._projects_at = 0.0
        self._has_streams = any(keyspace.mapped(topic) for topic in keeper.member.topics)  # of others

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        holds, lost = self._holdings.settleable(progress, aside)
        if lapsed := {each for each, hold in holds.items() if hold.own.sure_until <= clock.now()}:
            self._leases.look_at(0.0)  # they are fenced, whatever the server would say
            named = [*(each.partition for each in progress), *(record.partition for record in aside)]
            lost |= dict.fromkeys([partition for partition in named if partition in lapsed])
            holds = {partition: hold for partition, hold in holds.items() if partition not in lapsed}
        parts, refused = settling.parts(holds, progress, aside, gone)
        if parts:
            answer = await self._thread.run(lambda link: settling.settle(link, self._leases.member, parts))
            self._stop_intruded(parts)
            lost |= dict.fromkeys(answer.lost)
            refused |= answer.refused
            if answer.lost or answer.failed:
                self._leases.look_at(0.0)
            if answer.failed and not refused:
                raise BrokerError(f"Redis did not settle: {next(iter(answer.failed.values()))}")
            refused |= answer.failed if refused else {}  # the others count as settled
        if refused:
            why = "; ".join(dict.fromkeys(refused.values()))
            raise AsideError(
                f"records of group {self._leases.group} could not be set aside: {why}",
                partitions=list(refused),
                lost=list(lost),
            )
        return list(lost)

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        holds = dict.fromkeys(self._holdings.known(partitions), drained)
        if holds:
            await self._turned(self._leases.release(holds), self._timeout_s)

    def troubles(self) -> Sequence[str]:
        return [*super().troubles(), *filter(None, [self._doorbell.trouble])]

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        """It also notices events that were removed before they were read."""
        with self._holdings.lock:
            read = [ReadSoFar.of(hold) for hold in self._holdings.announced()]
        if not read:
            return {}
        replies = await self._thread.run(lambda link: _counted(link, self._leases.member.keyspace, read))
        for so_far, reply in zip(read, replies, strict=True):
            if reply is None or reply.appended is None:
                continue
            if missing := so_far.hold.own.count.missing(reply.appended, so_far.events):
                self._report_missing(so_far.hold, missing)
        return {each.hold.partition: each.lag(reply) for each, reply in zip(read, replies, strict=True)}

    def _report_missing(self, hold: RedisHold, missing: int) -> None:
        member, partition = self._leases.member, hold.partition
        if hold.own.shard is not None:
            if hold.own.shard.projection is not None:
                hold.own.shard.projection.recount()
            return report_unread(member, partition, missing)
        if member.is_passing:  # trimming does not wait for it
            return
        member.figures.lost(partition, missing)
        log.error(
            "%s: %s removed from stream %s before group %s had read %s; the content is lost. Stop the program that "
            "uses XTRIM, XDEL or MAXLEN on it: Onward removes what is finished, by the retention settings",
            *(partition, "1 event was" if missing == 1 else f"{missing:,} events were"),
            *(member.keyspace.of(partition).stream, member.group, "it" if missing == 1 else "them"),
        )

    def _collected(self, now: float, *, sure: bool) -> None:
        self._leases.look_at(self._holdings.deadline if sure else now)

    async def _read(self, limit: int, max_bytes: int) -> None:
        if self._leases.failure is not None:
            return
        if self._has_streams:
            await self._project()
        if self._holdings.is_stocked(limit, max_bytes):
            return
        wants = reader.wanted(self._holdings, limit, max_bytes)
        keyspace = self._leases.member.keyspace
        ids = {keyspace.of(hold.partition).stream: id_of(max(0, hold.ahead.position - 1)) for hold, _ in wants}
        if not wants or self._doorbell.is_quiet(ids):
            return
        try:
            found = await self._thread.run(lambda link: self._fetched(link, wants, ids))
        except BrokerError:
            return self._leases.look_at(0.0)  # the keeper of the leases reports it
        for each in found:
            if not each.is_ours:
                self._leases.look_at(0.0)
            reader.stock(self._holdings, self._leases.member, each)

    async def _project(self) -> None:
        """Let the real groups show what was handed out, where no settle has done that lately."""
        behind = [hold for hold in self._holdings.announced() if _is_behind(hold)]
        if not behind or clock.now() < self._projects_at:
            return
        self._projects_at = clock.now() + _PROJECT_S
        parts = [settling.projection_of(hold) for hold in behind]
        try:
            await self._thread.run(lambda link: settling.settle(link, self._leases.member, parts))
        except BrokerError:
            return self._leases.look_at(0.0)
        self._stop_intruded(parts)

    def _stop_intruded(self, parts: Sequence[settling.PartitionSettle]) -> None:
        """Another consumer reads the group: what was read ahead is not handed out."""
        for part in parts:
            if part.hold.own.shard is not None and part.hold.own.shard.intruders:
                self._holdings.throttle(part.hold, throttled=True)
                if not part.hold.revoking:
                    self._leases.look_at(0.0)

    def _fetched(self, link: Link, wants: Sequence[tuple[RedisHold, int]], ids: Mapping[str, str]) -> list[reader.Read]:
        """In the thread: read, and let the doorbell listen from there if there was nothing."""
        found = reader.read(link, self._leases.member, wants)
        if not all(each.is_ours for each in found):
            link.refresh()  # the incarnation may have changed under this connection
        is_idle = all(each.is_ours and not each.error and not each.entries for each in found)
        if is_idle and (client := self._doorbell.arm(ids)):
            link.call(("CLIENT", "UNBLOCK", client))
        return found

    async def _leave(self) -> None:
        try:
            await self._turned(self._leases.leave(), min(_LEAVE_S, self._timeout_s))
        except BrokerError:
            pass  # the server does not answer: the leases end by themselves
        finally:
            self._leases.stop()
            self._doorbell.stop()
            with self._holdings.lock:
                self._holdings.held.clear()
            await self._thread.close()

    async def _turned(self, turn: "asyncio.Future[None]", within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await turn
        except TimeoutError:
            raise BrokerError(f"Redis did not answer in {within_s:g} s; {'; '.join(self.troubles())}") from None


def _is_behind(hold: RedisHold) -> bool:
    shard = hold.own.shard
    if shard is None or shard.projection is None or shard.intruders:
        return False
    return shard.projection.is_behind(hold.ahead.next_out)


class ReadSoFar(NamedTuple):
    """A partition at one moment."""

    hold: RedisHold
    position: int  # the next one to read
    appended: int | None  # events before it; None: unknown
    events: int  # read by this ownership
    ahead: int  # of these, not yet handed out
    first_ms: int | None  # when the first of those was published

    @classmethod
    def of(cls, hold: RedisHold) -> "ReadSoFar":
        chunks = [chunk for chunk in hold.ahead.chunks if isinstance(chunk, Chunk)]
        first_ms = ms_of(chunks[0].deliveries[0].position) if chunks else None
        count = hold.own.count
        return cls(hold, hold.ahead.position, count.appended, count.read, hold.ahead.events, first_ms)

    def lag(self, counted: "Counted | None") -> BrokerLag:
        """What was read and not handed out counts as undelivered."""
        if counted is None:
            return BrokerLag(None, None)
        first_ms = counted.first_ms if self.first_ms is None else self.first_ms
        age_s = None if first_ms is None else max(0.0, (counted.now_ms - first_ms) / 1000)
        return BrokerLag(counted.unread + self.ahead, age_s)


class Counted(NamedTuple):
    """What the server counts from a position on."""

    unread: int
    first_ms: int | None  # when the first of them was published
    now_ms: int
    appended: int | None  # all events before the first of them; None: unknown

    @classmethod
    def of(cls, reply: Any) -> "Counted | None":
        """None: unknown."""
        if isinstance(reply, ResponseError) or reply[0] < 0:
            return None
        unread, first_ms, now_ms, appended = reply
        counted = None if appended == b"" else appended
        return cls(unread, int(first_ms) if first_ms else None, int(now_ms), counted)


def _counted(link: Link, keyspace: Keyspace, read: Sequence[ReadSoFar]) -> list[Counted | None]:
    replies = link.call(*[_count(keyspace.of(each.hold.partition), each) for each in read])
    return list(map(Counted.of, replies))


def _count(keys: PartitionKeys, read: ReadSoFar) -> Command:
    place = hex_of(read.position)
    if read.hold.own.shard is not None:
        return LAG_STREAM([keys.stream], place, "" if read.appended is None else read.appended)
    return LAG([keys.stream, keys.meta, keys.marks], place)
