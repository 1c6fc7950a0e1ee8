"""A member of a work group: connects, consumes, and starts again when something has ended."""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple
from uuid import uuid4

from onward import clock
from onward.brokers.base import Asks, Assigned, MemberInfo
from onward.brokers.core.holdings import Hold, Holdings
from onward.brokers.rabbitmq.amqp import AmqpError, Connection
from onward.brokers.rabbitmq.aside.aside import AsidePlace, RabbitAsides
from onward.brokers.rabbitmq.connecting import LoggedCauses, pauses, reconnecting
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.operate.figures import RabbitFigures
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel
from onward.brokers.rabbitmq.presence import Presence, PresencePlace, PresenceSelf
from onward.brokers.rabbitmq.work import work_objects
from onward.brokers.rabbitmq.work.mover import Mover
from onward.brokers.rabbitmq.work.prefetch import Prefetch
from onward.brokers.rabbitmq.work.retrying import RungDeck
from onward.brokers.rabbitmq.work.route_watch import RouteWatch
from onward.brokers.rabbitmq.work.work_place import CONSUMER_TIMEOUT_S, WorkPlace
from onward.brokers.rabbitmq.work.work_queue import WorkChannel, tier_of_message
from onward.brokers.rabbitmq.work.work_session import WorkConnections, WorkIntake, WorkSelf, WorkSession
from onward.brokers.rabbitmq.work.work_settling import WorkSettling
from onward.errors import BrokerError, GroupDropped, OnwardError
from onward.event import Partition

_TEND_S = 0.5
_PAUSE_S = 0.05  # a pause that is shorter does not stop the consumers
_LEAVE_S = 3.0
_HEARTBEATS = 2.0  # the server gives up a silent connection after 2 to 3 heartbeats
_NOTES = 3  # in the time of a lease
_WELL_S = 10.0  # a session that lasted so long was well; the next one starts without a pause


class WorkOwnership(NamedTuple):
    """What belongs to one ownership of a shared partition."""

    session: WorkSession
    intake: WorkIntake
    settling: WorkSettling
    routes: RouteWatch

    @property
    def work(self) -> WorkChannel:
        return self.intake.work


WorkHold = Hold[WorkOwnership]
WorkHoldings = Holdings[WorkOwnership]


class WorkTools(NamedTuple):
    """What all work groups of a broker share."""

    ground: RabbitGround
    asides: RabbitAsides
    counts: RabbitFigures
    epochs: Iterator[int]
    restore: Callable[[Connection], Awaitable[None]]  # declare the application's own queues again


