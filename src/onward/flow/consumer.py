"""The loop around the control plane: it receives, submits, settles and releases what the plane decides."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from onward import context
from onward.brokers.base import (
    Assigned,
    Broker,
    BrokerLag,
    Fenced,
    MemberInfo,
    Message,
    Moved,
    Reached,
    Revoked,
    Subscription,
    Supervised,
)
from onward.clock import now
from onward.engines.base import Ended, Engine, EngineHealth, Work
from onward.errors import BadHandler, BrokerError, Closed, GroupDropped, StoreLost
from onward.event import Delivery, Partition
from onward.flow.actions import Actions
from onward.flow.broker_tasks import BrokerTasks
from onward.flow.lag import Behind, PartitionLag, total
from onward.flow.limits import Limits
from onward.flow.plane import ControlPlane
from onward.flow.quarantine import Quarantine
from onward.flow.run_outcomes import RunOutcomes, instant, without_expired
from onward.handler import Handler
from onward.settings import Settings

log = logging.getLogger("onward")

_RECEIVE_WAIT_S = 1.0
_LATER_S = 86_400.0  # a wait that RetryLater asked for is believed up to this when it is read back: clocks are set
_LAG_EVERY_S = 5.0
_LOOK_S = 2.0  # how long a look at the other members may delay the start
_PATIENCE_S = 5.0  # beyond the drain's deadline, for the last settle and release
_SATED_S = 0.2  # how long intake rests at the most when there is enough to do: a revocation must be heard
_UNSURE_S = 2.0  # a renewal that is late by so much is a trouble
_UNKNOWN = BrokerLag(None, None)


class HandlerSubscription:
    """The subscription of one handler, and what the broker last said about it."""

    def __init__(self, broker: Broker, handler: Handler, member: str, supervised: Supervised | None) -> None:
        self._broker = broker
        self._handler = handler
        self._member = msgspec.structs.replace(MemberInfo.parse(member), ordering=handler.ordering)
        self._supervised = supervised
        self.subscription: Subscription | None = None
        self.sure_until = 0.0
        self.lost: list[Partition] = []  # not logged yet: the next receive may say why
        self.undelivered: Mapping[Partition, BrokerLag] = {}

    async def join(self) -> Subscription:
        """BadHandler: a member of the group has another ordering."""
        handler = self._handler
        await self._check_ordering()
        self.subscription = await self._broker.subscribe(
            [handler.topic],
            group=handler.group,
            member=str(self._member),
            ordering=handler.ordering,
            start=handler.start,
            supervised=self._supervised,
        )
        return self.subscription

    async def _check_ordering(self) -> None:
        """Refuse to join members that have another ordering: the order of a key would depend on which member owns its
        partition. A broker that does not answer prevents nothing."""
        handler, before = self._handler, self._supervised
        gone = {before.slot, *before.gone} if before else ()
        try:
            async with asyncio.timeout(_LOOK_S):
                owners = await self._broker.owners(handler.topic, handler.group)
        except Exception as error:  # the broker's state is its own matter: joining shows it
            log.warning("%s: its group cannot be checked for another ordering: %s", handler.name, error)
            return
        for member in owners:
            if member.ordering not in (None, handler.ordering) and member.name not in gone:
                raise BadHandler(
                    f"{handler.name} has ordering={handler.ordering!r}, but member {member.name} of group "
                    f"{handler.group} of topic {handler.topic} runs with ordering={member.ordering!r}; stop members "
                    "with the other ordering first (one that was killed counts until its lease ends), or give this "
                    "handler another group"
                )

    def troubles(self, *, held: bool) -> Sequence[str]:
        """`held`: it has partitions."""
        if self.subscription is None:
            return ()
        sure_until = self.subscription.sure_until()
        unsure_s = now() - sure_until if held and sure_until else 0.0  # 0: a loss is about to be received
        unsure = f"ownership has not been certain for {unsure_s:.0f} s: the broker does not renew it"
        return (*self.subscription.troubles(), *((unsure,) if unsure_s > _UNSURE_S else ()))

    def log_lost(self, error: BrokerError | None = None) -> None:
        """`error`: of the receive that followed. Where the store or the group is gone, that is the whole story."""
        if self.lost and not isinstance(error, StoreLost | GroupDropped):
            log.warning(
                "%s: lost %s: another member has taken over, or the broker did not hear from this one",
                *(self._handler.name, ", ".join(map(str, self.lost))),
            )
        self.lost.clear()

    async def ask_lag(self, subscription: Subscription) -> None:
        """For metrics and readiness: now and then, never for an event."""
        while True:
            try:
                self.undelivered = await subscription.lag()
            except Closed:
                return
            except BrokerError as error:
                log.debug("%s: the broker does not say what is undelivered: %s", self._handler.name, error)
                self.undelivered = {}
            await asyncio.sleep(_LAG_EVERY_S)


class Consumer:
    """One member of a handler's group, from its first receive to its last release."""

    def __init__(
        self,
        broker: Broker,
        engine: Engine,
        handler: Handler,
        settings: Settings,
        *,
        member: str,
        supervised: Supervised | None = None,
        quarantine: Quarantine | None = None,
        took: Callable[[Sequence[float]], None] | None = None,
    ) -> None:
        """`took` gets the seconds that runs took."""
        self._engine = engine
        self._handler = handler
        self._settings = settings
        self._wake = asyncio.Event()
        self._hungry = asyncio.Event()
        self._stop_at: float | None = None
        self.plane = ControlPlane(_limits(handler, settings), quarantine)
        self._subscribed = HandlerSubscription(broker, handler, member, supervised)
        self._tasks = BrokerTasks(self.plane, broker, handler, self._wake)
        self._outcomes = RunOutcomes(handler, took)

    async def run(self, subscribed: Callable[[], None] = lambda: None) -> None:
        """Consume until `stop`, then drain, settle, release and leave. Calls `subscribed` once it is a member."""
        subscription = await self._subscribed.join()
        context.group.set(self._handler.group)  # for what the engine runs
        self._engine.start(self._ended, self._may_start_until)
        subscribed()
        receiving = asyncio.create_task(self._receive(subscription))
        receiving.add_done_callback(lambda _: self._wake.set())
        asking = asyncio.create_task(self._subscribed.ask_lag(subscription))
        try:
            while not self._finished(receiving):
                sure_until = self._subscribed.sure_until = subscription.sure_until()
                actions = self.plane.tick(instant(), sure_until)
                if self.plane.ready <= 2 * self._handler.concurrency:
                    self._hungry.set()
                else:
                    self._hungry.clear()
                await self._act(subscription, actions)
                if not self._finished(receiving):
                    await self._sleep(actions.wake_at)
        finally:
            await self._leave(subscription, receiving, asking)
        if not receiving.cancelled() and (error := receiving.exception()):
            error.add_note(f"This ended the consumer of {self._handler.name}.")
            raise error
        if self._engine.failure is not None:
            raise self._engine.failure

    def stop(self) -> None:
        """Take nothing more, let what runs end within `drain_timeout_s`, then leave."""
        if self._stop_at is None:
            self._stop_at = now() + self._settings.drain_timeout_s
            self._give_up(self.plane.held, self._settings.drain_timeout_s)
            self._wake.set()

    # -- what it reports ----------------------------------------------------------------------------------------

    def health(self) -> EngineHealth:
        return self._engine.health()

    @property
    def declined(self) -> int:
        """Events that the handler skipped."""
        return self._outcomes.declined

    def lags(self) -> Mapping[Partition, PartitionLag]:
        """How far behind each partition is that this member has; `broker` as of the last few seconds."""
        undelivered = self._subscribed.undelivered
        found = self.plane.lag(now())
        return {partition: PartitionLag(lag, undelivered.get(partition, _UNKNOWN)) for partition, lag in found.items()}

    def behind(self) -> Behind:
        """How far this member is behind, over all its partitions."""
        return total(self.lags().values(), time.time())

    @property
    def troubles(self) -> list[str]:
        """Why events of this member cannot be completed; readiness shows it."""
        held = self.plane.held
        tasks, broker = self._tasks.troubles(held), self._subscribed.troubles(held=bool(held))
        return list(dict.fromkeys(filter(None, (*tasks, *broker, self._outcomes.trouble))))

    # -- what the plane asks for --------------------------------------------------------------------------------

    async def _act(self, subscription: Subscription, actions: Actions) -> None:
        for each in actions.accused:
            self._outcomes.accuse(each, self._settings.crash_limit)
        if actions.work:
            self._submit(actions.work)
        for page in actions.load:
            self._tasks.load(page)
        if actions.settle is not None:
            self._tasks.settle(subscription, actions.settle)
        try:
            if actions.pause:
                await subscription.pause(actions.pause)
            if actions.resume:
                await subscription.resume(actions.resume)
            async with asyncio.timeout(self._left_s()):
                if actions.drained:
                    await subscription.release(actions.drained, drained=True)
                if actions.undrained:
                    await subscription.release(actions.undrained, drained=False)
        except (BrokerError, TimeoutError):
            # Ownership ends by itself when it is not renewed, and the next owner starts from what was settled.
            log.exception("%s: the broker refused to pause, resume or release", self._handler.name)

    def _submit(self, work: Sequence[Work]) -> None:
        fresh, expired = without_expired(work)
        if expired:
            self._ended(expired)
        self._engine.submit(fresh)

    def _may_start_until(self, work: Work) -> float:
        """Until when the work is ours for certain: it may wait in the engine while time passes."""
        first = work if isinstance(work, Delivery) else work[0]
        return self._subscribed.sure_until if self.plane.may_start(first) else 0.0

    def _ended(self, results: Sequence[Ended]) -> None:
        self.plane.completed(self._outcomes.of(results), instant())
        self._wake.set()
        if self._engine.failure is not None:
            self.stop()  # whatever it is given now comes back untouched

    # -- what the broker says -----------------------------------------------------------------------------------

    async def _receive(self, subscription: Subscription) -> None:
        settings = self._settings
        while True:
            hungry = await self._appetite()
            limit, wait_s = (settings.receive_batch, _RECEIVE_WAIT_S) if hungry else (0, 0.0)
            try:
                messages = await subscription.receive(limit, settings.max_in_flight_bytes, wait_s)
            except Closed:
                return
            except GroupDropped as error:
                self._subscribed.log_lost(error)
                raise  # trying again would change nothing: the application ends and says so
            except BrokerError as error:
                self._subscribed.log_lost(error)
                self._tasks.retried.failed("receiving", error)
                await asyncio.sleep(_RECEIVE_WAIT_S)
                continue
            self._subscribed.log_lost()
            self._tasks.retried.succeeded("receiving")
            if messages:
                self._take(messages)
                self._wake.set()
                await asyncio.sleep(0)  # a broker that has more at hand would keep the plane from its turn

    async def _appetite(self) -> bool:
        """Is there room for more? What is read ahead of its turn fills memory; other messages are received anyway."""
        if not self._hungry.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SATED_S):
                    await self._hungry.wait()
        return self._hungry.is_set()

    def _take(self, messages: Sequence[Message]) -> None:
        batch: list[Delivery] = []
        for message in messages:
            if type(message) is Delivery:
                batch.append(message)
                continue
            if batch:
                self.plane.delivered(batch, instant())
                batch = []
            self._heed(message)
        if batch:
            self.plane.delivered(batch, instant())

    def _heed(self, message: Message) -> None:
        plane = self.plane
        match message:
            case Assigned():
                plane.assigned(message)
                if self._stop_at is not None:  # it was on its way when we decided to leave
                    self._give_up([message.partition], 0.0)
            case Reached():
                plane.reached(message.partition, message.epoch, message.position, instant())
            case Revoked():
                self._give_up(message.partitions, min(message.deadline_s, self._settings.revoke_grace_s))
            case Fenced():
                self._subscribed.lost += message.partitions
                plane.fenced(message.partitions)
            case Moved():
                plane.moved(message, instant())
            case Delivery():
                plane.delivered([message], instant())

    def _give_up(self, partitions: Sequence[Partition], deadline_s: float) -> None:
        self.plane.revoked(partitions, instant(), deadline_s)

    # -- when it stops ------------------------------------------------------------------------------------------

    def _finished(self, receiving: asyncio.Task[None]) -> bool:
        if receiving.done():
            return True
        if self._stop_at is None:
            return False
        return (not self.plane.held and not self._tasks.is_settling) or now() >= self._stop_at + _PATIENCE_S

    def _left_s(self) -> float | None:
        """The time left for the last settle and release; None: it does not stop."""
        return None if self._stop_at is None else max(0.0, self._stop_at + _PATIENCE_S - now())

    async def _sleep(self, wake_at: float | None) -> None:
        """Until something happened, or the plane's next deadline, or the end of our patience with a stop."""
        timer = None
        if self._stop_at is not None:
            wake_at = min(wake_at or math.inf, self._stop_at + _PATIENCE_S)
        if wake_at is not None:
            timer = asyncio.get_running_loop().call_later(max(0.0, wake_at - now()), self._wake.set)
        await self._wake.wait()
        self._wake.clear()
        if timer is not None:
            timer.cancel()

    async def _leave(
        self, subscription: Subscription, receiving: asyncio.Task[None], asking: asyncio.Task[None]
    ) -> None:
        for task in (receiving, asking):
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        self._subscribed.log_lost()
        await self._tasks.cancel()
        if self._tasks.is_settling:
            log.warning(
                "%s: the broker did not answer: the last progress is not stored, what was done since will be repeated",
                self._handler.name,
            )
        if self.plane.running:
            log.warning(
                "%s: %d calls are cut off, no attempt charged; the next owner runs their events again",
                *(self._handler.name, self.plane.running),
            )
        await self._engine.close()
        self.plane.leave()
        await subscription.close()


def _limits(handler: Handler, settings: Settings) -> Limits:
    return Limits(
        group=handler.group,
        handler=handler.name,
        ordering=handler.ordering,
        on_dead=handler.on_dead,
        concurrency=handler.concurrency,
        batch_size=handler.batch_size,
        batch_wait_s=handler.batch_wait_s,
        max_in_flight=settings.max_in_flight,
        max_in_flight_bytes=settings.max_in_flight_bytes,
        max_delayed=settings.max_delayed,
        max_parked=settings.max_parked,
        max_gap=settings.max_gap,
        park_after_s=settings.park_after_s,
        max_wait_s=max(handler.retry.longest_s, _LATER_S),
        crash_limit=settings.crash_limit,
        settle_interval_s=settings.settle_interval_s,
        wants=handler.wants,
    )
