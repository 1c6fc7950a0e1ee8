"""Onward: an application that declares handlers, publishes events and runs the handlers."""

import asyncio
import contextlib
import logging
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

from onward import context
from onward import settings as settings_
from onward.brokers import completed, keeps_log_in, open_broker
from onward.brokers.base import Broker, Ordering, Start, Supervised, TopicSpec, Topology
from onward.door import SyncDoor, refuse_loop_thread, wait_for
from onward.envelope import build, check_type, checked_headers, checked_pairs
from onward.error_report import storable
from onward.errors import BadHandler, BadSetting, Closed, ConfigError, PartitionsDiffer, TopologyDiffers
from onward.event import Event, new_id, new_ids
from onward.failure.retry import Retry
from onward.handler import (
    EngineName,
    Function,
    Handler,
    bind,
    bind_once,
    check_choices,
    check_tiers,
    choose,
    type_filter,
)
from onward.inbox.base import Inbox
from onward.observe.health import Health
from onward.observe.metrics import Family, Registry, exposition
from onward.observe.reading import Reading
from onward.signals import stopping

if TYPE_CHECKING:
    from onward.crew import Crew
    from onward.failure.dead import DeadLetters
    from onward.failure.monitor import Hook
    from onward.outbox import Outbox

log = logging.getLogger("onward")

AnyFunction = TypeVar("AnyFunction", bound=Function)
AnyHook = TypeVar("AnyHook", bound="Hook")


class Opened(NamedTuple):
    """The broker while the application is open, and the event loop that it is open on."""

    broker: Broker
    loop: asyncio.AbstractEventLoop


class Stages(NamedTuple):
    """What a run consists of. `nothing`: the error if it consists of nothing."""

    handlers: Sequence[Handler]
    outboxes: "Sequence[Outbox]"
    nothing: str


