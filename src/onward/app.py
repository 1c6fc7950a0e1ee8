"""Onward: an application declares its handlers, publishes, and runs them."""

import asyncio
import contextlib
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

from onward import context
from onward import settings as settings_
from onward.brokers import completed, open_broker
from onward.brokers.base import Broker, Ordering, Start, Supervised, TopicSpec, Topology
from onward.door import SyncDoor, refuse_loop_thread, wait_for
from onward.envelope import build, check_type, checked_headers, checked_pairs
from onward.error_report import storable
from onward.errors import BadHandler, BadSetting, Closed, ConfigError, PartitionsDiffer
from onward.event import Event, new_id, new_ids
from onward.failure.retry import Retry
from onward.handler import EngineName, Function, Handler, bind, bind_once, check_choices, choose, type_filter
from onward.inbox.base import Inbox
from onward.observe.health import Health
from onward.observe.metrics import Registry, exposition
from onward.observe.reading import Reading
from onward.signals import stopping

if TYPE_CHECKING:
    from onward.crew import Crew
    from onward.failure.dead import DeadLetters
    from onward.failure.monitor import Hook

AnyFunction = TypeVar("AnyFunction", bound=Function)
AnyHook = TypeVar("AnyHook", bound="Hook")


class Opened(NamedTuple):
    """The broker while the application is open, and the event loop that it is open on."""

    broker: Broker
    loop: asyncio.AbstractEventLoop