class WorkMember:
    """One member of one group of one topic. `polled`, `sure_until` and `troubles` may be called in any thread, all else
    runs in the I/O thread."""

    def __init__(
        self, tools: WorkTools, place: WorkPlace, me: PresenceSelf, asks: Asks | None, holdings: WorkHoldings
    ) -> None:
        self.place = place
        self.failure: OnwardError | None = None  # why it can never receive again
        self._tools = tools
        self._me = me
        self._asks = asks
        self._holdings = holdings
        self._deck = RungDeck()
        self._life = MemberLife(clock.now())
        self._hold: WorkHold | None = None

    # -- in any thread ------------------------------------------------------------------------------------------------

    @property
    def sure_until(self) -> float:
        """A shared partition has no lease: the server gives the messages to others when it loses the connection. It
        does not before it has missed two heartbeats, or the connection has ended, or nothing was received for long."""
        hold, tools = self._hold, self._tools
        if hold is None or hold.own.session.ended.done():
            return 0.0
        beats_s = _HEARTBEATS * tools.ground.address.client.heartbeat_s
        return min(self._life.polled_at + tools.ground.settings.max_poll_gap_s, hold.own.session.proven_at + beats_s)

    @property
    def troubles(self) -> list[str]:
        hold = self._hold
        if self._life.is_leaving:
            return []
        if hold is None:
            return [self._life.trouble] if self._life.trouble else []
        session = hold.own.session
        if session.ended.done():
            return [session.why_ended]
        blocked = session.links.sending.blocked
        alarm = f"RabbitMQ has an alarm ({blocked}): retries and dead letters of {self.place} wait" if blocked else ""
        return [each for each in (session.diversions.trouble, hold.own.routes.trouble, alarm) if each]

    def polled(self) -> None:
        life = self._life
        life.polled_at = clock.now()
        if life.is_asleep:
            self._tools.ground.io.post(life.wake.set)

    # -- in the I/O thread --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Declare what the group needs, then join it and stay. Raises BrokerError if that cannot be declared."""
        self.place = await reconnecting(self._declared)
        self._life.task = asyncio.create_task(self._run())

    async def _declared(self) -> WorkPlace:
        ground = self._tools.ground
        return await work_objects.declare(await ground.query(), ground.registry, self.place, joins=True)

    async def wake(self) -> None:
        """Look at what has changed, at once and after a pause has lasted."""
        self._life.wake.set()
        asyncio.get_running_loop().call_later(_PAUSE_S, self._life.wake.set)

    async def release(self) -> None:
        """Give everything back, and never get anything again."""
        self._life.is_leaving = True
        hold, self._hold = self._hold, None
        if hold is not None:
            self._holdings.drop([hold], fenced=False)
            session = hold.own.session
            with contextlib.suppress(AmqpError, BrokerError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await session.leave(hold.own.intake)
            session.end("released")

    async def close(self) -> None:
        await self.release()
        task = self._life.task
        if task is not None:
            self._life.wake.set()
            await asyncio.wait([task], timeout=_LEAVE_S)
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        waits, life = pauses(), self._life
        while not life.is_leaving:
            await self._until_polled()
            since = clock.now()
            try:
                await self._serve()
            except GroupDropped as error:
                self.failure = error
                self._holdings.bell.ring()
                return
            except (AmqpError, BrokerError) as error:
                if clock.now() - since > _WELL_S:
                    waits = pauses()
                    life.causes.clear()
                self._report(str(error))
            life.wake.clear()  # the end of the session has set it
            if not life.is_leaving:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(next(waits)):
                        await life.wake.wait()

    async def _until_polled(self) -> None:
        """Wait while nothing is received: events that were delivered now would have to be taken away again."""
        life, gap_s = self._life, self._tools.ground.settings.max_poll_gap_s
        while clock.now() > life.polled_at + gap_s and not life.is_leaving:
            life.is_asleep = True
            await life.wake.wait()
            life.wake.clear()
        life.is_asleep = False

    async def _serve(self) -> None:
        """One session, from the connection to its end."""
        ground, place = self._tools.ground, self.place
        links = await WorkConnections.open(functools.partial(ground.connect, report=self._unreachable), place)
        settings = ground.settings
        me = WorkSelf(self._me.owner, MemberInfo.parse(self._me.member).name, settings.lease_s)
        session = WorkSession(links, place, me, self._deck)
        session.ended.add_done_callback(lambda _: self._life.wake.set())
        try:
            await self._check_group()
            await self._restore(links.sending)
            await work_objects.declare(links.sending, ground.registry, place, joins=False)
            hold = await self._join(session)
            if not self._life.is_leaving:
                self._hold = hold
                self._holdings.add(hold)
                self._life.trouble = ""
                await self._tend(session, hold)
        finally:
            if session.ended.done():
                self._life.trouble = session.why_ended
            hold_, self._hold = self._hold, None
            if hold_ is not None:
                self._holdings.drop([hold_], fenced=True)
            await session.close()
        if not self._life.is_leaving:
            raise BrokerError(session.why_ended)

    async def _check_group(self) -> None:
        registry, place = self._tools.ground.registry, self.place
        await registry.catch_up()
        if place.group not in registry.groups(place.topic):
            raise GroupDropped(f"{place} was dropped while this member was away; start it again to create the group")

    async def _restore(self, connection: Connection) -> None:
        """A queue that the application declares may have been deleted. Its own ones are declared in any case."""
        if self.place.is_own or not self._tools.ground.settings.auto_declare:
            return
        probe = ProbeChannel(connection)
        try:
            has_all = all([await probe.has_queue(queue) for queue in self.place.queues.values()])
        finally:
            await probe.close()
        if not has_all:
            await self._tools.restore(connection)

    async def _join(self, session: WorkSession) -> WorkHold:
        tools, place, asks = self._tools, self.place, self._asks
        settings = tools.ground.settings
        rounds = max(1, int(0.95 * CONSUMER_TIMEOUT_S / asks.timeout_s)) if asks and asks.timeout_s else 1
        prefetch = Prefetch(
            asks.concurrency if asks else None,
            rounds,
            max_in_flight=settings.max_in_flight,
            max_bytes=settings.max_in_flight_bytes // len(place.queues),
        )
        presence = Presence(PresencePlace(place.topic, place.group), self._me)
        intake = await session.open(presence, prefetch, self._rang)
        letters = functools.partial(
            tools.asides.letters, session.links.sending, AsidePlace(place.topic, place.group, "work")
        )
        settling = WorkSettling(session, intake, letters, tools.counts)
        session.spawn(self._ping(session))
        session.spawn(self._announce(presence))
        session.spawn(Mover(session, tools.asides, settling.lock).run())
        routes = RouteWatch(session.links.sending, tools.ground.registry, session.place, creates=settings.auto_declare)
        if place.is_own:
            session.spawn(routes.run())
        assigned = Assigned(
            Partition(place.topic, 0), next(tools.epochs), None, uuid4().hex, stored=None, unclean=False, shared=True
        )
        return Hold(assigned, WorkOwnership(session, intake, settling, routes), position=0)

    def _rang(self) -> None:
        self._holdings.bell.ring()
        hold = self._hold
        if hold is not None and hold.own.work.prefetch.differs(hold.own.intake.consumers.prefetch):
            self._life.wake.set()

    async def _ping(self, session: WorkSession) -> None:
        """Prove that the connection lives, and that the queues exist."""
        while True:
            await asyncio.sleep(self._tools.ground.address.client.heartbeat_s / 4)
            await session.depth()

    async def _announce(self, presence: Presence) -> None:
        while True:
            await asyncio.sleep(self._me.lease_s / _NOTES)
            presence.announce()

    async def _tend(self, session: WorkSession, hold: WorkHold) -> None:
        """Until the session ends, do what has become necessary."""
        life, gap_s = self._life, self._tools.ground.settings.max_poll_gap_s
        paused_at: float | None = None
        while not session.ended.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_TEND_S, gap_s / 10)):
                    await life.wake.wait()
            life.wake.clear()
            now = clock.now()
            if now > life.polled_at + gap_s:
                session.end(f"nothing was received for max_poll_gap_s={gap_s:g} s")
            if session.ended.done():
                return
            paused_at = None if not hold.paused else paused_at or now
            await _adjust(hold.own, stop=paused_at is not None and now >= paused_at + _PAUSE_S)

    def _unreachable(self, why: str) -> None:
        self._life.trouble = why

    def _report(self, why: str) -> None:
        self._life.trouble = why
        self._life.causes.report(f"{why}; trying again until it succeeds")


