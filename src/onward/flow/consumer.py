"""The loop around the control plane: it receives, submits, settles and releases what the plane decides."""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

from onward import context
from onward.brokers.base import (
    Assigned,
    Broker,
    BrokerLag,
    Fenced,
    Message,
    Moved,
    Reached,
    Revoked,
    Subscription,
)
from onward.clock import now
from onward.engines.base import Ended, Engine, EngineHealth, Work
from onward.errors import AsideError, BrokerError, Closed, Expired, GroupDropped, Skip, Unfinished, Unreachable
from onward.event import Delivery, Partition
from onward.failure.expiry import is_expired
from onward.failure.judge import ErrorJudge
from onward.flow.actions import Actions, Load, Settlement
from onward.flow.entry import DONE, RELEASED, SPLIT, Instant, Outcome, Released
from onward.flow.lag import Behind, total
from onward.flow.limits import Limits
from onward.flow.outage import Outage
from onward.flow.plane import ControlPlane
from onward.flow.solitude import Solitude
from onward.handler import Handler
from onward.settings import Settings

log = logging.getLogger("onward")

_RECEIVE_WAIT_S = 1.0
_LATER_S = 86_400.0  # what RetryLater asks for is believed so far when it is read back: clocks are set
_PAGE = 1_000  # records read from the aside at once
_LAG_EVERY_S = 5.0
_PATIENCE_S = 5.0  # beyond the drain's deadline, for the last settle and release
_SATED_S = 0.2  # how long intake rests at the most when there is enough to do: a revocation must be heard


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
        solitude: Solitude | None = None,
        took: Callable[[Sequence[float]], None] | None = None,
    ) -> None:
        self._broker = broker
        self._engine = engine
        self._handler = handler
        self._settings = settings
        self._member = member
        self._took = took  # gets the seconds that runs took
        self._judging = ErrorJudge(handler.name, handler.retry, random.random)
        self.declined = 0  # events that the handler skipped
        self._outage = Outage()  # of the inbox
        self._subscription: Subscription | None = None
        self._failing: dict[str, str] = {}  # what fails just now and is tried again, and why
        self._refused: dict[Partition, str] = {}  # why records of these cannot be stored just now
        self._undelivered: Mapping[Partition, BrokerLag] = {}  # as the broker last said
        self._wake = asyncio.Event()
        self._hungry = asyncio.Event()
        self._sure_until = 0.0
        self._stop_at: float | None = None
        self._settling: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._loading: set[asyncio.Task[None]] = set()
        self.plane = ControlPlane(
            Limits(
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
            ),
            solitude,
        )

    async def run(self, subscribed: Callable[[], None] = lambda: None) -> None:
        """Consume until `stop`, then drain, settle, release and leave. Calls `subscribed` once it is a member."""
        handler = self._handler
        subscription = await self._broker.subscribe(
            [handler.topic], group=handler.group, member=self._member, ordering=handler.ordering, start=handler.start
        )
        self._subscription = subscription
        context.group.set(handler.group)  # for what the engine runs
        self._engine.start(self._ended, self._may_start_until)
        subscribed()
        receiving = asyncio.create_task(self._receive(subscription))
        receiving.add_done_callback(lambda _: self._wake.set())
        self._asking = asyncio.create_task(self._ask_lag(subscription))
        try:
            while not self._finished(receiving):
                self._sure_until = subscription.sure_until()
                actions = self.plane.tick(instant(), self._sure_until)
                if self.plane.ready <= 2 * self._handler.concurrency:
                    self._hungry.set()
                else:
                    self._hungry.clear()
                await self._act(subscription, actions)
                if not self._finished(receiving):
                    await self._sleep(actions.wake_at)
        finally:
            await self._leave(subscription, receiving)
        if not receiving.cancelled() and (error := receiving.exception()):
            error.add_note(f"This ended the consumer of {self._handler.name}.")
            raise error
        if self._engine.failure is not None:
            raise self._engine.failure

    def health(self) -> EngineHealth:
        return self._engine.health()

    def behind(self) -> Behind:
        """How far this member is behind; what is not delivered yet, as of the last few seconds."""
        lags = self.plane.lag(now())
        outside = [lag for partition, lag in self._undelivered.items() if partition in lags]
        return total(list(lags.values()), outside, time.time())

    def stop(self) -> None:
        """Take nothing more, let what runs end within `drain_timeout_s`, then leave."""
        if self._stop_at is None:
            self._stop_at = now() + self._settings.drain_timeout_s
            self._give_up(self.plane.held, self._settings.drain_timeout_s)
            self._wake.set()

    @property
    def troubles(self) -> list[str]:
        """What keeps events of ours from an end, for readiness."""
        held = self.plane.held
        told = [why for partition, why in self._refused.items() if partition in held]
        outside = self._subscription.troubles() if self._subscription is not None else ()
        return list(dict.fromkeys(filter(None, (*told, *outside, *self._failing.values(), self._outage.why))))

    async def _act(self, subscription: Subscription, actions: Actions) -> None:
        if actions.work:
            self._engine.submit(self._bury_expired(actions.work))
        for load in actions.load:
            task = asyncio.create_task(self._load(load))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)
        if actions.settle is not None:
            self._settling = asyncio.create_task(self._settle(subscription, actions.settle))
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

    async def _ask_lag(self, subscription: Subscription) -> None:
        """For those who watch: now and then, never for an event."""
        while True:
            try:
                self._undelivered = await subscription.lag()
            except Closed:
                return
            except BrokerError as error:
                log.debug("%s: the broker does not say what is undelivered: %s", self._handler.name, error)
                self._undelivered = {}
            await asyncio.sleep(_LAG_EVERY_S)

    async def _receive(self, subscription: Subscription) -> None:
        settings = self._settings
        while True:
            hungry = await self._appetite()
            limit, wait_s = (settings.receive_batch, _RECEIVE_WAIT_S) if hungry else (0, 0.0)
            try:
                messages = await subscription.receive(limit, settings.max_in_flight_bytes, wait_s)
            except Closed:
                return
            except GroupDropped:
                raise  # trying again would change nothing: the application ends and says so
            except BrokerError as error:
                self._failed("receiving", error)
                await asyncio.sleep(_RECEIVE_WAIT_S)
                continue
            self._failing.pop("receiving", None)
            if messages:
                self._take(messages)
                self._wake.set()

    def _failed(self, what: str, error: BrokerError) -> None:
        """Log it once for each cause; readiness shows it until `what` succeeds."""
        if self._failing.get(what) != str(error):
            log.error("%s: %s failed, trying again until it succeeds: %s", self._handler.name, what, error)
        self._failing[what] = str(error)

    async def _appetite(self) -> bool:
        """Is there room for more? What is read ahead of its turn fills memory; what has happened is heard still."""
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
                log.warning(
                    "%s: lost %s: another member has taken over, or the broker did not hear from this one",
                    *(self._handler.name, ", ".join(map(str, message.partitions))),
                )
                plane.fenced(message.partitions)
            case Moved():
                plane.moved(message, instant())
            case Delivery():
                plane.delivered([message], instant())

    def _give_up(self, partitions: Sequence[Partition], deadline_s: float) -> None:
        self.plane.revoked(partitions, instant(), deadline_s)

    async def _load(self, load: Load) -> None:
        """Read a page of records; until it is read, what depends on it waits."""
        aside, hold = self._broker.aside(self._handler.group), self._handler.on_dead == "hold"
        while True:
            try:
                records = await aside.load(
                    load.partition,
                    after=load.after,
                    limit=_PAGE,
                    max_bytes=self._settings.max_in_flight_bytes,
                    dead=hold,
                )
            except Closed:
                return
            except BrokerError as error:
                self._failed(f"reading the records of {load.partition}", error)
                await asyncio.sleep(_RECEIVE_WAIT_S)
            else:
                self._failing.pop(f"reading the records of {load.partition}", None)
                break
        self.plane.loaded(load, records, instant())
        self._wake.set()

    async def _settle(self, subscription: Subscription, settlement: Settlement) -> None:
        """Carry one settle through: the same call again and again, until it is answered."""
        while True:
            try:
                lost = await subscription.settle(settlement.progress, aside=settlement.aside, gone=settlement.gone)
            except AsideError as error:
                self._answered(settlement, error.lost, error.partitions, str(error))
                break
            except Closed:
                self.plane.settled([progress.partition for progress in settlement.progress], instant())
                break
            except BrokerError as error:
                self._failed("settling", error)
                await asyncio.sleep(_RECEIVE_WAIT_S)
            else:
                self._answered(settlement, lost)
                break
        self._settling = None
        self._wake.set()

    def _answered(
        self, settlement: Settlement, lost: Sequence[Partition], refused: Sequence[Partition] = (), why: str = ""
    ) -> None:
        """The broker settled it, but for the partitions that are no longer ours and those whose records it refused."""
        self._failing.pop("settling", None)
        if refused and why not in self._refused.values():  # once for each cause
            log.error("%s: dead letters cannot be stored; their keys wait: %s", self._handler.name, why)
        for record in settlement.aside:
            if record.partition in refused:
                self._refused[record.partition] = why
            else:
                self._refused.pop(record.partition, None)
        self.plane.aside_refused(refused, lost, instant())
        if self._handler.inbox is not None:
            settled = [each for each in settlement.progress if each.partition not in (*lost, *refused)]
            self._handler.inbox.settled(self._handler.group, settled)

    def _may_start_until(self, work: Work) -> float:
        """Until when the work is ours for certain: it may wait in the engine while time passes."""
        first = work if isinstance(work, Delivery) else work[0]
        return self._sure_until if self.plane.may_start(first) else 0.0

    def _ended(self, results: Sequence[Ended]) -> None:
        if self._took is not None:
            self._took([ended.took_s for ended in results if ended.took_s is not None])
        outcomes: list[tuple[Delivery, Outcome]] = []
        for ended in results:
            work = ended.work
            well = ended.error is None and not ended.cancelled
            if isinstance(work, Delivery):
                outcomes.append((work, DONE if well else self._judge(work, ended.error)))
            elif well or ended.error is None or len(work) == 1 or isinstance(ended.error, Unfinished):
                outcomes.extend((each, DONE if well else self._judge(each, ended.error)) for each in work)
            else:
                log.warning("%s: a batch of %d failed, splitting it", self._handler.name, len(work))
                outcomes.extend((each, SPLIT) for each in work)
        if self._outage.why and not all(each.cancelled or isinstance(each.error, Unreachable) for each in results):
            log.info("%s: its inbox can be reached again", self._handler.name)
            self._outage.over()
        self.plane.completed(outcomes, instant())
        self._wake.set()
        if self._engine.failure is not None:
            self.stop()  # whatever it is given now comes back untouched

    def _judge(self, delivery: Delivery, error: BaseException | None) -> Outcome:
        if error is None:
            return RELEASED
        if isinstance(error, Unreachable):
            return self._wait_out(error)
        ruling = self._judging.rule(delivery, error, instant())
        log.log(ruling.level, "\n".join(filter(None, (ruling.text, ruling.trace))))
        self.declined += isinstance(error, Skip)
        return ruling.outcome

    def _wait_out(self, error: Unreachable) -> Outcome:
        at, why = now(), f"{self._handler.name}: {error}"
        if not self._outage.why:
            log.warning("%s; no attempt is charged, its events wait until it is back", why)
        return Released(at + self._outage.met(why, at))

    def _bury_expired(self, work: Sequence[Work]) -> Sequence[Work]:
        """The work that may still run; what has expired ends here, when its turn has come. A batch is split until
        that stands alone, for its neighbours may only end in their order."""
        if all([isinstance(each, Delivery) and not each.event.headers for each in work]):  # noqa: C419  # twice as fast
            return work  # the time stands in a header
        wall = time.time()
        late: list[Work] = []
        fresh: list[Work] = []
        for each in work:
            (late if _is_late(each, wall) else fresh).append(each)
        if late:
            self._ended([Ended(each, Expired("its time was over before its turn came")) for each in late])
        return fresh

    def _finished(self, receiving: asyncio.Task[None]) -> bool:
        if receiving.done():
            return True
        if self._stop_at is None:
            return False
        return (not self.plane.held and self._settling is None) or now() >= self._stop_at + _PATIENCE_S

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

    async def _leave(self, subscription: Subscription, receiving: asyncio.Task[None]) -> None:
        for task in (receiving, self._asking, self._settling, *self._loading):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        if self._settling is not None:
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


def _is_late(work: Work, wall: float) -> bool:
    return is_expired(work.event, wall) if isinstance(work, Delivery) else any(_is_late(each, wall) for each in work)


def instant() -> Instant:
    return Instant(now(), time.time())
