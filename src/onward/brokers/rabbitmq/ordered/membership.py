"""Keeps a member in an ordered group: its connection, its seats, its presence, and its fair share of the partitions.

Everything runs in the loop of the I/O thread, except for the properties and `polled`.
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from onward import clock
from onward.brokers.base import AsideRecord, Progress
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError, Connection
from onward.brokers.rabbitmq.aside.aside_log import AsideLost
from onward.brokers.rabbitmq.connecting import LoggedCauses, pauses
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.ordered.fair_share import FairShare
from onward.brokers.rabbitmq.ordered.log_reader import PartitionReader
from onward.brokers.rabbitmq.ordered.ordered_hold import OrderedHold
from onward.brokers.rabbitmq.ordered.seat import TokenSeat
from onward.brokers.rabbitmq.ordered.session_tasks import SessionTasks
from onward.brokers.rabbitmq.ordered.tenancy import Tenancy
from onward.brokers.rabbitmq.ordered.tenancy_parts import TenancyParts
from onward.brokers.rabbitmq.ordered.token import Token, wait_s
from onward.brokers.rabbitmq.presence import Presence, PresencePlace, PresenceSelf
from onward.brokers.rabbitmq.registry.registry_fold import TopicEntry
from onward.errors import BrokerError, GroupDropped, OnwardError
from onward.event import Partition

log = logging.getLogger("onward")

_LEAVE_S = 3.0
_LONGEST_TURN_S = 1.0
_WELL_S = 10.0  # a session that lasted so long was well
_MOST_CLOSED = 1_000  # tenures to remember


class OrderedMember(NamedTuple):
    """Who joins what."""

    text: str  # as MemberInfo.parse reads it
    topics: Sequence[TopicEntry]
    gone: frozenset[str]  # names of members that have no process left
    owner: str  # unique for this subscription


class MemberState:
    """Whether a member takes partitions. Any thread may read it."""

    def __init__(self) -> None:
        self.polled_at = clock.now()
        self.is_idle = False  # receive was not called for max_poll_gap_s
        self.is_retiring = False  # it released partitions that were not revoked, so it is about to leave
        self.is_leaving = False
        self.failure: OnwardError | None = None
        self.trouble = ""
        self.causes = LoggedCauses()
        self.connection: Connection | None = None

    @property
    def alarm(self) -> str | None:
        """Why the server accepts no messages from this member."""
        return None if self.connection is None or self.connection.is_closed else self.connection.blocked

    @property
    def is_open(self) -> bool:
        return not (self.is_idle or self.is_retiring or self.is_leaving or self.failure is not None)


class OrderedMembership:
    def __init__(self, ground: RabbitGround, member: OrderedMember, parts: TenancyParts) -> None:
        self.state = MemberState()
        self._ground = ground
        self._member = member
        self._parts = parts
        self._seats = {
            partition: TokenSeat(partition, SeatDesk(self), parts)
            for topic in member.topics
            for partition in (Partition(topic.name, index) for index in range(topic.partitions))
        }
        me = PresenceSelf(member.owner, member.text, parts.settings.lease_s, member.gone)
        self._shares = {
            topic.name: FairShare(topic, self._presence(topic.name, me), self._seats_of(topic.name))
            for topic in member.topics
        }
        self._tenures = itertools.count(1)
        self._closed: dict[str, None] = {}  # tenures that have ended here
        self._kicked = asyncio.Event()
        self._tasks = SessionTasks()

    def _presence(self, topic: str, me: PresenceSelf) -> Presence:
        place = PresencePlace(topic, self.group)
        return Presence(place, me, held=lambda: self._held(topic), on_change=self.kick)

    def _seats_of(self, topic: str) -> list[TokenSeat]:
        return [seat for seat in self._seats.values() if seat.partition.topic == topic]

    def _held(self, topic: str) -> dict[int, tuple[int, int]]:
        found = {seat.partition.index: seat.standing for seat in self._seats_of(topic)}
        return {index: standing for index, standing in found.items() if standing is not None}

    # -- for the subscription, from any thread ----------------------------------------------------------------------

    @property
    def group(self) -> str:
        return self._parts.group

    @property
    def sure_until(self) -> float:
        settings, state = self._parts.settings, self.state
        held = [hold.own.sure_until for hold in self._parts.holdings.all()]
        return min([*held, state.polled_at + settings.max_poll_gap_s], default=0.0)

    @property
    def failure(self) -> OnwardError | None:
        return self.state.failure

    @property
    def troubles(self) -> Sequence[str]:
        if self.state.failure is not None:
            return [str(self.state.failure)]
        found = [self.state.trouble] if self.state.trouble else []
        if alarm := self.state.alarm:
            found.append(
                f"RabbitMQ has an alarm ({alarm}): group {self.group} can store no progress; free memory or disk"
            )
        found += [share.presence.trouble for share in list(self._shares.values()) if share.presence.trouble]
        for seat in list(self._seats.values()):
            reader = seat.tenancy.reader if seat.tenancy is not None else None
            if why := seat.trouble.why if reader is None else reader.trouble:
                found.append(f"{seat.partition} of group {self.group} stands still: {why}")
        return found

    def polled(self) -> None:
        self.state.polled_at = clock.now()
        if self.state.is_idle:
            self._ground.io.post(self.kick)

    # -- for the subscription, in the loop --------------------------------------------------------------------------

    def kick(self) -> None:
        """Take a turn soon."""
        self._kicked.set()

    def tenancy_of(self, hold: OrderedHold) -> Tenancy | None:
        tenancy = self._seats[hold.partition].tenancy
        return tenancy if tenancy is not None and tenancy.hold is hold else None

    async def settle(self, hold: OrderedHold, progress: Progress) -> bool:
        """False: the partition is not ours any more."""
        tenancy = self.tenancy_of(hold)
        return tenancy is not None and await tenancy.settle(hold, progress)

    async def store(self, hold: OrderedHold, records: Sequence[AsideRecord]) -> str | None:
        """Store records of this partition. Returns why they were refused. Raises AsideLost if it is not ours."""
        return await self._owned(hold).store(records)

    async def remove(self, hold: OrderedHold, ids: Sequence[str]) -> None:
        """Raises AsideLost if the partition is not ours."""
        await self._owned(hold).remove(ids)

    def reader_of(self, hold: OrderedHold) -> PartitionReader | None:
        tenancy = self.tenancy_of(hold)
        return None if tenancy is None else tenancy.reader

    def _owned(self, hold: OrderedHold) -> Tenancy:
        tenancy = self.tenancy_of(hold)
        if tenancy is None:
            raise AsideLost(f"{hold.partition} of group {self.group} is not ours any more")
        return tenancy

    async def release(self, holds: Collection[OrderedHold], *, drained: bool) -> None:
        if any(not hold.revoking for hold in holds) and not self.state.is_retiring:
            self.state.is_retiring = True
            self._announce(leaving=True)
        mine = [self._seats[hold.partition] for hold in holds if self.tenancy_of(hold) is not None]
        await asyncio.gather(*[seat.give_up(drained=drained) for seat in mine])
        self.kick()

    async def leave(self) -> None:
        """Give everything up and close the connection. Bounded."""
        self.state.is_leaving = True
        self._announce(leaving=True)
        giving = [asyncio.ensure_future(seat.give_up(drained=False)) for seat in self._seats.values() if seat.is_busy]
        if giving:
            await asyncio.wait(giving, timeout=_LEAVE_S)
        await self._tasks.close()

    # -- the session ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._tasks.start(self._run())

    async def _run(self) -> None:
        waits = pauses()
        while not self.state.is_leaving and self.state.failure is None:
            since = clock.now()
            self.state.connection = connection = await self._ground.connect(
                f"group {self.group}", report=self._unreachable
            )
            try:
                await self._session(connection)
            except (AmqpError, BrokerError) as error:
                if clock.now() - since > _WELL_S:
                    waits = pauses()
                    self.state.causes.clear()
                self._report(f"group {self.group} has no connection: {error}")
                connection.abandon(f"the session has ended: {error}")  # so that the next one tries another host first
                await asyncio.sleep(next(waits))
            except Exception as error:
                log.exception("RabbitMQ: group %s: the session of a member failed", self.group)
                self._report(f"group {self.group}: unexpected error, tried again: {error!r}; the log has its traceback")
                await asyncio.sleep(next(waits))
            finally:
                # The connection first: while the server has an alarm, it does not answer to the close of a channel.
                await connection.close()
                await self._tasks.end_session()

    def _unreachable(self, why: str) -> None:
        self.state.trouble = f"group {self.group} has no connection: {why}"

    def _report(self, trouble: str) -> None:
        if not self.state.is_leaving:
            self.state.trouble = trouble
            self.state.causes.report(f"RabbitMQ: {self.state.trouble}")

    async def _session(self, connection: Connection) -> None:
        """Until the connection ends."""
        await self._check_group()
        for share in self._shares.values():
            await share.presence.open(connection)
        self.state.trouble = ""
        beat_at = 0.0
        while not connection.is_closed and self.state.failure is None:
            now = clock.now()
            self._turn(connection, now)
            if now >= beat_at:
                beat_at = now + self._parts.settings.lease_s / 3
                self._announce()
            await self._wait(connection, beat_at)
        if connection.is_closed:
            raise connection.closing.result()

    async def _wait(self, connection: Connection, beat_at: float) -> None:
        over_at = min(share.presence.over_at() for share in self._shares.values())
        until = min(beat_at, over_at + 0.01, self._parts.holdings.deadline, self._idle_at)
        kicked = asyncio.ensure_future(self._kicked.wait())
        either: list[asyncio.Future[Any]] = [kicked, connection.closing]
        timeout_s = min(_LONGEST_TURN_S, max(0.001, until - clock.now()))
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            kicked.cancel()
        self._kicked.clear()

    @property
    def _idle_at(self) -> float:
        gap_s = self._parts.settings.max_poll_gap_s
        return float("inf") if self.state.is_idle else self.state.polled_at + gap_s

    def _turn(self, connection: Connection, now: float) -> None:
        self._look_for_polls(now)
        holdings, state = self._parts.holdings, self.state
        overdue = [hold for hold in holdings.all() if hold.deadline <= now]
        if overdue:
            self._lose(overdue)
        if state.is_open:
            for seat in self._seats.values():
                self._tasks.keep(seat.partition, functools.partial(seat.run, connection))
            for share in self._shares.values():
                self._rebalance(share)
        else:
            self._tasks.stop(seat.partition for seat in self._seats.values() if not seat.is_busy)
            for seat in self._seats.values():
                seat.withdraw()
        for share in self._shares.values():
            self._tasks.keep(share.presence, functools.partial(share.presence.stay, connection))
            share.look(now, is_sure=state.is_open and state.alarm is None)
            share.wake()
        for reader in tuple(self._parts.stalled):
            reader.resume()

    def _look_for_polls(self, now: float) -> None:
        is_idle = now > self.state.polled_at + self._parts.settings.max_poll_gap_s
        if is_idle and not self.state.is_idle:
            log.warning("RabbitMQ: receive was not called for max_poll_gap_s: leaving group %s", self.group)
            self._lose(self._parts.holdings.all())
            self._announce(leaving=True)
        self.state.is_idle = is_idle

    def _lose(self, holds: Sequence[OrderedHold]) -> None:
        """These must not be ours any more. Nothing of them starts from now on."""
        self._parts.holdings.drop(holds, fenced=True)
        for hold in holds:
            if self.tenancy_of(hold) is not None:
                self._tasks.beside(self._seats[hold.partition].give_up(drained=False))

    def _rebalance(self, share: FairShare) -> None:
        announced = [seat.withdraw() for seat in share.surplus()]
        if revoked := [hold for hold in announced if hold is not None]:
            self._parts.holdings.revoke(revoked, grace_s=self._parts.settings.revoke_grace_s)

    def _announce(self, *, leaving: bool = False) -> None:
        for share in self._shares.values():
            share.presence.announce(leaving=leaving or not self.state.is_open)

    # -- the group at the server ------------------------------------------------------------------------------------

    async def _check_group(self) -> None:
        """Fail if the group or a topic was dropped."""
        registry = self._ground.registry
        await registry.catch_up()
        for topic in self._member.topics:
            known = registry.topic(topic.name)
            if known is None or known.log_id != topic.log_id or self.group not in registry.groups(topic.name):
                self._fail(topic.name)

    def _fail(self, topic: str) -> None:
        holdings = self._parts.holdings
        self.state.failure = GroupDropped(
            f"group {self.group} of topic {topic} was dropped while this member was away; what it had not settled is "
            "void. Start it again to create the group: it begins where `start` says"
        )
        holdings.drop(holdings.all(), fenced=True)
        raise self.state.failure

    # -- for the seats ----------------------------------------------------------------------------------------------

    def share_of(self, partition: Partition) -> FairShare:
        return self._shares[partition.topic]

    def new_tenure(self) -> str:
        return f"{self._member.owner}:{next(self._tenures)}"

    def ended(self, tenure: str) -> None:
        self._closed[tenure] = None
        while len(self._closed) > _MOST_CLOSED:
            del self._closed[next(iter(self._closed))]

    def wait_s(self, partition: Partition, token: Token) -> float:
        gone = self.share_of(partition).presence.gone
        return wait_s(token.awaits, gone=gone, closed=self._closed, grace_s=self._parts.settings.takeover_grace_s)

    def changed(self) -> None:
        self._announce()
        self.kick()

    async def queue_is_missing(self, partition: Partition) -> None:
        await self._check_group()
        connection = await self._ground.query()
        channel = await connection.channel()
        await channel.declare_queue(names.token_queue(*partition, self.group), arguments=names.TOKEN_ARGUMENTS)
        await channel.close()


class SeatDesk:
    """The member, as one of its seats sees it."""

    def __init__(self, membership: OrderedMembership) -> None:
        self._membership = membership

    @property
    def is_open(self) -> bool:
        return self._membership.state.is_open

    def accepts(self, partition: Partition) -> bool:
        return self._membership.share_of(partition).has_room()

    def accepted_anyway(self, partition: Partition) -> None:
        self._membership.share_of(partition).accepted_anyway()

    def new_tenure(self) -> str:
        return self._membership.new_tenure()

    def ended(self, tenure: str) -> None:
        self._membership.ended(tenure)

    def wait_s(self, partition: Partition, token: Token) -> float:
        return self._membership.wait_s(partition, token)

    def took_over(self, partition: Partition, token: Token) -> None:
        if token.awaits is not None and token.awaits.lease_s:
            self._membership.share_of(partition).presence.forget(token.awaits.tenure.partition(":")[0])
        self._membership.changed()

    def changed(self) -> None:
        self._membership.changed()

    def is_claimed_elsewhere(self, partition: Partition) -> bool:
        return self._membership.share_of(partition).is_claimed(partition.index)

    def may_replace(self, partition: Partition) -> bool:
        presence = self._membership.share_of(partition).presence
        return not self.is_claimed_elsewhere(partition) and presence.owner <= min(
            presence.live(), default=presence.owner
        )

    async def queue_is_missing(self, partition: Partition) -> None:
        await self._membership.queue_is_missing(partition)
