"""The handlers of one process while they run: it composes the stages, and is the only file that knows them all."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from onward.brokers.base import Broker
from onward.engines.base import Engine
from onward.engines.processes import ProcessEngine
from onward.engines.target import check, target_of
from onward.engines.tasks import TaskEngine
from onward.engines.threads import ThreadEngine
from onward.engines.watchdog import Watchdog
from onward.event import Partition
from onward.failure.dead import DeadLetters
from onward.failure.monitor import Hook, Monitor
from onward.failure.watch import Tally, Thresholds
from onward.flow.consumer import Consumer
from onward.flow.quarantine import Quarantine
from onward.handler import Handler
from onward.inbox.base import Ground, Inbox
from onward.inbox.horizon import longest_redelivery_s
from onward.observe.health import Health, tell
from onward.observe.metrics import Reading
from onward.settings import Settings

log = logging.getLogger("onward")


class Crew:
    """A consumer for each handler, and beside them the inboxes' upkeep, the monitor and the log line."""

    def __init__(self, broker: Broker, handlers: Sequence[Handler], settings: Settings, hooks: Sequence[Hook]) -> None:
        self._broker = broker
        self._handlers = handlers
        self._settings = settings
        self._hooks = hooks
        self._stopping = False
        self._counted: dict[tuple[str, str], Tally] = {}  # the dead letters, by topic and group
        self.consumers: list[Consumer] = []

    async def run(self) -> None:
        """Until `stop`, or until one of them cannot go on: half an application that looks healthy helps nobody."""
        try:
            await self._start_inboxes()
            await self._consume()
        finally:
            for inbox in self._inboxes():
                await inbox.close()

    def stop(self) -> None:
        """Also one that has only begun."""
        self._stopping = True
        for consumer in self.consumers:
            consumer.stop()

    def health(self) -> Health:
        if not self.consumers:
            return Health(False, ("no handler runs",))
        troubles = tuple(trouble for consumer in self.consumers for trouble in consumer.troubles)
        return Health(not troubles, troubles)

    def readings(self) -> list[Reading]:
        return [
            Reading(
                topic=handler.topic,
                group=handler.group,
                engine=handler.engine,
                declined=consumer.declined,
                **msgspec.structs.asdict(consumer.behind()),
                **self._dead_depth(handler),
                **msgspec.structs.asdict(consumer.health()),
                **msgspec.structs.asdict(consumer.plane.counts),
            )
            for handler, consumer in zip(self._handlers, self.consumers, strict=False)
        ]

    async def _consume(self) -> None:
        member, quarantine = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}", Quarantine()
        self.consumers = [
            Consumer(self._broker, _engine(each), each, self._settings, member=member, quarantine=quarantine)
            for each in self._handlers
        ]
        for handler in self._handlers:
            self._introduce(handler)
        tasks = [asyncio.create_task(consumer.run()) for consumer in self.consumers]
        beside = [asyncio.create_task(inbox.upkeep()) for inbox in self._inboxes()]
        beside += [asyncio.create_task(self._monitor().run()), asyncio.create_task(tell(self.readings))]
        if self._stopping:
            self.stop()
        try:
            with Watchdog():
                await self._all_of(tasks)
        finally:
            for task in (*tasks, *beside):
                task.cancel()
            await asyncio.wait([*tasks, *beside])
            self.consumers = []

    async def _all_of(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        self.stop()
        errors = [end for end in await asyncio.gather(*tasks, return_exceptions=True) if end is not None]
        for other in errors[1:]:
            log.error("and another: %r", other, exc_info=other)
        if errors:
            raise errors[0]

    def _introduce(self, handler: Handler) -> None:
        grace_s = self._settings.revoke_grace_s
        if handler.timeout_s is None or handler.timeout_s > grace_s:
            log.warning(
                "%s may run longer than revoke_grace_s=%g: when members come or go, its run may overlap with the next "
                "owner's",
                *(handler.name, grace_s),
            )
        log.info(
            "%s takes %s for group %s (engine %s, ordering %s, concurrency %d, durability %s)",
            *(handler.name, handler.topic, handler.group, handler.engine, handler.ordering),
            *(handler.concurrency, self._broker.features.durability),
        )

    # -- inboxes ------------------------------------------------------------------------------------------------

    def _inboxes(self) -> Iterable[Inbox]:
        return {id(each.inbox): each.inbox for each in self._handlers if each.inbox is not None}.values()

    async def _start_inboxes(self) -> None:
        """Refuse what could not keep effects once, before the first event."""
        for handler in self._handlers:
            if handler.inbox is not None:
                ground = Ground(
                    name=handler.name,
                    batch=handler.is_batch,
                    features=self._broker.features,
                    longest_redelivery_s=longest_redelivery_s(self._settings, handler.retry, handler.timeout_s),
                )
                await handler.inbox.start(ground)

    # -- dead letters -------------------------------------------------------------------------------------------

    def _monitor(self) -> Monitor:
        thresholds = Thresholds(depth=self._settings.dead_threshold)
        return Monitor(self._tallies, self._hooks, thresholds=thresholds, every_s=self._settings.dead_check_s)

    async def _tallies(self) -> list[Tally]:
        """Of the groups whose partition 0 is ours: over the fleet each is watched by one process."""
        if not self._broker.features.aside:
            return []
        letters = DeadLetters(self._broker, [(each.topic, each.group) for each in self._handlers])
        pairs = zip(self._handlers, self.consumers, strict=True)
        ours = [handler for handler, consumer in pairs if Partition(handler.topic, 0) in consumer.plane.held]
        found = [await letters.tally(handler.topic, handler.group) for handler in ours]
        self._counted = {(tally.topic, tally.group): tally for tally in found}
        return found

    def _dead_depth(self, handler: Handler) -> dict[str, Any]:
        """As the monitor last counted."""
        tally = self._counted.get((handler.topic, handler.group))
        depth, age_s = (tally.depth, tally.oldest_age_s) if tally is not None else (None, None)
        return {"dead_letters": depth, "dead_oldest_s": age_s}


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
        workers=handler.workers or os.cpu_count() or 1,
        concurrency=concurrency,
        timeout_s=timeout_s,
        max_events_per_worker=handler.max_events_per_worker,
    )
