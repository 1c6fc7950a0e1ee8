"""Onward: declares handlers, publishes, composes the stages and runs them. The only file that knows every stage."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from uuid import uuid4

from onward import settings as settings_
from onward.brokers import open_broker
from onward.brokers.base import Broker, Ordering, Start
from onward.engines.tasks import TaskEngine
from onward.errors import BadHandler, BadSetting, Closed, ConfigError, TooLarge
from onward.event import Event, new_id, new_ids
from onward.failure.retry import Retry
from onward.flow.consumer import Consumer
from onward.flow.solitude import Solitude
from onward.handler import EngineName, Function, Handler, bind
from onward.payload import encode, type_name

log = logging.getLogger("onward")
AnyFunction = TypeVar("AnyFunction", bound=Function)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Onward:
    """An application: its handlers, and the broker that its URL names.

    Settings come as keywords, in the URL's query, as ONWARD_* or from onward.toml; see `onward.settings.Settings`.
    """

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        self.settings = settings_.load(url, **settings)
        self.handlers: list[Handler] = []
        self._broker: Broker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._door: _SyncDoor | None = None
        self._opening = threading.Lock()
        self._consumers: list[Consumer] = []
        self._stopping = False

    # -- declaring ----------------------------------------------------------------------------------------------

    def handler(
        self,
        topic: str,
        *,
        group: str | None = None,
        ordering: Ordering = "key",
        concurrency: int = 100,
        engine: EngineName = "tasks",
        timeout_s: float | None = 30.0,
        retry: Retry | None = None,
        start: Start = "earliest",
        on_dead: Literal["pass", "hold"] = "pass",
        batch_size: int = 1,
        batch_wait_s: float = 0.0,
    ) -> Callable[[AnyFunction], AnyFunction]:
        """Declare an `async def` that handles a topic's events for a group (by default: named like the function).

        With `batch_size` it takes lists of up to that many events, which wait up to `batch_wait_s` to fill.
        `on_dead="hold"`: a key stands still behind a dead event until that is replayed or dropped.
        """

        if not isinstance(topic, str):
            raise BadHandler("write @app.handler('topic'): the topic comes first")

        def declare(function: AnyFunction) -> AnyFunction:
            call = bind(function, batch=batch_size > 1)
            handler = Handler(
                topic=settings_.check_name("topic", topic),
                group=settings_.check_name("group", function.__name__ if group is None else group),
                name=f"{function.__module__}.{function.__qualname__}",
                call=call,
                ordering=ordering,
                concurrency=concurrency,
                engine=engine,
                timeout_s=timeout_s,
                retry=retry or Retry(),
                start=start,
                on_dead=on_dead,
                batch_size=batch_size,
                batch_wait_s=batch_wait_s,
            )
            _check_choices(handler)
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
            raise Closed("the application is not open: publish within `async with app:`, or use publish_sync")
        return self._broker

    async def publish(
        self, topic: str, value: Any, *, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Event:
        """Returns when the event is durably accepted."""
        event = self.event(topic, value, key=key, headers=headers)
        await self.broker.publish([event])
        return event

    async def publish_many(self, topic: str, items: Iterable[tuple[str | None, Any]]) -> list[Event]:
        """Publish (key, value) pairs in one call; returns when all are durably accepted."""
        settings_.check_name("topic", topic)
        pairs, now = list(items), time.time()
        ids = new_ids(len(pairs))
        events = [self._event(id_, topic, key, value, {}, now) for id_, (key, value) in zip(ids, pairs, strict=True)]
        if events:
            await self.broker.publish(events)
        return events

    def publish_sync(
        self, topic: str, value: Any, *, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Event:
        """`publish` for plain scripts and threads. The first call opens the broker, which ends with the process."""
        event = self.event(topic, value, key=key, headers=headers)
        if self._loop is not None:  # open elsewhere: one broker object keeps each key's order
            _refuse_loop_thread()
            asyncio.run_coroutine_threadsafe(self.broker.publish([event]), self._loop).result()
        else:
            self._sync_door().publish([event])
        return event

    def _sync_door(self) -> "_SyncDoor":
        with self._opening:  # several threads may come first
            if self._door is None or self._door.pid != os.getpid():  # a forked child has none of its parent's threads
                self._door = _SyncDoor(self.settings)
            return self._door

    def event(
        self, topic: str, value: Any, *, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Event:
        """The event that `publish` would send, checked."""
        settings_.check_name("topic", topic)
        return self._event(new_id(), topic, key, value, _checked_headers(headers), time.time())

    def _event(
        self, id_: str, topic: str, key: str | None, value: Any, headers: Mapping[str, str], now: float
    ) -> Event:
        if key is not None and not isinstance(key, str):
            raise BadSetting(f"key {key!r} is a {type(key).__name__}; keys are str or None")
        event = Event(id_, topic, key, encode(value), headers, type_name(value), now)
        if event.size > self.settings.max_event_bytes:
            raise TooLarge(
                f"an event of {event.size:,} bytes for topic {topic!r} exceeds "
                f"max_event_bytes={self.settings.max_event_bytes:,}; store it elsewhere and publish its address"
            )
        return event

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
        if not self.handlers:
            raise ConfigError("nothing to run: no handler is declared; decorate one with @app.handler(topic)")
        async with contextlib.AsyncExitStack() as stack:
            if self._broker is None:
                await stack.enter_async_context(self)
            stack.enter_context(_signals(self.stop))
            await self._consume()

    def stop(self) -> None:
        """Ask `run` to end gracefully, also one that has only begun."""
        self._stopping = True
        for consumer in self._consumers:
            consumer.stop()

    async def _consume(self) -> None:
        member = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        solitude = Solitude()
        self._consumers = [
            Consumer(self.broker, self._engine(handler), handler, self.settings, member=member, solitude=solitude)
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
                "%s takes %s for group %s (ordering %s, concurrency %d, durability %s)",
                *(handler.name, handler.topic, handler.group, handler.ordering, handler.concurrency, durability),
            )
        tasks = [asyncio.create_task(consumer.run()) for consumer in self._consumers]
        if self._stopping:
            self.stop()
        try:
            # One consumer that cannot go on ends them all: half an application that looks healthy helps nobody.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            self.stop()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._consumers = []
            self._stopping = False

    def _engine(self, handler: Handler) -> TaskEngine:
        return TaskEngine(concurrency=handler.concurrency, timeout_s=handler.timeout_s)


def _check_choices(handler: Handler) -> None:
    if handler.ordering not in ("key", "partition", "none"):
        raise BadHandler(f"{handler.name}: ordering={handler.ordering!r}; choose 'key', 'partition' or 'none'")
    if handler.engine != "tasks":
        raise BadHandler(f"{handler.name}: engine={handler.engine!r}; this version has 'tasks'")
    if not isinstance(handler.retry, Retry):
        raise BadHandler(f"{handler.name}: retry={handler.retry!r}; use Retry(attempts=...)")
    if not isinstance(handler.concurrency, int) or handler.concurrency < 1:
        raise BadHandler(f"{handler.name}: concurrency={handler.concurrency!r}; a number, at least 1")
    if handler.timeout_s is not None and handler.timeout_s <= 0:
        raise BadHandler(f"{handler.name}: timeout_s={handler.timeout_s}; more than 0, or None for no limit")
    if handler.batch_size < 1 or handler.batch_wait_s < 0:
        raise BadHandler(
            f"{handler.name}: batch_size={handler.batch_size} or batch_wait_s={handler.batch_wait_s} is too low"
        )
    if handler.on_dead not in ("pass", "hold") or (handler.on_dead == "hold" and handler.ordering != "key"):
        raise BadHandler(f"{handler.name}: on_dead={handler.on_dead!r}; 'pass', or 'hold' with ordering='key'")
    if isinstance(handler.start, str) and handler.start not in ("earliest", "latest"):
        raise BadHandler(f"{handler.name}: start={handler.start!r}; 'earliest', 'latest' or a Unix time")


def _checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    if not headers:
        return {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise BadSetting(f"header {name!r}: {value!r}: names and values are str")
    return dict(headers)


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Any:
    """The first stop signal calls `stop`; the second gets the system's own handling."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; whoever runs us in another calls stop
        return
    loop = asyncio.get_running_loop()

    def first(number: signal.Signals) -> None:
        log.info("%s: stopping; once more ends at once", number.name)
        for each in _STOP_SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        stop()

    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, first, number)
    try:
        yield
    finally:
        for number, handling in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handling)


def _refuse_loop_thread() -> None:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ConfigError("publish_sync would block this event loop; use `await app.publish(...)` here")


class _SyncDoor:
    """A broker on an event loop in a thread of its own, for callers that have no loop.

    It ends with the process: what publish has returned for is durable, so there is nothing left to finish.
    """

    def __init__(self, settings: settings_.Settings) -> None:
        _refuse_loop_thread()
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="onward-sync", daemon=True)
        self._thread.start()
        try:
            self._broker = self._wait(open_broker(settings))
        except BaseException:
            self._stop()
            raise

    def publish(self, events: list[Event]) -> None:
        _refuse_loop_thread()
        self._wait(self._broker.publish(events))

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
