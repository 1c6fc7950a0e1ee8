"""A member of a group: receives what its partitions hold and settles what is done."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from redis.exceptions import ResponseError

from onward import clock
from onward.brokers.base import AsideRecord, BrokerLag, Progress
from onward.brokers.core.subscription import SubscriptionShell
from onward.brokers.redis import reader, settling
from onward.brokers.redis.doorbell import ClusterDoorbell, RedisDoorbell
from onward.brokers.redis.keys import Keyspace
from onward.brokers.redis.lease_keeper import LeaseKeeper
from onward.brokers.redis.link import Link, LinkThread
from onward.brokers.redis.log_scripts import LAG
from onward.brokers.redis.member import RedisHold, RedisHoldings, RedisPlace
from onward.brokers.redis.positions import hex_of, id_of
from onward.errors import AsideError, BrokerError
from onward.event import Partition
from onward.settings import Settings

_LEAVE_S = 2.0  # to report that we leave; otherwise the others notice when our leases end
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
        holds = self._holdings.announced()
        return await self._thread.run(lambda link: _lags(link, self._leases.member.keyspace, holds)) if holds else {}

    def _collected(self, now: float, *, sure: bool) -> None:
        self._leases.look_at(self._holdings.deadline if sure else now)

    async def _read(self, limit: int, max_bytes: int) -> None:
        if self._leases.failure is not None or self._holdings.is_stocked(limit, max_bytes):
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


def _lags(link: Link, keyspace: Keyspace, holds: Sequence[RedisHold]) -> dict[Partition, BrokerLag]:
    """What was read and not handed out counts as undelivered."""
    found = [(hold.partition, keyspace.of(hold.partition), hex_of(hold.ahead.next_out)) for hold in holds]
    replies = link.call(*[LAG([keys.stream, keys.meta, keys.marks], place) for _, keys, place in found])
    return {partition: _lag(reply) for (partition, _, _), reply in zip(found, replies, strict=True)}


def _lag(reply: object) -> BrokerLag:
    if isinstance(reply, ResponseError) or not isinstance(reply, list) or reply[0] < 0:
        return BrokerLag(None, None)
    count, first_ms, now_ms = reply
    return BrokerLag(count, max(0.0, (int(now_ms) - int(first_ms)) / 1000) if first_ms else None)
