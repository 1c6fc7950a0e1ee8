"""A declared handler: which events it handles, how it runs, and how it is called."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from onward.brokers.base import Asks, Ordering, Start
from onward.engines.base import Call
from onward.engines.target import target_of
from onward.errors import BadHandler
from onward.event import Delivery, Event
from onward.failure.retry import Retry
from onward.inbox.base import Asked, Inbox, Run
from onward.payload import Decode, decoder

Function = Callable[..., Any]
EngineName = Literal["tasks", "threads", "processes"]
TIERS = ("critical", "bulk")  # beside normal


class Handler(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    group: str
    name: str  # module and function, for logs and dead letters
    function: Function
    call: Call
    ordering: Ordering
    concurrency: int
    engine: EngineName
    workers: int | None  # of engine "processes"; None: one for each processor
    max_events_per_worker: int | None
    timeout_s: float | None
    retry: Retry
    start: Start
    on_dead: Literal["pass", "hold"]
    batch_size: int
    batch_wait_s: float
    inbox: Inbox | None = None
    wants: Callable[[str], bool] | None = None  # called with an event's type; None: all types
    types: Sequence[str] = ()  # the patterns of `wants`
    tiers: Mapping[str, str] = {}  # by tier, the pattern of its event types

    @property
    def is_batch(self) -> bool:
        return self.batch_size > 1

    @property
    def asks(self) -> Asks:
        return Asks(self.concurrency, self.timeout_s, tuple(self.types), self.tiers)


def choose(function: Function, engine: EngineName | None) -> EngineName:
    """The engine for this function: tasks for `async def`, threads for `def`, unless `engine` is "processes"."""
    where, is_async = f"handler {function.__qualname__}", inspect.iscoroutinefunction(function)
    if engine is None:
        return "tasks" if is_async else "threads"
    if engine not in get_args(EngineName):
        raise BadHandler(f"{where}: engine={engine!r}; choose 'tasks', 'threads' or 'processes', or leave it out")
    if engine == "tasks" and not is_async:
        raise BadHandler(
            f"{where} is not `async def`, so engine='tasks' would block the event loop; leave engine out to use threads"
        )
    if engine == "threads" and is_async:
        raise BadHandler(f"{where} is `async def`, which needs no thread; leave engine out, or make it a plain `def`")
    if engine == "processes":
        target_of(function)
    return engine


def check_choices(handler: Handler) -> None:
    """Raises BadHandler if an option of the declaration is impossible."""
    if handler.ordering not in ("key", "partition", "none"):
        raise BadHandler(f"{handler.name}: ordering={handler.ordering!r}; choose 'key', 'partition' or 'none'")
    if not isinstance(handler.retry, Retry):
        raise BadHandler(f"{handler.name}: retry={handler.retry!r}; use Retry(attempts=...)")
    if not isinstance(handler.concurrency, int) or handler.concurrency < 1:
        raise BadHandler(f"{handler.name}: concurrency={handler.concurrency!r}; use a whole number, at least 1")
    for name, value in (("workers", handler.workers), ("max_events_per_worker", handler.max_events_per_worker)):
        if value is not None and (handler.engine != "processes" or value < 1):
            raise BadHandler(f"{handler.name}: {name}={value}; use at least 1, and only with engine='processes'")
    if handler.timeout_s is not None and handler.timeout_s <= 0:
        raise BadHandler(f"{handler.name}: timeout_s={handler.timeout_s}; use more than 0, or None for no limit")
    if handler.batch_size < 1 or handler.batch_wait_s < 0:
        raise BadHandler(
            f"{handler.name}: batch_size={handler.batch_size} must be at least 1, and "
            f"batch_wait_s={handler.batch_wait_s} at least 0"
        )
    if handler.on_dead not in ("pass", "hold") or (handler.on_dead == "hold" and handler.ordering != "key"):
        raise BadHandler(f"{handler.name}: on_dead={handler.on_dead!r}; use 'pass', or 'hold' with ordering='key'")
    if isinstance(handler.start, str) and handler.start not in ("earliest", "latest"):
        raise BadHandler(f"{handler.name}: start={handler.start!r}; use 'earliest', 'latest' or a Unix time")


def check_tiers(tiers: Mapping[str, str], name: str) -> None:
    """Raises BadHandler if a tier is unknown, or its pattern cannot be a route: `*` must stand between dots."""
    if not isinstance(tiers, Mapping) or not all(isinstance(each, str) for pair in tiers.items() for each in pair):
        raise BadHandler(
            f"handler {name}: tiers={tiers!r}; use a dict such as {{'critical': 'notification.*.critical'}}"
        )
    for tier, pattern in tiers.items():
        if tier not in TIERS:
            raise BadHandler(
                f"handler {name}: tiers has {tier!r}; use 'critical' and 'bulk', all other events are normal"
            )
        type_filter([pattern], name)
        if not all(word == "*" or (word and "*" not in word) for word in pattern.split(".")):
            raise BadHandler(
                f"handler {name}: tiers has {pattern!r}; in a tier, * stands alone between dots, as in 'order.*.urgent'"
            )


def type_filter(types: Sequence[str], name: str) -> Callable[[str], bool]:
    """A function that returns whether an event type matches one of the patterns. `*` is any text, dots included;
    everything else is literal.

    Raises BadHandler for characters that have a meaning in the patterns of other tools."""
    if isinstance(types, str) or not isinstance(types, Sequence) or not types:
        raise BadHandler(
            f"handler {name}: types={types!r}; use a list of types, such as ['order.placed', 'notification.*']"
        )
    for pattern in types:
        if not isinstance(pattern, str) or not pattern or not pattern.isprintable():
            raise BadHandler(f"handler {name}: types has {pattern!r}; use printable text, such as 'order.*'")
        if odd := set(pattern) & set("?[]#"):
            raise BadHandler(
                f"handler {name}: types has {pattern!r} with {' '.join(sorted(odd))}, which has no meaning here; "
                "use * for any text"
            )
    parts = ("".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", each)) for each in types)
    match = re.compile("|".join(f"(?:{part})" for part in parts), re.DOTALL).fullmatch

    @functools.lru_cache(maxsize=1024)  # most topics have few types; the limit is for those with many
    def wants(type_: str) -> bool:
        return match(type_) is not None

    return wants


def bind(function: Function, *, batch: bool = False) -> Call:
    """A callable that decodes a delivery's value and calls the function. It runs a `def`, or returns the coroutine of
    an `async def`.

    A parameter annotated `Event` gets the event; the other parameter gets the value, decoded by its annotation. A batch
    handler gets lists: `list[Event]`, and a list of values.
    """
    where = _name(function)
    hints = _hints(function, where)
    if batch:
        hints = {name: _element(hint, name, where) for name, hint in hints.items() if name != "return"}
    slots = [_slot(hints.get(name, Any), parameter, where) for name, parameter in _parameters(function)]
    if slots == ["value"] or slots == ["value", "event"] or slots == ["event", "value"] or slots == ["event"]:
        annotations = [hints.get(name, Any) for name, _ in _parameters(function)]
        call = (_batch_caller if batch else _caller)(function, slots, annotations, where)
        return call if inspect.iscoroutinefunction(function) else _finished(call, where)
    takes = ", ".join(name for name, _ in _parameters(function)) or "nothing"
    raise BadHandler(
        f"{where} must take the value, an Event, or both; it takes {takes}. For a connection or session, set inbox="
    )


def bind_once(function: Function, inbox: Inbox, *, group: str, engine: EngineName | None, batch: bool = False) -> Call:
    """`bind`, wrapped by the inbox. One more parameter may receive what the inbox provides, such as its connection."""
    where = _name(function)
    hints = {name: hint for name, hint in _hints(function, where).items() if name != "return"}
    given = [hint for hint in hints.values() if inbox.gives(hint)]
    if len(given) > 1:
        raise BadHandler(f"{where}: the inbox can fill only one parameter; {len(given)} have its type")
    if batch:
        hints = {n: hint if inbox.gives(hint) else _element(hint, n, where) for n, hint in hints.items()}
    annotations = [hints.get(name, Any) for name, _ in _parameters(function)]
    slots = [
        "given" if inbox.gives(annotation) else _slot(annotation, parameter, where)
        for annotation, (_, parameter) in zip(annotations, _parameters(function), strict=True)
    ]
    plain = [slot for slot in slots if slot != "given"]
    if sorted(plain) not in (["value"], ["event"], ["event", "value"]):
        raise BadHandler(f"{where} must take the value, an Event, or both; it takes {plain or 'neither'}")
    is_async = inspect.iscoroutinefunction(function)
    decode = _decoder(slots, annotations, where) if "value" in slots else None
    run = (_batch_runner if batch else _runner)(function, slots, decode)
    asked = Asked(
        name=where,
        group=group,
        engine=choose(function, engine),
        is_async=is_async,
        batch=batch,
        gives=given[0] if given else None,
    )
    call = inbox.around(run, asked)
    return call if is_async else _finished(call, where)


def _name(function: Function) -> str:
    if not inspect.isroutine(function):
        raise BadHandler(f"{function!r} is not a function; decorate a `def` or an `async def`")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadHandler(
            f"handler {function.__qualname__} has a `yield`, so calling it would run nothing; remove the `yield`"
        )
    return f"handler {function.__qualname__}"


def _runner(function: Function, slots: list[str], decode: Decode | None) -> Run:
    def run(delivery: Any, given: Any) -> Any:
        event = delivery.event
        value = decode(event.value) if decode is not None else None
        return function(*({"value": value, "event": event, "given": given}[slot] for slot in slots))

    return run


def _batch_runner(function: Function, slots: list[str], decode: Decode | None) -> Run:
    def run(work: Any, given: Any) -> Any:
        events = [delivery.event for delivery in work]
        values = [decode(event.value) for event in events] if decode is not None else None
        return function(*({"value": values, "event": events, "given": given}[slot] for slot in slots))

    return run


def _finished(call: Call, where: str) -> Call:
    """A call that raises BadHandler if a plain function returns a coroutine. Its work has not been done then, but the
    event would count as handled."""

    def finished(work: Any) -> None:
        result = call(work)
        if result is not None and inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise BadHandler(f"{where} is a plain function, but returned an awaitable; declare it `async def`")

    return finished


def _caller(function: Function, slots: list[str], annotations: list[Any], where: str) -> Call:
    if slots == ["event"]:
        return lambda delivery: function(delivery.event)
    decode = _decoder(slots, annotations, where)
    if slots == ["value"]:
        return lambda delivery: function(decode(delivery.event.value))

    def both(delivery: Delivery) -> Any:
        event = delivery.event
        return function(decode(event.value), event) if slots[0] == "value" else function(event, decode(event.value))

    return both


def _batch_caller(function: Function, slots: list[str], annotations: list[Any], where: str) -> Call:
    if slots == ["event"]:
        return lambda work: function([delivery.event for delivery in work])
    decode = _decoder(slots, annotations, where)

    def call(work: tuple[Delivery, ...]) -> Any:
        events = [delivery.event for delivery in work]
        values = [decode(event.value) for event in events]
        return function(*({"value": values, "event": events}[slot] for slot in slots))

    return call


def _decoder(slots: list[str], annotations: list[Any], where: str) -> Decode:
    try:
        return decoder(annotations[slots.index("value")])
    except BadHandler as error:
        raise BadHandler(f"{where}: {error}") from error


def _element(annotation: Any, name: str, where: str) -> Any:
    if get_origin(annotation) is not list:
        raise BadHandler(f"{where}: with batch_size, {name!r} must be a list[...], not {annotation!r}")
    return get_args(annotation)[0]


def _hints(function: Function, where: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:  # evaluating an annotation may raise anything
        raise BadHandler(
            f"{where}: an annotation cannot be resolved ({error}); import the type, and define it at module level"
        ) from error


def _parameters(function: Function) -> list[tuple[str, inspect.Parameter]]:
    return [
        (name, parameter)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
    ]


def _slot(annotation: Any, parameter: inspect.Parameter, where: str) -> str:
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        raise BadHandler(
            f"{where}: parameter {parameter.name!r} cannot be filled; use positional parameters, or give it a default"
        )
    return "event" if annotation is Event else "value"