class Onward:
    """An application: its handlers, and the broker that its URL names.

    Settings come as keywords, in the URL's query, as ONWARD_* or from onward.toml; see `onward.settings.Settings`.
    """

    def __init__(self, url: str | None = None, *, retry: Retry | None = None, **settings: Any) -> None:
        self.settings = completed(settings_.load(url, **settings))
        if not isinstance(retry, Retry | None):
            raise BadSetting(f"retry={retry!r}: use Retry(attempts=...)")
        self.retry = Retry() if retry is None else retry  # for handlers without `retry=`
        self.handlers: list[Handler] = []
        self.declared = Topology()  # by `topology`
        self.observes = False  # opening it creates nothing and accepts any topology, for commands that only read
        self.registry = Registry()  # of metrics
        self.outboxes: list[Outbox] = []  # each Outbox adds itself
        self.endpoint: str | None = None  # host:port where this process serves readings; part of its member name
        self.supervised: Supervised | None = None  # `onward run` sets it in the processes that it starts
        self.joined: Callable[[], None] = lambda: None  # `run` calls it when every handler has joined its group
        self._hooks: list[Hook] = []
        self._opening = False
        self._opened: Opened | None = None
        self._door = SyncDoor(self.settings, self._open)
        self._crew: Crew | None = None  # while the handlers run
        self.registry.collect_from(self._part_families)
        self._stops = 0  # calls of `stop` so far; a run stops when this grows after `run` was called
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
        types: Sequence[str] | None = None,
        tiers: Mapping[str, str] | None = None,
    ) -> Callable[[AnyFunction], AnyFunction]:
        """Declare a function that handles the events of a topic for a group. The group's default is the function's
        name.

        An `async def` runs in tasks, a `def` in threads. `engine="processes"` is for CPU-bound work: up to `workers`
        processes (by default one per processor) run one call at a time each. A worker is replaced after
        `max_events_per_worker` events. At most `concurrency` calls run at once.
        With `batch_size` above 1 the handler gets lists of up to that many events. A batch waits up to `batch_wait_s`
        to fill.
        `on_dead="hold"`: the later events of a key wait behind its dead letter until you replay or drop the letter.
        `inbox`: each event's effect happens once. A parameter annotated with the inbox's type, such as its connection,
        receives it.
        `types`: the handler gets only events of these types, such as `["order.placed", "notification.*"]`, where `*` is
        any text. Events of other types count as done.
        `tiers`: on RabbitMQ with ordering="none", events whose type matches the pattern of `critical` run before the
        others, and those of `bulk` after them: `{"critical": "notification.*.critical"}`.
        """

        if not isinstance(topic, str):
            raise BadHandler("@app.handler needs a topic: write @app.handler('topic')")

        def declare(function: AnyFunction) -> AnyFunction:
            batch = batch_size > 1
            named = getattr(function, "__name__", "") if group is None else group
            if inbox is not None and not hasattr(inbox, "around"):
                raise BadHandler(f"inbox={inbox!r} is not an inbox: use SqlInbox(engine) or RedisInbox(url)")
            if inbox is None:
                call = bind(function, batch=batch)
            else:
                call = bind_once(function, inbox, group=named, engine=engine, batch=batch)
            handler = Handler(
                topic=settings_.check_name("topic", topic),
                group=settings_.check_name("group", named),
                name=storable(f"{function.__module__}.{function.__qualname__}"),
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
                wants=None if types is None else type_filter(types, function.__qualname__),
                types=() if types is None else tuple(types),
                tiers={} if tiers is None else tiers,
            )
            check_choices(handler)
            check_tiers(handler.tiers, function.__qualname__)
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

    def topology(self, *objects: object) -> None:
        """Declare topics, such as TopicSpec("orders", 24), and objects of kinds that only this broker has.

        The application creates missing ones when it opens, unless `auto_declare` is off; `onward topology apply`
        creates them too. Opening raises PartitionsDiffer if a topic exists with another partition count, and
        TopologyDiffers if another object exists and differs.
        """
        topics = [each for each in objects if isinstance(each, TopicSpec)]
        own = [each for each in objects if not isinstance(each, TopicSpec)]
        self.declared = Topology([*self.declared.topics, *topics], [*self.declared.own, *own])

    # -- publishing ---------------------------------------------------------------------------------------------

    @property
    def broker(self) -> Broker:
        """The open broker. Raises Closed while the application is not open."""
        if self._opened is None:
            raise Closed(
                "the application is not open: do this within `async with app:`; in plain scripts use publish_sync"
            )
        return self._opened.broker

    async def publish(
        self,
        topic: str,
        value: Any,
        *,
        key: str | None = None,
        type: str | None = None,  # noqa: A002
        headers: Mapping[str, str] | None = None,
        expires_s: float | None = None,
    ) -> Event:
        """Publish one event. Returns when the broker has stored it durably.

        Handlers with `types=` select events by `type`; the default is the name of the value's class. An event that has
        not started to run within `expires_s` seconds becomes a dead letter.
        """
        event = self.event(topic, value, key=key, type=type, headers=headers, expires_s=expires_s)
        self._warn_of_dual_write()
        await self.broker.publish([event])
        return event

    async def publish_many(
        self,
        topic: str,
        items: Iterable[tuple[str | None, Any]],
        *,
        type: str | None = None,  # noqa: A002
    ) -> list[Event]:
        """Publish (key, value) pairs in one call. Returns when the broker has stored all of them durably. All get the
        same `type`."""
        settings_.check_name("topic", topic)
        kind, pairs, now = check_type(type), checked_pairs(list(items)), time.time()
        limit = self.settings.max_event_bytes
        events = [
            build(id_, topic, key, value, headers={}, type_=kind, now=now, max_bytes=limit)
            for id_, (key, value) in zip(new_ids(len(pairs)), pairs, strict=True)
        ]
        self._warn_of_dual_write()
        if events:
            await self.broker.publish(events)
        return events

    def publish_sync(
        self,
        topic: str,
        value: Any,
        *,
        key: str | None = None,
        type: str | None = None,  # noqa: A002
        headers: Mapping[str, str] | None = None,
        expires_s: float | None = None,
    ) -> Event:
        """`publish` for plain scripts and threads. The first call opens a broker, which stays open until the process
        ends."""
        event = self.event(topic, value, key=key, type=type, headers=headers, expires_s=expires_s)
        self._warn_of_dual_write()
        opened = self._opened
        if opened is not None:  # order within a key is only certain if all events go through one broker object
            refuse_loop_thread()
            wait_for(opened.broker.publish([event]), opened.loop, self.settings, [event])
        else:
            self._door.publish([event])
        return event

    def append_in(self, connection: Any, events: Sequence[Event]) -> Callable[[], None] | None:
        """Store events inside the transaction that this DB-API connection has open, if the broker keeps its log in the
        same database. Returns a function to call after the commit, which wakes the consumers. Returns None, and does
        nothing, if the log is elsewhere. `Outbox.add` calls it; see `onward.brokers.base.Broker.append_in`.
        """
        if self._opened is not None:
            broker = self._opened.broker
            return broker.append_in(connection, events) if broker.features.append_in else None
        if not keeps_log_in(self.settings, connection):
            return None
        return self._door.broker().append_in(connection, events)

    def _warn_of_dual_write(self) -> None:
        """With `debug`: report a direct publish while a transaction with events in the outbox is open."""
        if not self.settings.debug or not self.outboxes:
            return
        from onward.outbox import open_transactions

        if (added := open_transactions.current()) is not None:
            log.warning(
                "%s publishes directly while the transaction is open in which %s added an event to the outbox. If the "
                "transaction is rolled back, the direct event stays published; add it to the outbox too",
                *(open_transactions.caller(), added),
            )

    def event(
        self,
        topic: str,
        value: Any,
        *,
        key: str | None = None,
        type: str | None = None,  # noqa: A002
        headers: Mapping[str, str] | None = None,
        expires_s: float | None = None,
    ) -> Event:
        """Check the arguments as `publish` does, and return the event that it would send."""
        settings_.check_name("topic", topic)
        now, limit = time.time(), self.settings.max_event_bytes
        checked, kind = checked_headers(headers, expires_s=expires_s, now=now), check_type(type)
        return build(new_id(), topic, key, value, headers=checked, type_=kind, now=now, max_bytes=limit)

    def idempotency_key(self, event: Event, *, group: str | None = None) -> str:
        """A key for APIs that accept one. It is the same for every run of this event by this group, on any machine.

        In a handler, the default group is the handler's. Elsewhere pass `group`, unless the topic has only one handler.
        """
        if group is None:
            group = context.group.get(None) or self._only_group(event.topic)
        return f"{group}:{event.id}"

    def _only_group(self, topic: str) -> str:
        groups = [handler.group for handler in self.handlers if handler.topic == topic]
        if len(groups) != 1:
            raise BadSetting(f"idempotency_key: topic {topic!r} has {len(groups)} handlers; choose with group=...")
        return groups[0]

    # -- failing ------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> "DeadLetters":
        """The dead letters: list, show, replay, drop, export, send. Only while the application is open."""
        from onward.failure.dead import DeadLetters

        return DeadLetters(self.broker, [(handler.topic, handler.group) for handler in self.handlers])

    def alert(self, hook: AnyHook) -> AnyHook:
        """Register a function that is called with each Alert, for example when there are more than `dead_threshold`
        dead letters. Use it as a decorator, or as `app.alert(Webhook(...))`."""
        if not callable(hook):
            raise BadSetting(f"alert({hook!r}): use a function that takes an Alert, a Webhook or a Mail")
        self._hooks.append(hook)
        return hook

    def health(self) -> Health:
        """Ready: the handlers run, every partition makes progress, and progress can be stored. If not, `troubles` says
        what is wrong."""
        return self._crew.health() if self._crew is not None else Health(False, ("no handler runs",))

    # -- running ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._opening or self._opened is not None:
            raise ConfigError(
                "the application is already open, or another task is opening it: write `async with app:` once, around "
                "all code that uses it"
            )
        self._opening = True
        try:
            self._opened = Opened(await self._open(), asyncio.get_running_loop())
        finally:
            self._opening = False
        return self

    async def _open(self) -> Broker:
        broker = await open_broker(self.settings)
        try:
            if self.declared != Topology():
                changes = await broker.declare(self.declared, apply=self.settings.auto_declare and not self.observes)
                refused = [change for change in changes if change.action == "refuse"]
                if refused and not self.observes:
                    topics_only = all(change.what.startswith("topic ") for change in refused)
                    kind = PartitionsDiffer if topics_only else TopologyDiffers
                    raise kind("; ".join(change.detail for change in refused))
        except BaseException:
            await broker.close()
            raise
        return broker

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.broker.close()

    def run(self) -> Coroutine[Any, Any, None]:
        """Run every handler until SIGTERM or SIGINT. Then stop intake, drain, settle, release and close.

        Unless `outbox_relay` is off, this also publishes the events of the outbox. A second signal ends the process at
        once; the next owner handles the unsettled events again. Inside a program that handles signals itself, such as a
        web server, use `running`.
        """
        return self._run(self._everything(), self._stops)  # read now: `stop` may be called before the first step

    def relay(self) -> Coroutine[Any, Any, None]:
        """Publish the events of the outbox until SIGTERM or SIGINT, without handlers."""
        return self._run(self._only_relays(), self._stops)

    def _everything(self) -> "Stages":
        nothing = "nothing to run: no handler is declared; decorate a function with @app.handler(topic)"
        return Stages(self.handlers, self.outboxes if self.settings.outbox_relay else (), nothing)

    def _only_relays(self) -> "Stages":
        nothing = "nothing to relay: no outbox has a database; write Outbox(app, URL), or set outbox_url"
        return Stages((), self.outboxes, nothing)

    async def _run(self, stages: "Stages", stops: int) -> None:
        self._check_runnable(stages)
        async with contextlib.AsyncExitStack() as stack:
            if self._opened is None:
                await stack.enter_async_context(self)
            stack.enter_context(stopping(self.stop))
            task = await stack.enter_async_context(self._beside(stages, stops))
            self.joined()
            await asyncio.wait([task])

    def running(self) -> AbstractAsyncContextManager[Self]:
        """Run the handlers in this event loop while the body of `async with` runs. Signals are not touched.

        The body begins when every handler has joined its group. On exit: stop intake, drain, settle, release, and close
        the application if this opened it. This also happens when the body is cancelled; a second cancellation cuts the
        drain short. If a handler's consumer fails, the body's task is cancelled and the `async with` raises the
        failure. `stop` ends the handlers but not the body.
        """
        return self._running(self._everything(), self._stops)

    def relaying(self) -> AbstractAsyncContextManager[Self]:
        """Publish the events of the outbox while the body of `async with` runs, without handlers."""
        return self._running(self._only_relays(), self._stops)

    @contextlib.asynccontextmanager
    async def _running(self, stages: "Stages", stops: int) -> AsyncIterator[Self]:
        self._check_runnable(stages)
        async with contextlib.AsyncExitStack() as stack:
            if self._opened is None:
                await stack.enter_async_context(self)
            await stack.enter_async_context(self._beside(stages, stops))
            yield self

    def stop(self) -> None:
        """Ask the handlers to end gracefully. This ends each `run` or `running` that was called before, even if it has
        not begun; it has no effect on later calls."""
        self._stops += 1
        if self._crew is not None:
            self._crew.stop()

    def _check_runnable(self, stages: "Stages") -> None:
        if context.in_worker:
            raise ConfigError(
                "a worker process started the application while it imported its handler: "
                "put the call that starts the application under `if __name__ == '__main__':`"
            )
        if not stages.handlers and not any(outbox.url for outbox in stages.outboxes):
            raise ConfigError(stages.nothing)
        if self._crew is not None:
            raise ConfigError(
                "this application already runs: call one of app.run(), app.running(), app.relay() and app.relaying(), "
                "and call it once; in the body of `async with app.running():` the handlers run until the body ends. To "
                "run more calls at once, start another process, as `onward run --workers` does"
            )

    @contextlib.asynccontextmanager
    async def _beside(self, stages: "Stages", stops: int) -> AsyncIterator[asyncio.Task[None]]:
        """Run the handlers in their own task. `stops`: the value of `_stops` when the run was called."""
        from onward.beside import Beside  # imported late: a program that only publishes starts faster
        from onward.crew import Crew

        crew = self._crew = Crew(
            self.broker,
            stages.handlers,
            self.settings,
            self._hooks,
            registry=self.registry,
            endpoint=self.endpoint,
            supervised=self.supervised,
            outboxes=stages.outboxes,
        )
        if self._stops > stops:
            crew.stop()
        try:
            async with Beside(crew.run, crew.stop) as task:
                yield task
        finally:
            self._crew = None

    # -- observing ----------------------------------------------------------------------------------------------

    def readings(self) -> list[Reading]:
        """The current figures of each running handler and its partitions."""
        return self._crew.readings() if self._crew is not None else []

    def metrics(self) -> str:
        """The readings and the metrics in `registry`, as the text that Prometheus reads."""
        from onward.observe.figures import figures

        families = [*figures(self.readings()), *self.registry.families()]
        return exposition(families, prefix=self.settings.metrics_prefix)

    def _part_families(self) -> list[Family]:
        """The metrics that only this kind of broker has, and those of the relays."""
        from onward.observe.figures import of_broker

        found = [] if self._opened is None else [*self._opened.broker.figures()]
        if self._crew is None:
            return of_broker(found, ())
        return of_broker([*found, *self._crew.figures()], self.readings(), [self._crew.durations()])


def _close_in_child() -> None:
    """A forked child has none of its parent's threads and loops. Mark every application as closed there, so that it can
    be opened again."""
    for app in list(_apps):
        _inherited.append((app._opened, app._door))  # noqa: SLF001 - of our own class
        app._opening, app._opened, app._crew = False, None, None  # noqa: SLF001
        app._door = SyncDoor(app.settings, app._open)  # noqa: SLF001


_apps: "weakref.WeakSet[Onward]" = weakref.WeakSet()
_inherited: list[Any] = []  # never closed or collected in the child: these connections belong to the parent
os.register_at_fork(after_in_child=_close_in_child)
