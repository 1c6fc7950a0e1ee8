"""The handlers of one process while they run. This is the only file that imports every stage."""

import asyncio
import functools
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import uuid4

import msgspec

from onward import clock
from onward.brokers.base import Broker, Figure, MemberInfo, Supervised
from onward.engines.base import Engine
from onward.engines.processes import ProcessEngine
from onward.engines.target import check, target_of
from onward.engines.tasks import TaskEngine
from onward.engines.threads import ThreadEngine
from onward.engines.watchdog import Watchdog
from onward.error_report import storable
from onward.errors import BadHandler, OnwardError
from onward.event import Partition
from onward.failure.dead import DeadLetters
from onward.failure.monitor import Hook, Monitor
from onward.failure.watch import Tally, Thresholds
from onward.flow.consumer import Consumer
from onward.flow.lag import PartitionLag, total
from onward.flow.quarantine import Quarantine
from onward.handler import Handler
from onward.inbox.base import Ground, Inbox
from onward.inbox.horizon import longest_redelivery_s
from onward.observe.health import Health, last_line, report
from onward.observe.metrics import Family, Registry
from onward.observe.readiness_news import ReadinessNews
from onward.observe.reading import PartitionReading, Reading
from onward.observe.standstill import EVERY_S, Patience, Standstill
from onward.settings import Settings

if TYPE_CHECKING:
    from onward.outbox import Outbox
    from onward.outbox.relays import Relays

log = logging.getLogger("onward")


class Identity(NamedTuple):
    """How this process appears to the other members of its groups."""

    member: MemberInfo
    supervised: Supervised | None

    @classmethod
    def make(cls, supervised: Supervised | None, endpoint: str | None) -> "Identity":
        name = supervised.member if supervised else f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        return cls(MemberInfo(name, endpoint), supervised)


