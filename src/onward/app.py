"""Onward: declares handlers, publishes, composes the stages and runs them. The only file that knows every stage."""

import asyncio
import contextlib
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar
from uuid import uuid4

import msgspec

from onward import context
from onward import settings as settings_
from onward.brokers import open_broker
from onward.brokers.base import Broker, Ordering, Start
from onward.door import SyncDoor, refuse_loop_thread, wait_for
from onward.engines.base import Engine
from onward.engines.target import check, target_of
from onward.errors import BadHandler, BadSetting, Closed, ConfigError, TooLarge
from onward.event import Event, Partition, new_id, new_ids
from onward.failure.expiry import EXPIRES, stamp
from onward.failure.retry import Retry
from onward.failure.watch import Tally, Thresholds
from onward.handler import EngineName, Function, Handler, bind, bind_once, check_choices, choose
from onward.inbox.base import Ground, Inbox
from onward.inbox.horizon import longest_redelivery_s
from onward.observe.health import Health, tell
from onward.observe.metrics import Reading, exposition
from onward.payload import encode, type_name
from onward.signals import stopping

if TYPE_CHECKING:
    # What runs handlers is imported when they run: a program that only publishes starts sooner without it.
    from onward.failure.dead import DeadLetters
    from onward.failure.monitor import Hook, Monitor
    from onward.flow.consumer import Consumer

log = logging.getLogger("onward")
AnyFunction = TypeVar("AnyFunction", bound=Function)
AnyHook = TypeVar("AnyHook", bound="Hook")


