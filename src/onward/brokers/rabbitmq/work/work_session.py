"""Everything that a member of a work group has on its connections. If a part of it ends, all of it ends, and the member
starts a new session."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from onward import clock
from onward.brokers.rabbitmq.amqp import AmqpError, Connection, Received
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel
from onward.brokers.rabbitmq.presence import Presence, asked
from onward.brokers.rabbitmq.work.diversions import Diversions
from onward.brokers.rabbitmq.work.prefetch import Prefetch
from onward.brokers.rabbitmq.work.retrying import RungDeck, WorkCourier, WorkParcel
from onward.brokers.rabbitmq.work.suspects import StartLog, Suspects, SuspectStart
from onward.brokers.rabbitmq.work.work_message import arrived, resent, type_of
from onward.brokers.rabbitmq.work.work_place import SUSPECTS, WorkPlace
from onward.brokers.rabbitmq.work.work_queue import TierConsumers, WorkChannel, tier_of_message
from onward.errors import BrokerError

log = logging.getLogger("onward")

_ALIVE_PAUSE_S = 0.2


class WorkConnections(NamedTuple):
    """While the server has a memory alarm, it reads nothing from a connection that publishes. So messages arrive and
    are acknowledged on a connection that never publishes."""

    consuming: Connection
    sending: Connection

    @classmethod
    async def open(cls, connect: Callable[[str], Awaitable[Connection]], place: WorkPlace) -> "WorkConnections":
        consuming = await connect(f"{place} work")
        try:
            return cls(consuming, await connect(f"{place} retries"))
        except BaseException:
            await consuming.close()
            raise

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self))


class WorkSelf(NamedTuple):
    """This subscription. `owner` is unique; `member` is its text in the group."""

    owner: str
    member: str
    lease_s: float


class WorkSession:
    def __init__(self, links: WorkConnections, place: WorkPlace, me: WorkSelf, deck: RungDeck) -> None:
        self.links = links
        self.place = place
        self.courier = WorkCourier(links.sending, place, deck)
        self.suspects = Suspects(StartLog(links.sending, place.starts), me.owner, me.member, self._is_alive)
        self.diversions = Diversions(place, self.courier, self.suspects)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it has ended
        self.proven_at = 0.0  # when the last request was sent that the server has answered
        self._me = me
        self._presence: Presence | None = None
        self._parts = SessionParts(self.end)

    def on_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Call it at the end."""
        self._parts.closers.append(close)

    async def open(self, presence: Presence, prefetch: Prefetch, rang: Callable[[], None]) -> "WorkIntake":
        """Join the group and start to consume."""
        self._presence = presence
        for link in self.links:
            self.watch(link.closing)
        await presence.open(self.links.sending)
        self.spawn(presence.stay(self.links.sending, patience_s=self._me.lease_s))
        channel = await self.links.consuming.channel()
        self.watch(channel.closing)
        work: WorkChannel

        def special(tier: str, message: Received) -> None:
            self.diversions.sort(work, tier, message)

        work = WorkChannel(channel, prefetch, special=special, rang=rang)
        intake = WorkIntake(work, TierConsumers(channel, self.place, work.arrived, self._cancelled))
        self.spawn(self.diversions.hold(work))
        self.spawn(self.diversions.send_on(work))
        self.spawn(self.diversions.judge(work))
        self.proven_at = clock.now()
        await intake.consumers.start(prefetch.count)
        return intake

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it until the session ends. If it fails, the session ends."""
        self._parts.start(work)

    def watch(self, closing: "asyncio.Future[AmqpError]") -> None:
        closing.add_done_callback(lambda done: self.end(str(done.result())))

    @property
    def why_ended(self) -> str:
        """After its end, in any thread."""
        return f"RabbitMQ: {self.place}: {self.ended.result()}"

    def end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)

    async def depth(self) -> int:
        """How many messages wait in the queues. The answer also proves that the connection lives."""
        asked_at = clock.now()
        probe = ProbeChannel(self.links.consuming)
        try:
            states = [await probe.queue(queue) for queue in self.place.queues.values()]
        finally:
            await probe.close()
        self.proven_at = asked_at
        return sum([state.messages for state in states])

    async def leave(self, intake: "WorkIntake") -> None:
        """Stop to consume, and send back what would otherwise count as returned twice. Nothing is charged for it."""
        work = intake.work
        await intake.consumers.end()
        open_ = [*work.surplus(), *work.open.values(), *self.diversions.take_held()]
        await self.suspects.all_stay()
        await self.return_(work, [each for each in open_ if each.redelivered and tier_of_message(each) != SUSPECTS])

    async def return_(self, work: WorkChannel, messages: list[Received]) -> None:
        """Send these messages to their queues again, so that nothing is known of their earlier deliveries."""
        parcels = [
            WorkParcel(
                tier_of_message(each),
                None,
                resent(each, arrived(each).state, type_=type_of(each)),
                each.body,
            )
            for each in messages
        ]
        answers = await self.courier.send(parcels)
        work.acks.ack([each.tag for each, why in zip(messages, answers, strict=True) if why is None])

    async def close(self) -> None:
        """End all parts, in bounded time."""
        self.end("closed by us")
        if self._presence is not None:
            self._presence.announce(leaving=True)
            self._presence.close()
        await self._parts.close()
        await self.links.close()

    async def _is_alive(self, start: SuspectStart) -> bool:
        """Whether that subscription answers. A process that has lost its connection has the time of a lease to come
        back."""
        assert self._presence is not None, "the session is open"
        until = clock.now() + self._me.lease_s
        while start.member not in self._presence.gone:
            notes = await asked(self.links.sending, self.place.topic, self.place.group)
            if any(note.owner == start.owner for note in notes):
                return True
            if clock.now() >= until:
                return False
            await asyncio.sleep(_ALIVE_PAUSE_S)
        return False

    def _cancelled(self, queue: str) -> None:
        self.end(f"the server has cancelled the consumer of queue {queue}; was the queue deleted?")


class SessionParts:
    """What runs beside the consumers. If one of them ends, `end` is called with the reason."""

    def __init__(self, end: Callable[[str], None]) -> None:
        self.closers: list[Callable[[], Awaitable[None]]] = []
        self._end = end
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for close in self.closers:
            with contextlib.suppress(AmqpError, BrokerError):
                await close()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, AmqpError | BrokerError):
            log.error("RabbitMQ: a part of a work session failed", exc_info=error)
        self._end(str(error) if error is not None else "a part of the session has ended")


class WorkIntake(NamedTuple):
    """One ownership: what arrives on one channel."""

    work: WorkChannel
    consumers: TierConsumers