class Crew:
    """Runs a consumer for each handler. It also runs the upkeep of inboxes, the monitor of dead letters, the regular
    log line, and the check for partitions that do not move."""

    def __init__(
        self,
        broker: Broker,
        handlers: Sequence[Handler],
        settings: Settings,
        hooks: Sequence[Hook],
        *,
        registry: Registry,
        endpoint: str | None = None,
        supervised: Supervised | None = None,
        outboxes: Sequence["Outbox"] = (),
    ) -> None:
        self._broker = broker
        self._handlers = handlers
        self._settings = settings
        self._monitor = _monitor(self._tallies, hooks, settings)
        self._durations = registry.histogram("handler_duration_seconds", "How long runs took.", ("topic", "group"))
        self._identity = Identity.make(supervised, endpoint)
        self._standstill = Standstill({(each.topic, each.group): _patience(each) for each in handlers})
        self._phase: Literal["starting", "running", "stopping"] = "starting"
        self._relays = self._relays_of(outboxes)
        self.consumers: list[Consumer] = []

    def _relays_of(self, outboxes: Sequence["Outbox"]) -> "Relays | None":
        lost = [each.table for each in outboxes if each.url is None]
        if lost and not self._broker.features.append_in:
            log.warning(
                "no relay reads the outbox %s, because its database is not known: write Outbox(app, URL), or set "
                "outbox_url",
                ", ".join(lost),
            )
        if len(lost) == len(outboxes):
            return None
        from onward.outbox.relays import Relays  # its database libraries are an extra

        relays = Relays(outboxes, self._broker, self._settings, self._identity.member.name)
        return relays if len(relays) or not self._handlers else None

    async def run(self, started: Callable[[], None]) -> None:
        """Run until `stop`, or until one handler's consumer or a relay fails. Then all end, because half an application
        would look healthy. Calls `started` when every handler has joined its group."""
        self._check_starts()
        self._check_tiers()
        try:
            await self._start_inboxes()
            await self._consume(started)
        finally:
            for inbox in self._inboxes():
                await inbox.close()

    def stop(self) -> None:
        """End gracefully, also while the handlers are still starting."""
        self._phase = "stopping"
        for consumer in self.consumers:
            consumer.stop()
        if self._relays is not None:
            self._relays.stop()

    def health(self) -> Health:
        if not self.consumers and self._relays is None:
            return Health(False, ("no handler runs",))
        if self._phase != "running":
            return Health(False, (f"the handlers are {self._phase}",))
        troubles = (*self._known_troubles(), *self._standstill.look(self.readings(), clock.now()))
        return Health(not troubles, tuple(map(storable, troubles)))

    def _known_troubles(self) -> list[str]:
        found = [trouble for consumer in self.consumers for trouble in consumer.troubles]
        return found if self._relays is None else [*found, *self._relays.troubles()]

    def figures(self) -> Sequence[Figure]:
        """The metrics of the relays."""
        return () if self._relays is None else self._relays.figures()

    def durations(self) -> Family:
        """How long runs took, by topic and group."""
        return self._durations.family()

    def readings(self) -> list[Reading]:
        return [self._reading(*each) for each in zip(self._handlers, self.consumers, strict=False)]

    def _reading(self, handler: Handler, consumer: Consumer) -> Reading:
        lags = consumer.lags()
        return Reading(
            topic=handler.topic,
            group=handler.group,
            engine=handler.engine,
            declined=consumer.declined,
            partitions=tuple(_partition_reading(partition, lag) for partition, lag in sorted(lags.items())),
            **msgspec.structs.asdict(total(lags.values(), time.time())),
            **self._dead_depth(handler),
            **msgspec.structs.asdict(consumer.health()),
            **msgspec.structs.asdict(consumer.plane.counts),
        )

    async def _consume(self, started: Callable[[], None]) -> None:
        quarantine = Quarantine()
        self.consumers = [
            Consumer(
                self._broker,
                _engine(each),
                each,
                self._settings,
                member=str(self._identity.member),
                supervised=self._identity.supervised,
                quarantine=quarantine,
                took=functools.partial(self._durations.observe, (each.topic, each.group)),
            )
            for each in self._handlers
        ]
        for handler in self._handlers:
            self._introduce(handler)
        stages: list[Consumer | Relays] = [*self.consumers, *([] if self._relays is None else [self._relays])]
        joined = self._joining(started, len(stages))
        tasks = [asyncio.create_task(stage.run(joined)) for stage in stages]
        beside = [asyncio.create_task(inbox.upkeep()) for inbox in self._inboxes()]
        beside += [asyncio.create_task(each) for each in (self._monitor.run(), report(self.readings), self._watch())]
        if self._phase == "stopping":
            self.stop()
        try:
            with Watchdog():
                await self._all_of(tasks)
        finally:
            for task in (*tasks, *beside):
                task.cancel()
            await asyncio.wait([*tasks, *beside])
            if self._handlers:
                log.info(last_line(self.readings()))
            self.consumers = []

    def _joining(self, started: Callable[[], None], left: int) -> Callable[[], None]:
        """A function that each consumer calls when it has joined its group, and the relays when they have begun. The
        last of these `left` calls calls `started`."""

        def joined() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._phase = "running" if self._phase == "starting" else self._phase
                started()

        return joined

    async def _watch(self) -> None:
        """Check the partitions every EVERY_S seconds, so that `health` can tell how long one has not moved. Log each
        partition that has stopped moving, each new trouble of a consumer, and when all troubles have ended."""
        news = ReadinessNews()
        while True:
            await asyncio.sleep(EVERY_S)
            stuck = self._standstill.look(self.readings(), clock.now())
            for trouble in news.of([*stuck, *self._known_troubles()]):
                log.warning("not ready: %s", storable(trouble))
            if news.is_over():
                log.info("ready again")

    def _check_starts(self) -> None:
        """Refuse a handler whose `start` this broker does not support, before anything is consumed."""
        starts = self._broker.features.starts
        for handler in self._handlers:
            if (handler.start if isinstance(handler.start, str) else "time") not in starts:
                offered = ", ".join("a Unix time" if each == "time" else repr(each) for each in sorted(starts))
                raise BadHandler(f"{handler.name}: start={handler.start!r}; this broker supports {offered}")

    def _check_tiers(self) -> None:
        """Refuse a handler with tiers where events are not shared: in a log, no event can overtake another."""
        for handler in self._handlers:
            if handler.tiers and not self._is_shared(handler):
                cure = "set ordering='none'" if self._broker.features.shared else "remove it, this broker has no tiers"
                raise BadHandler(f"{handler.name}: tiers={dict(handler.tiers)!r}; {cure}")

    async def _all_of(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        self.stop()
        errors = [end for end in await asyncio.gather(*tasks, return_exceptions=True) if end is not None]
        for other in errors[1:]:
            log.error("another handler failed: %s", other, exc_info=None if isinstance(other, OnwardError) else other)
        if errors:
            raise errors[0]

    def _introduce(self, handler: Handler) -> None:
        grace_s = self._settings.revoke_grace_s
        if handler.timeout_s is None or handler.timeout_s > grace_s:
            log.warning(
                "%s may run longer than revoke_grace_s=%g: when members join or leave, a run may overlap with one of "
                "the next owner",
                *(handler.name, grace_s),
            )
        log.info(
            "%s handles topic %s for group %s (engine %s, ordering %s, concurrency %d, durability %s)",
            *(handler.name, handler.topic, handler.group, handler.engine, handler.ordering),
            *(handler.concurrency, self._broker.features.durability),
        )

    # -- inboxes ------------------------------------------------------------------------------------------------

    def _is_shared(self, handler: Handler) -> bool:
        """Whether several members hold its partitions at once."""
        return self._broker.features.shared and handler.ordering == "none"

    def _is_stable(self, handler: Handler) -> bool:
        """Whether a position names the same event in every delivery, and a fence grows with every ownership."""
        features = self._broker.features
        return features.stable_positions and features.fence and not self._is_shared(handler)

    def _inboxes(self) -> Iterable[Inbox]:
        return {id(each.inbox): each.inbox for each in self._handlers if each.inbox is not None}.values()

    async def _start_inboxes(self) -> None:
        """Start each inbox before the first event. It refuses a handler whose effects could happen twice."""
        for handler in self._handlers:
            if handler.inbox is not None:
                ground = Ground(
                    name=handler.name,
                    batch=handler.is_batch,
                    stable=self._is_stable(handler),
                    longest_redelivery_s=longest_redelivery_s(self._settings, handler.retry, handler.timeout_s),
                )
                await handler.inbox.start(ground)

    # -- dead letters -------------------------------------------------------------------------------------------

    async def _tallies(self) -> list[Tally]:
        """The dead letters of the groups that this process counts. One process of the fleet counts each group."""
        if not self._broker.features.aside:
            return []
        letters = DeadLetters(self._broker, [(each.topic, each.group) for each in self._handlers])
        pairs = list(zip(self._handlers, self.consumers, strict=True))
        ours = [handler for handler, consumer in pairs if await self._counts(handler, consumer)]
        return [await letters.tally(handler.topic, handler.group) for handler in ours]

    async def _counts(self, handler: Handler, consumer: Consumer) -> bool:
        """Whether this process counts the group's dead letters. The owner of partition 0 does; of several members that
        share it, the one with the lowest name."""
        if Partition(handler.topic, 0) not in consumer.plane.held:
            return False
        if not self._is_shared(handler):
            return True
        groups = await self._broker.groups(handler.topic)
        names = [member.name for each in groups if each.group == handler.group for member in each.members]
        ours = self._identity.member.name
        return ours == min((*names, ours))

    def _dead_depth(self, handler: Handler) -> dict[str, Any]:
        """The dead letters at the monitor's last count."""
        place = handler.topic, handler.group
        tally = next((each for each in self._monitor.counted if (each.topic, each.group) == place), None)
        depth, age_s = (tally.depth, tally.oldest_age_s) if tally is not None else (None, None)
        return {"dead_letters": depth, "dead_oldest_s": age_s}


def _monitor(read: Callable[[], Awaitable[Sequence[Tally]]], hooks: Sequence[Hook], settings: Settings) -> Monitor:
    return Monitor(read, hooks, thresholds=Thresholds(depth=settings.dead_threshold), every_s=settings.dead_check_s)


def _partition_reading(partition: Partition, lag: PartitionLag) -> PartitionReading:
    local, blocking = lag.local, lag.local.blocking
    return PartitionReading(
        partition=partition.index,
        undelivered=lag.broker.undelivered,
        open=local.open,
        gap=local.gap,
        lag=lag.events,
        parked=local.parked,
        paused_by=local.paused_by,
        queued=local.queued,
        running=local.running,
        blocking_position=None if blocking is None else blocking.position,
        blocking_state=None if blocking is None else blocking.state,
        blocking_attempt=None if blocking is None else blocking.attempt,
        blocked_s=0.0 if blocking is None else blocking.for_s,
    )


def _patience(handler: Handler) -> Patience:
    slots = handler.concurrency if handler.engine != "processes" else _workers(handler)
    return Patience(handler.name, slots, handler.timeout_s, handler.retry.longest_s + handler.batch_wait_s)


def _workers(handler: Handler) -> int:
    return handler.workers or os.cpu_count() or 1


def _engine(handler: Handler) -> Engine:
    concurrency, timeout_s = handler.concurrency, handler.timeout_s
    if handler.engine == "tasks":
        return TaskEngine(handler.call, concurrency=concurrency, timeout_s=timeout_s)
    if handler.engine == "threads":
        return ThreadEngine(handler.call, concurrency=concurrency, timeout_s=timeout_s)
    target = target_of(handler.function)
    check(target, handler.function)
    return ProcessEngine(
        target,
        batch=handler.is_batch,
        workers=_workers(handler),
        concurrency=concurrency,
        timeout_s=timeout_s,
        max_events_per_worker=handler.max_events_per_worker,
    )
