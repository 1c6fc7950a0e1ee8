"""The loop around the control plane: it receives, submits, settles and releases, as the plane decides."""

import asyncio
import contextlib
import logging
import math
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
from onward.error_report import message_of, name_of
from onward.errors import BadHandler, BrokerError, Closed, GroupDropped, StoreLost
from onward.event import Delivery, Partition
from onward.flow.actions import Actions
from onward.flow.broker_tasks import BrokerTasks
from onward.flow.lag import PartitionLag
from onward.flow.limits import Limits
from onward.flow.plane import ControlPlane
from onward.flow.quarantine import Quarantine
from onward.flow.run_outcomes import RunOutcomes, instant, without_expired
from onward.handler import EngineName, Handler
from onward.settings import Settings

log = logging.getLogger("onward")

_RECEIVE_WAIT_S = 1.0
_LATER_S = 86_400.0  # the longest wait of a RetryLater that is believed when it is read back: clocks can be set
_LAG_EVERY_S = 5.0
_LOOK_S = 2.0  # how long the check of the other members may delay the start
_PATIENCE_S = 5.0  # beyond the drain's deadline, for the last settle and release
_SATED_S = 0.2  # the longest pause of intake while there is enough to do; a revocation must still be received
_UNSURE_S = 2.0  # a renewal that is this late is a trouble
_UNKNOWN = BrokerLag(None, None)


class HandlerSubscription:
    """The subscription of one handler, and what the broker last reported about it."""

    def __init__(self, broker: Broker, handler: Handler, member: str, supervised: Supervised | None) -> None:
        self._broker = broker
        self._handler = handler
        self._member = msgspec.structs.replace(MemberInfo.parse(member), ordering=handler.ordering)
        self._supervised = supervised
        self.subscription: Subscription | None = None
        self.sure_until = 0.0
        self.lost: list[Partition] = []  # not logged yet: the next receive may raise the reason
        self.undelivered: Mapping[Partition, BrokerLag] = {}

    async def join(self) -> Subscription:
        """Join the group. Raises BadHandler if a member of it has another ordering."""
        handler = self._handler
        await self._check_ordering()
        self.subscription = await self._broker.subscribe(
            [handler.topic],
            group=handler.group,
            member=str(self._member),
            ordering=handler.ordering,
            start=handler.start,
            supervised=self._supervised,
            asks=handler.asks,
        )
        return self.subscription

    async def _check_ordering(self) -> None:
        """Refuse to join members that have another ordering: the order of a key would depend on which member owns its
        partition. If the broker does not answer, the check is skipped."""
        handler, before = self._handler, self._supervised
        gone = {before.slot, *before.gone} if before else ()
        try:
            async with asyncio.timeout(_LOOK_S):
                owners = await self._broker.owners(handler.topic, handler.group)
        except Exception as error:  # if the broker has a problem, joining will report it
            silent = f"the broker did not answer within {_LOOK_S:g} s"
            cause = message_of(error) or (silent if isinstance(error, TimeoutError) else name_of(error))
            log.warning("%s: cannot check whether its group has another ordering: %s", handler.name, cause)
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
        """Why the broker does not deliver or renew. `held`: this member has partitions."""
        if self.subscription is None:
            return ()
        sure_until = self.subscription.sure_until()
        unsure_s = now() - sure_until if held and sure_until else 0.0  # sure_until 0: the next receive reports a loss
        unsure = f"ownership has been uncertain for {unsure_s:.0f} s: the broker does not renew it"
        return (*self.subscription.troubles(), *((unsure,) if unsure_s > _UNSURE_S else ()))

    def log_lost(self, error: BrokerError | None = None) -> None:
        """Log the lost partitions. `error`: what the next receive raised. If the store was lost or the group dropped,
        that error already explains the loss."""
        if self.lost and not isinstance(error, StoreLost | GroupDropped):
            log.warning("%s: %s", self._handler.name, self._loss)
        self.lost.clear()

    @property
    def _loss(self) -> str:
        if self._broker.features.shared and self._handler.ordering == "none":  # no member owns it
            return f"no longer receives events of {self._handler.topic}"
        return f"no longer owns {', '.join(map(str, self.lost))}"

    async def ask_lag(self, subscription: Subscription) -> None:
        """Ask the broker for the lag every few seconds, for metrics and readiness."""
        while True:
            try:
                self.undelivered = await subscription.lag()
            except Closed:
                return
            except BrokerError as error:
                log.debug("%s: the broker did not report the undelivered events: %s", self._handler.name, error)
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
        """`took` is called with the durations of runs, in seconds."""
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
        context.group.set(self._handler.group)  # the runs of the engine inherit it
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
        """Stop intake, let running calls end within `drain_timeout_s`, then leave the group."""
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
        """How far behind each partition of this member is. The `broker` part is up to a few seconds old."""
        undelivered = self._subscribed.undelivered
        found = self.plane.lag(now())
        return {partition: PartitionLag(lag, undelivered.get(partition, _UNKNOWN)) for partition, lag in found.items()}

    @property
    def troubles(self) -> list[str]:
        """Why events of this member cannot be completed. Readiness shows these."""
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
            # Without renewal ownership ends by itself, and the next owner starts from the settled progress.
            log.exception("%s: pausing, resuming or releasing partitions failed", self._handler.name)

    def _submit(self, work: Sequence[Work]) -> None:
        fresh, expired = without_expired(work)
        if expired:
            self._ended(expired)
        self._engine.submit(fresh)

    def _may_start_until(self, work: Work) -> float:
        """Until when the work is certainly ours. The engine asks again when it starts work that has waited."""
        first = work if isinstance(work, Delivery) else work[0]
        return self._subscribed.sure_until if self.plane.may_start(first) else 0.0

    def _ended(self, results: Sequence[Ended]) -> None:
        self.plane.completed(self._outcomes.of(results), instant())
        self._wake.set()
        if self._engine.failure is not None:
            self.stop()  # the engine now returns all work as cancelled

    # -- what the broker reports --------------------------------------------------------------------------------

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
                raise  # a retry would not help: the application ends with this error
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
                await asyncio.sleep(0)  # let the plane tick, also if the broker always has more messages ready

    async def _appetite(self) -> bool:
        """Whether to receive more events: those read too early only fill memory. Other messages are always received."""
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
            self._apply(message)
        if batch:
            self.plane.delivered(batch, instant())

    def _apply(self, message: Message) -> None:
        plane = self.plane
        match message:
            case Assigned():
                plane.assigned(message)
                if self._stop_at is not None:  # the assignment was on its way when we decided to leave
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
        """The time left for the last settle and release; None: the consumer is not stopping."""
        return None if self._stop_at is None else max(0.0, self._stop_at + _PATIENCE_S - now())

    async def _sleep(self, wake_at: float | None) -> None:
        """Sleep until something happens, until the plane's next deadline, or until a stop has taken too long."""
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
                "%s: the broker did not answer the last settle; events done since the one before will run again",
                self._handler.name,
            )
        if self.plane.running:
            log.warning("%s: %s", self._handler.name, _cut_off(self.plane.running, self._handler.engine))
        await self._engine.close()
        self.plane.leave()
        await subscription.close()


def _cut_off(calls: int, engine: EngineName) -> str:
    """What happens to the calls that have not ended when the engine is closed. A thread cannot be stopped."""
    fate = {"tasks": "cancelled", "threads": "abandoned", "processes": "killed"}[engine]
    if calls == 1:
        return f"1 call still runs and is {fate}; no attempt is charged, and the next owner runs it again"
    return f"{calls:,} calls still run and are {fate}; no attempt is charged, and the next owner runs them again"


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