class Onward:
    """An application: its handlers, and the broker that its URL names.

    Settings come as keywords, in the URL's query, as ONWARD_* or from onward.toml; see `onward.settings.Settings`.
    """

    def __init__(self, url: str | None = None, *, retry: Retry | None = None, **settings: Any) -> None:
        self.settings = completed(settings_.load(url, **settings))
        if not isinstance(retry, Retry | None):
            raise BadSetting(f"retry={retry!r}: use Retry(attempts=...)")
        self.retry = Retry() if retry is None else retry  # of handlers that have none of their own
        self.handlers: list[Handler] = []
        self.declared = Topology()  # by `topology`
        self.registry = Registry()  # of metrics
        self.endpoint: str | None = None  # host:port where this process serves readings; part of its member name
        self.supervised: Supervised | None = None  # set by `onward run` in a process that it started
        self._hooks: list[Hook] = []
        self._opening = False
        self._opened: Opened | None = None
        self._door = SyncDoor(self.settings, self._open)
        self._crew: Crew | None = None  # while the handlers run
        self._stops = 0  # calls of `stop` so far; a run heeds those that come after it was called
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
    ) -> Callable[[AnyFunction], AnyFunction]:
        """Declare a function that handles a topic's events for a group (by default: named like the function).

        An `async def` runs in tasks, a `def` in threads. `engine="processes"` is for CPU-bound work: up to `workers`
        processes (by default one per processor) run one call at a time each, and are replaced after
        `max_events_per_worker`. At most `concurrency` events are handled at once.
        With `batch_size` the handler takes lists of up to that many events, which wait up to `batch_wait_s` to fill.
        `on_dead="hold"`: a key stands still behind a dead event until that is replayed or dropped.
        `inbox`: each event's effect happens once; a parameter annotated with what the inbox gives receives it.
        `types`: only events of these types, such as `["order.placed", "notification.*"]`, where `*` is any text; events
        of other types count as done.
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

    def topology(self, *objects: object) -> None:
        """Declare topics, as TopicSpec("orders", 24), and objects of kinds that only this broker has.

        What does not exist is created when the application opens, unless `auto_declare` is off, or by
        `onward topology apply`. PartitionsDiffer when it opens: a topic has another partition count.
        """
        topics = [each for each in objects if isinstance(each, TopicSpec)]
        own = [each for each in objects if not isinstance(each, TopicSpec)]
        self.declared = Topology([*self.declared.topics, *topics], [*self.declared.own, *own])

    # -- publishing ---------------------------------------------------------------------------------------------

    @property
    def broker(self) -> Broker:
        """The open broker; only while the application is open."""
        if self._opened is None:
            raise Closed(
                "the application is not open: do this within `async with app:`; plain scripts have publish_sync"
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
        """Returns when the event is durably accepted.

        `type` is what handlers with `types=` select by; by default the name of the value's class. An event whose turn
        has not come within `expires_s` seconds becomes a dead letter instead of being handled.
        """
        event = self.event(topic, value, key=key, type=type, headers=headers, expires_s=expires_s)
        await self.broker.publish([event])
        return event

    async def publish_many(
        self,
        topic: str,
        items: Iterable[tuple[str | None, Any]],
        *,
        type: str | None = None,  # noqa: A002
    ) -> list[Event]:
        """Publish (key, value) pairs in one call; returns when all are durably accepted. `type` is that of all."""
        settings_.check_name("topic", topic)
        kind, pairs, now = check_type(type), checked_pairs(list(items)), time.time()
        limit = self.settings.max_event_bytes
        events = [
            build(id_, topic, key, value, headers={}, type_=kind, now=now, max_bytes=limit)
            for id_, (key, value) in zip(new_ids(len(pairs)), pairs, strict=True)
        ]
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
        opened = self._opened
        if opened is not None:  # one broker object keeps each key's order
            refuse_loop_thread()
            wait_for(opened.broker.publish([event]), opened.loop, self.settings, [event])
        else:
            self._door.publish([event])
        return event

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
        """The event that `publish` would send, checked."""
        settings_.check_name("topic", topic)
        now, limit = time.time(), self.settings.max_event_bytes
        checked, kind = checked_headers(headers, expires_s=expires_s, now=now), check_type(type)
        return build(new_id(), topic, key, value, headers=checked, type_=kind, now=now, max_bytes=limit)

    def idempotency_key(self, event: Event, *, group: str | None = None) -> str:
        """A key for APIs that take one: the same for every run of this event by this group, on any machine.

        In a handler the group is known. Elsewhere name it, unless only one handler takes the topic.
        """
        if group is None:
            group = context.group.get(None) or self._only_group(event.topic)
        return f"{group}:{event.id}"

    def _only_group(self, topic: str) -> str:
        groups = [handler.group for handler in self.handlers if handler.topic == topic]
        if len(groups) != 1:
            raise BadSetting(f"idempotency_key: {len(groups)} handlers take topic {topic!r}; name one with group=...")
        return groups[0]

    # -- failing ------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> "DeadLetters":
        """The dead letters: list, show, replay, drop, export, send. Only while the application is open."""
        from onward.failure.dead import DeadLetters

        return DeadLetters(self.broker, [(handler.topic, handler.group) for handler in self.handlers])

    def alert(self, hook: AnyHook) -> AnyHook:
        """Call this with each Alert, such as more than `dead_threshold` dead letters. Use it as a decorator, or as
        `app.alert(Webhook(...))`."""
        if not callable(hook):
            raise BadSetting(f"alert({hook!r}): a function that takes an Alert, a Webhook or a Mail")
        self._hooks.append(hook)
        return hook

    def health(self) -> Health:
        """Ready: the handlers run, every partition moves, and progress can be stored. Else it says what is wrong."""
        return self._crew.health() if self._crew is not None else Health(False, ("no handler runs",))

    # -- running ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._opening or self._opened is not None:
            raise ConfigError(
                "the application is already open, or another task is opening it: use the open one, and write "
                "`async with app:` once, around all of it"
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
                changes = await broker.declare(self.declared, apply=self.settings.auto_declare)
                if refused := [change.detail for change in changes if change.action == "refuse"]:
                    raise PartitionsDiffer("; ".join(refused))
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
        """Run every handler until SIGTERM or SIGINT: stop intake, drain, settle, release, close.

        A second signal ends the process at once; what was not settled is handled again by the next owner. Inside a
        program that handles signals itself, such as a web server, use `running`.
        """
        return self._run(self._stops)  # read now: a stop may come before the coroutine's first step

    async def _run(self, stops: int) -> None:
        self._check_runnable()
        async with contextlib.AsyncExitStack() as stack:
            if self._opened is None:
                await stack.enter_async_context(self)
            stack.enter_context(stopping(self.stop))
            await asyncio.wait([await stack.enter_async_context(self._beside(stops))])

    def running(self) -> AbstractAsyncContextManager[Self]:
        """Run the handlers beside the body, in this event loop, and leave signals alone.

        The body begins when every handler has joined its group. On exit: stop intake, drain, settle, release, and close
        what this opened. This also happens when the body is cancelled; a second cancellation cuts the drain short.
        If a handler's consumer fails, the body's task is cancelled and this raises the failure. `stop` ends the
        handlers and leaves the body alone.
        """
        return self._running(self._stops)

    @contextlib.asynccontextmanager
    async def _running(self, stops: int) -> AsyncIterator[Self]:
        self._check_runnable()
        async with contextlib.AsyncExitStack() as stack:
            if self._opened is None:
                await stack.enter_async_context(self)
            await stack.enter_async_context(self._beside(stops))
            yield self

    def stop(self) -> None:
        """Ask the handlers to end gracefully. It concerns `run` and `running` from the moment they are called, and not
        those that are called later."""
        self._stops += 1
        if self._crew is not None:
            self._crew.stop()

    def _check_runnable(self) -> None:
        if context.in_worker:
            raise ConfigError(
                "a worker process started the application while it imported its handler: "
                "put what starts the application under `if __name__ == '__main__':`"
            )
        if not self.handlers:
            raise ConfigError("nothing to run: no handler is declared; decorate one with @app.handler(topic)")
        if self._crew is not None:
            raise ConfigError(
                "the handlers of this application already run: call app.run() or app.running() once; in the body of "
                "`async with app.running():` they run until it ends. To run more of them at once, start another "
                "process, as `onward run --workers` does"
            )

    @contextlib.asynccontextmanager
    async def _beside(self, stops: int) -> AsyncIterator[asyncio.Task[None]]:
        """The handlers in a task of their own. `stops`: how many there were when the run was called."""
        from onward.beside import Beside  # a program that only publishes starts sooner without these
        from onward.crew import Crew

        crew = self._crew = Crew(
            self.broker,
            self.handlers,
            self.settings,
            self._hooks,
            registry=self.registry,
            endpoint=self.endpoint,
            supervised=self.supervised,
        )
        if self._stops > stops:
            crew.stop()
        try:
            async with Beside(crew.run, crew.stop) as task:
                yield task
        finally:
            self._crew = None

    # -- seeing it ----------------------------------------------------------------------------------------------

    def readings(self) -> list[Reading]:
        """How each running handler is doing now, by partition too."""
        return self._crew.readings() if self._crew is not None else []

    def metrics(self) -> str:
        """The readings and what stages have added to `registry`, as the text that Prometheus reads."""
        from onward.observe.figures import figures

        families = [*figures(self.readings()), *self.registry.families()]
        return exposition(families, prefix=self.settings.metrics_prefix)


def _close_in_child() -> None:
    """A forked child has none of its parent's threads and loops: there every application is closed, and can be opened
    again."""
    for app in list(_apps):
        _inherited.append((app._opened, app._door))  # noqa: SLF001 - of our own class
        app._opening, app._opened, app._crew = False, None, None  # noqa: SLF001
        app._door = SyncDoor(app.settings, app._open)  # noqa: SLF001


_apps: "weakref.WeakSet[Onward]" = weakref.WeakSet()
_inherited: list[Any] = []  # never closed or collected in the child: the connections in it are its parent's
os.register_at_fork(after_in_child=_close_in_child)