class MemberLife:
    """What a member knows about itself, also without a connection."""

    def __init__(self, now: float) -> None:
        self.polled_at = now
        self.is_asleep = False  # it waits until something is received
        self.is_leaving = False
        self.trouble = ""  # why it is not connected
        self.causes = LoggedCauses()
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


async def _adjust(own: WorkOwnership, *, stop: bool) -> None:
    """Stop the consumers, start them, or replace them by consumers with another prefetch."""
    work, consumers = own.work, own.intake.consumers
    count = work.prefetch.count
    if stop:
        if consumers.prefetch:
            await consumers.stop()
            await _give_back(own, keep=0)
    elif not consumers.prefetch or work.prefetch.differs(consumers.prefetch):
        shrinks = count < consumers.prefetch
        await consumers.start(count)
        if shrinks:
            await _give_back(own, keep=count)


async def _give_back(own: WorkOwnership, *, keep: int) -> None:
    """Let other members have the messages that wait here. Those that were returned before are sent again, because the
    server would count this as another return."""
    messages = own.work.surplus(keep=keep)
    again = [each for each in messages if each.redelivered and tier_of_message(each) in own.session.place.queues]
    own.work.acks.give_back([each.tag for each in messages if each not in again])
    if again:
        await own.session.return_(own.work, again)
