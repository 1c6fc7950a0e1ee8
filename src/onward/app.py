"""Onward: an application declares its handlers, publishes, and runs them."""

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from onward import context
from onward import settings as settings_
from onward.brokers import completed, open_broker
from onward.brokers.base import Broker, Ordering, Start, TopicSpec, Topology
from onward.door import SyncDoor, refuse_loop_thread, wait_for
from onward.errors import BadHandler, BadSetting, Closed, ConfigError, PartitionsDiffer, TooLarge
from onward.event import Event, new_id, new_ids
from onward.failure.expiry import EXPIRES, stamp
from onward.failure.retry import Retry
from onward.handler import EngineName, Function, Handler, bind, bind_once, check_choices, choose
from onward.inbox.base import Inbox
from onward.observe.health import Health
from onward.observe.metrics import Reading, exposition
from onward.payload import encode, type_name
from onward.signals import stopping

if TYPE_CHECKING:
    from onward.crew import Crew
    from onward.failure.dead import DeadLetters
    from onward.failure.monitor import Hook

log = logging.getLogger("onward")
AnyFunction = TypeVar("AnyFunction", bound=Function)
AnyHook = TypeVar("AnyHook", bound="Hook")


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
        self._hooks: list[Hook] = []
        self._broker: Broker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._door: SyncDoor | None = None
        self._opening = threading.Lock()
        self._crew: Crew | None = None  # while it runs
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
                self._door = SyncDoor(self.settings, self._open)
            return self._door

    def _close_in_child(self) -> None:
        """A forked child has none of its parent's threads and loops: here the application is closed, and opens anew."""
        _inherited.append((self._broker, self._door))
        self._broker = self._loop = self._door = None
        self._opening = threading.Lock()
        self._crew = None

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

    def health(self) -> Health:
        """Ready means: handlers run, and dead letters can be stored."""
        return self._crew.health() if self._crew is not None else Health(False, ("no handler runs",))

    # -- running ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._broker is not None:
            raise ConfigError("the application is already open")
        self._broker = await self._open()
        self._loop = asyncio.get_running_loop()
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
            await self._run()

    def stop(self) -> None:
        """Ask `run` to end gracefully, also one that has only begun."""
        self._stopping = True
        if self._crew is not None:
            self._crew.stop()

    async def _run(self) -> None:
        from onward.crew import Crew  # a program that only publishes starts sooner without it

        self._crew = Crew(self.broker, self.handlers, self.settings, self._hooks)
        if self._stopping:
            self._crew.stop()
        try:
            await self._crew.run()
        finally:
            self._crew, self._stopping = None, False

    # -- seeing it ----------------------------------------------------------------------------------------------

    def readings(self) -> list[Reading]:
        """How each running handler fares now."""
        return self._crew.readings() if self._crew is not None else []

    def metrics(self) -> str:
        """The same as the text that Prometheus scrapes."""
        return exposition(self.readings(), prefix=self.settings.metrics_prefix)


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