class Onward:
    """An application: its handlers, and the broker that its URL names.

    Settings come as keywords, in the URL's query, as ONWARD_* or from onward.toml; see `onward.settings.Settings`.
    """

    def __init__(self, url: str | None = None, *, retry: Retry | None = None, **settings: Any) -> None:
        self.settings = settings_.load(url, **settings)
        if not isinstance(retry, Retry | None):
            raise BadSetting(f"retry={retry!r}: use Retry(attempts=...)")
        self.retry = Retry() if retry is None else retry  # of handlers that have none of their own
        self.handlers: list[Handler] = []
        self._hooks: list[Hook] = []
        self._counted: dict[tuple[str, str], Tally] = {}  # the dead letters, by topic and group
        self._broker: Broker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._door: SyncDoor | None = None
        self._opening = threading.Lock()
        self._consumers: list[Consumer] = []
        self._stopping = False
        _apps.add(self)

    # -- declaring ----------------------------------------------------------------------------------------------

    def handler(
        self,
        topic: str,
        *,
        group: str | None = None,
        ordering: Ordering = "key",
        concurrency: int = 100,
        engine: EngineName | None = None,
        workers: int | None = None,
        max_events_per_worker: int | None = None,
        timeout_s: float | None = 30.0,
        retry: Retry | None = None,
        start: Start = "earliest",
        on_dead: Literal["pass", "hold"] = "pass",
        batch_size: int = 1,
        batch_wait_s: float = 0.0,
        inbox: Inbox | None = None,
    ) -> Callable[[AnyFunction], AnyFunction]:
        """Declare a function that handles a topic's events for a group (by default: named like the function).

        An `async def` runs in tasks, a `def` in threads. `engine="processes"` is for what keeps a processor busy: up
        to `workers` of them (by default one for each processor) run a call at a time each, and are replaced after
        `max_events_per_worker`. At most `concurrency` events are being handled at once.
        With `batch_size` it takes lists of up to that many events, which wait up to `batch_wait_s` to fill.
        `on_dead="hold"`: a key stands still behind a dead event until that is replayed or dropped.
        `inbox`: each event's effect happens once; a parameter annotated with what the inbox gives receives it.
        """

        if not isinstance(topic, str):
            raise BadHandler("write @app.handler('topic'): the topic comes first")

        def declare(function: AnyFunction) -> AnyFunction:
            batch = batch_size > 1
            named = getattr(function, "__name__", "") if group is None else group
            if inbox is not None and not hasattr(inbox, "around"):
                raise BadHandler(f"inbox={inbox!r} is no inbox: wrap it, as SqlInbox(engine) or RedisInbox(url)")
            if inbox is None:
                call = bind(function, batch=batch)
            else:
                call = bind_once(function, inbox, group=named, engine=engine, batch=batch)
            handler = Handler(
                topic=settings_.check_name("topic", topic),
                group=settings_.check_name("group", named),
                name=f"{function.__module__}.{function.__qualname__}",
                function=function,
                call=call,
                ordering=ordering,
                concurrency=concurrency,
                engine=choose(function, engine),
                workers=workers,
                max_events_per_worker=max_events_per_worker,
                timeout_s=timeout_s,
                retry=self.retry if retry is None else retry,
                start=start,
                on_dead=on_dead,
                batch_size=batch_size,
                batch_wait_s=batch_wait_s,
                inbox=inbox,
            )
            check_choices(handler)
            self._check_twin(handler)
            self.handlers.append(handler)
            return function

        return declare

    def _check_twin(self, new: Handler) -> None:
        for known in self.handlers:
            if (known.topic, known.group) == (new.topic, new.group):
                raise BadHandler(
                    f"{new.name} and {known.name} both handle topic {new.topic!r} for group {new.group!r}: "
                    "they would share its events; give one of them another group"
                )

    # -- publishing ---------------------------------------------------------------------------------------------

    @property
    def broker(self) -> Broker:
        """The open broker; only within `async with app` or `run`."""
        if self._broker is None:
            raise Closed(
                "the application is not open: do this within `async with app:`; plain scripts have publish_sync"
            )
        return self._broker

    async def publish(
        self,
        topic: str,
        value: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        expires_s: float | None = None,
    ) -> Event:
        """Returns when the event is durably accepted. One whose turn has not come within `expires_s` seconds is not
        handled but a dead letter."""
        event = self.event(topic, value, key=key, headers=headers, expires_s=expires_s)
        await self.broker.publish([event])
        return event

    async def publish_many(self, topic: str, items: Iterable[tuple[str | None, Any]]) -> list[Event]:
        """Publish (key, value) pairs in one call; returns when all are durably accepted."""
        settings_.check_name("topic", topic)
        pairs, now = list(items), time.time()
        if odd := next((each for each in pairs if not isinstance(each, tuple | list) or len(each) != 2), None):
            raise BadSetting(
                f"publish_many takes (key, value) pairs, and None as the key of those that have none: {odd!r}"
            )
        ids = new_ids(len(pairs))
        events = [self._event(id_, topic, key, value, {}, now) for id_, (key, value) in zip(ids, pairs, strict=True)]
        if events:
            await self.broker.publish(events)
        return events

    def publish_sync(
        self,
        topic: str,
        value: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        expires_s: float | None = None,
    ) -> Event:
        """`publish` for plain scripts and threads. The first call opens the broker, which ends with the process."""
        event = self.event(topic, value, key=key, headers=headers, expires_s=expires_s)
        if self._loop is not None:  # open elsewhere: one broker object keeps each key's order
            refuse_loop_thread()
            wait_for(self.broker.publish([event]), self._loop, self.settings, [event])
        else:
            self._sync_door().publish([event])
        return event

    def _sync_door(self) -> "SyncDoor":
        with self._opening:  # several threads may come first
            if self._door is None:
                self._door = SyncDoor(self.settings)
            return self._door

    def _close_in_child(self) -> None:
        """A forked child has none of its parent's threads and loops: here the application is closed, and opens anew."""
        _inherited.append((self._broker, self._door))
        self._broker = self._loop = self._door = None
        self._opening = threading.Lock()
        self._consumers = []

    def event(
        self,
        topic: str,
        value: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        expires_s: float | None = None,
    ) -> Event:
        """The event that `publish` would send, checked."""
        settings_.check_name("topic", topic)
        now, checked = time.time(), _checked_headers(headers)
        if expires_s is not None:
            if not isinstance(expires_s, int | float) or not math.isfinite(expires_s):
                raise BadSetting(f"expires_s={expires_s!r}: seconds from now")
            checked[EXPIRES] = stamp(now + expires_s)
        return self._event(new_id(), topic, key, value, checked, now)

    def _event(
        self, id_: str, topic: str, key: str | None, value: Any, headers: Mapping[str, str], now: float
    ) -> Event:
        if key is not None and not isinstance(key, str):
            raise BadSetting(f"key {key!r} is a {type(key).__name__}; keys are str or None")
        event = Event(id_, topic, key, encode(value, topic), headers, type_name(value), now)
        if event.size > self.settings.max_event_bytes:
            raise TooLarge(
                f"an event of {event.size:,} bytes for topic {topic!r} exceeds "
                f"max_event_bytes={self.settings.max_event_bytes:,}; store it elsewhere and publish its address"
            )
        return event

    def idempotency_key(self, event: Event, *, group: str | None = None) -> str:
        """A key for APIs that take one: the same for every run of this event by this group, on any machine.

        Within a handler the group is known; elsewhere name it, unless one handler only takes the topic.
        """
        if group is None:
            group = context.group.get(None) or self._only_group(event.topic)
        return f"{group}:{event.id}"

    def _only_group(self, topic: str) -> str:
        groups = [handler.group for handler in self.handlers if handler.topic == topic]
        if len(groups) != 1:
            raise BadSetting(f"idempotency_key: {len(groups)} handlers take topic {topic!r}; say group=... here")
        return groups[0]

    # -- failing ------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> "DeadLetters":
        """The dead letters: list, show, replay, drop, export, send. Only within `async with app` or `run`."""
        from onward.failure.dead import DeadLetters

        return DeadLetters(self.broker, [(handler.topic, handler.group) for handler in self.handlers])

    def alert(self, hook: AnyHook) -> AnyHook:
        """Have this called with each Alert of the monitor; a decorator for a function of yours, or
        `app.alert(Webhook(...))`. More than `dead_threshold` dead letters are one."""
        if not callable(hook):
            raise BadSetting(f"alert({hook!r}): a function that takes an Alert, a Webhook or a Mail")
        self._hooks.append(hook)
        return hook

    async def _tallies(self) -> list[Tally]:
        """Of the groups whose partition 0 is ours: over the fleet each is watched by one process."""
        if not self.broker.features.aside:
            return []
        pairs = zip(self.handlers, self._consumers, strict=True)
        ours = [handler for handler, consumer in pairs if Partition(handler.topic, 0) in consumer.plane.held]
        found = [await self.dead.tally(handler.topic, handler.group) for handler in ours]
        self._counted = {(tally.topic, tally.group): tally for tally in found}
        return found

    def _monitor(self) -> "Monitor":
        from onward.failure.monitor import Monitor

        thresholds = Thresholds(depth=self.settings.dead_threshold)
        return Monitor(self._tallies, self._hooks, thresholds=thresholds, every_s=self.settings.dead_check_s)

    def health(self) -> Health:
        """Ready means: handlers run, and dead letters can be stored."""
        if not self._consumers:
            return Health(False, ("no handler runs",))
        troubles = tuple(trouble for consumer in self._consumers for trouble in consumer.troubles)
        return Health(not troubles, troubles)

    # -- running ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._broker is not None:
            raise ConfigError("the application is already open")
        self._broker = await open_broker(self.settings)
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        broker, self._broker, self._loop = self._broker, None, None
        if broker is not None:
            await broker.close()

    async def run(self) -> None:
        """Run every handler until SIGTERM or SIGINT: stop intake, drain, settle, release, close.

        A second signal ends the process at once; what was not settled is handled again by the next owner.
        """
        if context.in_worker:
            raise ConfigError(
                "a worker process came to app.run() while it imported its handler: "
                "put what starts the application under `if __name__ == '__main__':`"
            )
        if not self.handlers:
            raise ConfigError("nothing to run: no handler is declared; decorate one with @app.handler(topic)")
        async with contextlib.AsyncExitStack() as stack:
            if self._broker is None:
                await stack.enter_async_context(self)
            stack.enter_context(stopping(self.stop))
            stack.push_async_callback(self._close_inboxes)
            await self._start_inboxes()
            await self._consume()

    def stop(self) -> None:
        """Ask `run` to end gracefully, also one that has only begun."""
        self._stopping = True
        for consumer in self._consumers:
            consumer.stop()

    async def _consume(self) -> None:
        from onward.engines.watchdog import Watchdog
        from onward.flow.consumer import Consumer
        from onward.flow.solitude import Solitude

        member = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        solitude = Solitude()
        self._consumers = [
            Consumer(self.broker, _engine(handler), handler, self.settings, member=member, solitude=solitude)
            for handler in self.handlers
        ]
        durability = self.broker.features.durability
        for handler in self.handlers:
            if handler.timeout_s is None or handler.timeout_s > self.settings.revoke_grace_s:
                log.warning(
                    "%s may run longer than revoke_grace_s=%g: when members come or go, its run may overlap with the "
                    "next owner's",
                    *(handler.name, self.settings.revoke_grace_s),
                )
            log.info(
                "%s takes %s for group %s (engine %s, ordering %s, concurrency %d, durability %s)",
                *(handler.name, handler.topic, handler.group, handler.engine, handler.ordering),
                *(handler.concurrency, durability),
            )
        tasks = [asyncio.create_task(consumer.run()) for consumer in self._consumers]
        beside = [asyncio.create_task(inbox.upkeep()) for inbox in self._inboxes()]
        beside += [asyncio.create_task(self._monitor().run()), asyncio.create_task(tell(self.readings))]
        if self._stopping:
            self.stop()
        try:
            with Watchdog():
                # One consumer that cannot go on ends them all: half an application that looks healthy helps nobody.
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                self.stop()
                errors = [end for end in await asyncio.gather(*tasks, return_exceptions=True) if end is not None]
            for other in errors[1:]:
                log.error("and another: %r", other, exc_info=other)
            if errors:
                raise errors[0]
        finally:
            for task in (*tasks, *beside):
                task.cancel()
            await asyncio.wait([*tasks, *beside])
            self._consumers = []
            self._stopping = False

    def _inboxes(self) -> Iterable[Inbox]:
        return {id(handler.inbox): handler.inbox for handler in self.handlers if handler.inbox is not None}.values()

    async def _start_inboxes(self) -> None:
        """Refuse what could not keep effects once, before the first event."""
        for handler in self.handlers:
            if handler.inbox is not None:
                ground = Ground(
                    name=handler.name,
                    batch=handler.is_batch,
                    features=self.broker.features,
                    longest_redelivery_s=longest_redelivery_s(self.settings, handler.retry, handler.timeout_s),
                )
                await handler.inbox.start(ground)

    async def _close_inboxes(self) -> None:
        for inbox in self._inboxes():
            await inbox.close()

    # -- seeing it ----------------------------------------------------------------------------------------------

    def readings(self) -> list[Reading]:
        """How each running handler fares now."""
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
            for handler, consumer in zip(self.handlers, self._consumers, strict=False)
        ]

    def _dead_depth(self, handler: Handler) -> dict[str, Any]:
        """As the monitor last counted."""
        tally = self._counted.get((handler.topic, handler.group))
        depth, age_s = (tally.depth, tally.oldest_age_s) if tally is not None else (None, None)
        return {"dead_letters": depth, "dead_oldest_s": age_s}

    def metrics(self) -> str:
        """The same as the text that Prometheus scrapes."""
        return exposition(self.readings(), prefix=self.settings.metrics_prefix)


def _engine(handler: Handler) -> Engine:
    concurrency, timeout_s = handler.concurrency, handler.timeout_s
    if handler.engine == "tasks":
        from onward.engines.tasks import TaskEngine

        return TaskEngine(handler.call, concurrency=concurrency, timeout_s=timeout_s)
    if handler.engine == "threads":
        from onward.engines.threads import ThreadEngine

        return ThreadEngine(handler.call, concurrency=concurrency, timeout_s=timeout_s)
    from onward.engines.processes import ProcessEngine

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


def _checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    if not headers:
        return {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise BadSetting(f"header {name!r}: {value!r}: names and values are str")
    return dict(headers)


def _close_in_child() -> None:
    for app in list(_apps):
        app._close_in_child()  # noqa: SLF001 - of our own class


_apps: "weakref.WeakSet[Onward]" = weakref.WeakSet()
_inherited: list[Any] = []  # never closed or collected in the child: the connections in it are its parent's
os.register_at_fork(after_in_child=_close_in_child)
