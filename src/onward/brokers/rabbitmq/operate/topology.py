"""Exchanges, queues and bindings as an application declares them. Pure.

A topic with the name of a declared exchange is that exchange, and a group with the name of a declared queue is that
queue. `topology_plan.py` compares these objects with those of the server."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import msgspec

from onward.brokers.base import TopicSpec, Topology
from onward.brokers.rabbitmq.amqp.tables import encoded_table
from onward.brokers.rabbitmq.work.tiers import TRIED, WorkRouting, routing
from onward.errors import BadSetting

ExchangeKind = Literal["direct", "topic", "fanout", "headers"]
QueueKind = Literal["quorum", "classic", "stream"]
Overflow = Literal["reject-publish", "drop-head", "reject-publish-dlx"]

# Without a limit, or with -1, some versions delete messages. All versions accept this one.
NO_DELIVERY_LIMIT = 1_000_000_000
DEFAULT_EXCHANGE = ""
BUILT_IN: Mapping[str, ExchangeKind] = {
    "amq.direct": "direct",
    "amq.topic": "topic",
    "amq.fanout": "fanout",
    "amq.headers": "headers",
    "amq.match": "headers",
}
WITHOUT_KEYS: Sequence[ExchangeKind] = ("fanout", "headers")  # they route without looking at the routing key
# RabbitMQ refuses other values of these arguments when the queue is declared.
_INTEGERS = frozenset(
    {
        *("x-max-length", "x-max-length-bytes", "x-message-ttl", "x-expires", "x-max-priority", "x-delivery-limit"),
        *("x-max-in-memory-length", "x-max-in-memory-bytes", "x-quorum-initial-group-size", "x-initial-cluster-size"),
        *("x-stream-max-segment-size-bytes", "x-stream-filter-size-bytes", "x-consumer-timeout"),
    }
)
_FIELDS = {  # of a queue, by the argument that they set
    "x-max-length": "max_length",
    "x-max-length-bytes": "max_length_bytes",
    "x-message-ttl": "ttl_s",
    "x-max-age": "ttl_s",
    "x-dead-letter-exchange": "dead_letter_exchange",
    "x-dead-letter-routing-key": "dead_letter_key",
    "x-max-priority": "max_priority",
}
_LONGEST_NAME = 255  # bytes
_RESERVED = {"amq.": "RabbitMQ", "onward.": "Onward"}


class Exchange(msgspec.Struct, frozen=True):
    """An exchange: publishers send to it, and it routes each message to queues by its bindings.

    `alternate`: the exchange that gets the messages for which no binding fits. `arguments`: more arguments, by the
    names of RabbitMQ."""

    name: str
    kind: ExchangeKind = "topic"
    durable: bool = True
    alternate: str | None = None
    arguments: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        _check_name("exchange", self.name)
        if self.kind not in get_args(ExchangeKind):
            raise BadSetting(f"exchange {self.name}: kind={self.kind!r}; use direct, topic, fanout or headers")
        if self.alternate is not None and self.alternate in ("", self.name):
            raise BadSetting(f"exchange {self.name}: alternate={self.alternate!r}; name another exchange")
        _check_arguments(f"exchange {self.name}", self.arguments)

    @property
    def table(self) -> dict[str, Any]:
        """All its arguments, as they are sent to the server."""
        return _without_none({"alternate-exchange": self.alternate, **self.arguments})


class Queue(msgspec.Struct, frozen=True):
    """A queue, of the kind `quorum` by default. It never deletes a message that was not handled, unless `may_lose`.

    - `max_length`, `max_length_bytes`: a full queue refuses messages, so that their publisher learns of it. With
      `overflow="drop-head"` it removes its oldest messages instead.
    - `ttl_s`: a message that waits longer is removed, or goes to the `dead_letter_exchange`.
    - `dead_letter_exchange`, `dead_letter_key`: the route of removed and rejected messages. Without a key they keep
      their own routing key. From a quorum queue they arrive at least once.
    - `tiers`: by tier (`critical`, `bulk`), the pattern of its routing keys, where `*` is any text between dots. Each
      tier is a queue of its own, `<name>.<tier>`. All other messages are in `<name>`.
    - `consumers`: how many consumers it should have. `onward doctor` reports when there are fewer.
    - `max_priority`: only for classic queues. Use `tiers` elsewhere.
    - `arguments`: more arguments, by the names of RabbitMQ. They may not differ from a field that is set. They win over
      what Onward adds by itself, such as x-delivery-limit; None leaves such an argument out."""

    name: str
    kind: QueueKind = "quorum"
    durable: bool = True
    max_length: int | None = None
    max_length_bytes: int | None = None
    overflow: Overflow = "reject-publish"
    ttl_s: float | None = None
    dead_letter_exchange: str | None = None
    dead_letter_key: str | None = None
    tiers: Mapping[str, str] = {}
    consumers: int | None = None
    max_priority: int | None = None
    may_lose: bool = False
    arguments: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        _check_name("queue", self.name)
        if problem := next(_queue_problems(self), ""):
            raise BadSetting(f"queue {self.name}: {problem}")
        _check_arguments(f"queue {self.name}", self.arguments)
        if problem := next(_argument_problems(self), ""):
            raise BadSetting(f"queue {self.name}: {problem}")

    @property
    def table(self) -> dict[str, Any]:
        """All its arguments, as they are sent to the server."""
        return _without_none({"x-queue-type": self.kind, **_computed(self), **self.arguments})

    @property
    def tier_queues(self) -> Mapping[str, str]:
        """The name of the queue of each tier; without tiers, of the normal one."""
        return routing(self.name, (), self.tiers).queues


class Binding(msgspec.Struct, frozen=True):
    """A route from an exchange to a queue, or with `to_exchange` to another exchange.

    `key`: the routing key; for a topic exchange a pattern, where `*` is one word and `#` any number of words.
    `arguments`: for a headers exchange, the headers to match."""

    exchange: str
    queue: str = ""
    key: str = ""
    to_exchange: str = ""
    arguments: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        _check_text("binding", "exchange", self.exchange)
        if bool(self.queue) == bool(self.to_exchange):
            raise BadSetting(f"binding of exchange {self.exchange}: name either a queue or to_exchange")
        _check_text(f"binding of exchange {self.exchange}", "target", self.target)
        _check_text(f"binding of exchange {self.exchange}", "key", self.key, may_be_empty=True)
        _check_arguments(str(self), self.arguments)

    @property
    def target(self) -> str:
        return self.queue or self.to_exchange

    @property
    def identity(self) -> tuple[object, ...]:
        """Two bindings with the same identity are one binding."""
        arguments = tuple(sorted((name, repr(value)) for name, value in self.arguments.items()))
        return self.exchange, bool(self.queue), self.target, self.key, arguments

    def __str__(self) -> str:
        kind = "queue" if self.queue else "exchange"
        key = f" with key {self.key}" if self.key else ""
        arguments = f" with {dict(self.arguments)}" if self.arguments else ""
        return f"binding of {kind} {self.target} to exchange {self.exchange}{key}{arguments}"


Named = TypeVar("Named", Exchange, Queue)


class PlainTopology(NamedTuple):
    """What is declared, as objects that the server has: tiers are queues and exchanges here.

    `only_sources`: by queue of a tier, the only exchange that may route to it."""

    exchanges: Mapping[str, Exchange]
    queues: Mapping[str, Queue]
    bindings: Sequence[Binding]
    only_sources: Mapping[str, str] = {}


class Declared(msgspec.Struct, frozen=True):
    """The topology of an application. `topics` are those that Onward itself stores."""

    exchanges: Mapping[str, Exchange] = {}
    queues: Mapping[str, Queue] = {}
    bindings: Sequence[Binding] = ()
    topics: Sequence[TopicSpec] = ()

    @classmethod
    def of(cls, topology: Topology) -> "Declared":
        """Raises BadSetting if an object is of another kind, or two objects of one name differ."""
        for each in topology.own:
            if not isinstance(each, Exchange | Queue | Binding):
                raise BadSetting(f"{each!r}: RabbitMQ has no such object; use Exchange, Queue, Binding or TopicSpec")
        exchanges = _by_name("exchange", (each for each in topology.own if isinstance(each, Exchange)))
        queues = _by_name("queue", (each for each in topology.own if isinstance(each, Queue)))
        bindings = {each.identity: each for each in topology.own if isinstance(each, Binding)}
        topics = [spec for spec in topology.topics if spec.name not in exchanges]
        return cls(exchanges, queues, list(bindings.values()), topics)

    def joined(self, later: "Declared") -> "Declared":
        """Both. If they differ in an object, the later one counts."""
        bindings = {each.identity: each for each in (*self.bindings, *later.bindings)}
        exchanges, queues = {**self.exchanges, **later.exchanges}, {**self.queues, **later.queues}
        return Declared(exchanges, queues, list(bindings.values()), later.topics)

    def exchange(self, topic: str) -> Exchange | None:
        """The exchange behind the topic. None: Onward stores the topic itself."""
        return self.exchanges.get(topic)

    def queue(self, group: str) -> Queue | None:
        """The queue behind the group. None: Onward has a queue of its own for it."""
        return self.queues.get(group)

    def plain(self) -> PlainTopology:
        """Raises BadSetting if a tier needs the name of another object."""
        tiered = {name: routing(name, (), queue.tiers) for name, queue in self.queues.items() if queue.tiers}
        exchanges = [*self.exchanges.values(), *(each for found in tiered.values() for each in _tier_exchanges(found))]
        queues = [each for queue in self.queues.values() for each in _tier_queues(queue)]
        entries = {name: found.exchanges[0].name for name, found in tiered.items()}
        bindings = [_entering(each, entries) for each in self.bindings]
        bindings += [Binding(each.source, each.target, each.key) for found in tiered.values() for each in found.routes]
        sources = {route.target: route.source for found in tiered.values() for route in found.routes}
        return PlainTopology(_by_name("exchange", exchanges), _by_name("queue", queues), bindings, sources)


def _tier_exchanges(found: WorkRouting) -> Iterator[Exchange]:
    for each in found.exchanges:
        yield Exchange(each.name, cast("ExchangeKind", each.kind), alternate=each.alternate)


def _tier_queues(queue: Queue) -> Iterator[Queue]:
    for name in queue.tier_queues.values():
        yield msgspec.structs.replace(queue, name=name, tiers={})


def _entering(binding: Binding, entries: Mapping[str, str]) -> Binding:
    """The binding of a queue with tiers, to the exchange that chooses among them."""
    entry = entries.get(binding.queue)
    return binding if entry is None else msgspec.structs.replace(binding, queue="", to_exchange=entry)


# -- checks ---------------------------------------------------------------------------------------------------------


def _queue_problems(queue: Queue) -> Iterator[str]:
    if queue.kind not in get_args(QueueKind):
        yield f"kind={queue.kind!r}; use quorum, classic or stream"
    if queue.overflow not in get_args(Overflow):
        yield f"overflow={queue.overflow!r}; use reject-publish, drop-head or reject-publish-dlx"
    for name in ("max_length", "max_length_bytes", "consumers", "max_priority"):
        value = getattr(queue, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield f"{name}={value!r}; use a whole number of 1 or more"
    if queue.ttl_s is not None and not (isinstance(queue.ttl_s, int | float) and 0.001 <= queue.ttl_s <= 4_294_967):
        yield f"ttl_s={queue.ttl_s!r}; use seconds, from 0.001 to 4294967"
    if not queue.durable and queue.kind != "classic":
        yield f"durable=False; a {queue.kind} queue is always durable"
    if queue.max_priority is not None and (queue.kind != "classic" or queue.max_priority > 255):
        yield "max_priority is for classic queues, from 1 to 255; use tiers, which are one queue for each priority"
    if queue.overflow == "reject-publish-dlx" and queue.kind != "classic":
        yield "overflow='reject-publish-dlx' is for classic queues; use reject-publish"
    yield from _dead_letter_problems(queue)
    yield from _stream_problems(queue)
    yield from _tier_problems(queue.tiers)


def _argument_problems(queue: Queue) -> Iterator[str]:
    computed = _computed(queue)
    for name, value in queue.arguments.items():
        if name in _INTEGERS and value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            yield f"arguments has {name}={value!r}; use a whole number"
        field = _FIELDS.get(name)
        if field is not None and computed.get(name) not in (None, value):
            yield f"{field}={getattr(queue, field)!r} and arguments with {name}={value!r} differ; remove one of them"


def _dead_letter_problems(queue: Queue) -> Iterator[str]:
    if queue.dead_letter_key is not None and queue.dead_letter_exchange is None:
        yield "dead_letter_key without dead_letter_exchange; name the exchange, or remove the key"
    if queue.dead_letter_exchange == DEFAULT_EXCHANGE and not queue.dead_letter_key:
        yield "dead_letter_exchange='' is the default exchange; name the queue for dead letters in dead_letter_key"


def _stream_problems(queue: Queue) -> Iterator[str]:
    if queue.kind != "stream":
        return
    if queue.max_length is not None:
        yield "max_length is not for streams; use max_length_bytes"
    if queue.dead_letter_exchange is not None:
        yield "a stream has no dead letters; remove dead_letter_exchange"
    if queue.tiers:
        yield "a stream has no tiers; remove them, or use a quorum queue"
    if queue.ttl_s is not None and queue.ttl_s < 1:
        yield f"ttl_s={queue.ttl_s!r}; a stream keeps messages for at least 1 s"


def _tier_problems(tiers: Any) -> Iterator[str]:
    if not isinstance(tiers, Mapping):
        yield f"tiers={tiers!r}; use a dict such as {{'critical': 'notification.*.critical'}}"
        return
    for tier, pattern in tiers.items():
        if tier not in TRIED:
            yield f"tiers has {tier!r}; use 'critical' and 'bulk', all other messages are normal"
        words = pattern.split(".") if isinstance(pattern, str) else [""]
        if not all(word == "*" or (word and not {"*", "#"} & set(word)) for word in words):
            yield f"tiers has the pattern {pattern!r}; use words between dots, and * alone between dots for any text"


def _computed(queue: Queue) -> dict[str, Any]:
    """The arguments that follow from the fields. A value that is the server's default is left out, so that queues of
    other programs can be declared as they are."""
    found: dict[str, Any] = {"x-max-length": queue.max_length, "x-max-length-bytes": queue.max_length_bytes}
    if queue.kind == "stream":
        return found | {"x-max-age": None if queue.ttl_s is None else f"{round(queue.ttl_s)}s"}
    found["x-message-ttl"] = None if queue.ttl_s is None else round(queue.ttl_s * 1000)
    found["x-dead-letter-exchange"] = queue.dead_letter_exchange
    found["x-dead-letter-routing-key"] = queue.dead_letter_key
    found["x-max-priority"] = queue.max_priority
    keeps_all = queue.kind == "quorum" and queue.overflow == "reject-publish" and queue.dead_letter_exchange is not None
    is_limited = queue.max_length is not None or queue.max_length_bytes is not None
    if queue.overflow != "drop-head" and (is_limited or keeps_all):
        found["x-overflow"] = queue.overflow
    if keeps_all:  # RabbitMQ allows it only together with reject-publish
        found["x-dead-letter-strategy"] = "at-least-once"
    if queue.kind == "quorum":
        found["x-delivery-limit"] = NO_DELIVERY_LIMIT
    return found


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value is not None}


def _by_name(kind: str, objects: Iterable[Named]) -> dict[str, Named]:
    found: dict[str, Named] = {}
    for each in objects:
        if found.setdefault(each.name, each) != each:
            raise BadSetting(f"{kind} {each.name} is declared twice, in different ways; keep one of the declarations")
    return found


def _check_name(kind: str, name: str) -> None:
    _check_text(kind, "name", name)
    for prefix, owner in _RESERVED.items():
        if name.startswith(prefix):
            raise BadSetting(f"{kind} {name}: names that begin with {prefix} belong to {owner}; use another name")


def _check_text(what: str, field: str, text: str, *, may_be_empty: bool = False) -> None:
    if not isinstance(text, str) or not (text or may_be_empty):
        raise BadSetting(f"{what}: its {field} is {text!r}; use a text")
    if len(text.encode(errors="surrogatepass")) > _LONGEST_NAME:
        raise BadSetting(f"{what}: its {field} {text[:40]!r}… is too long; RabbitMQ allows {_LONGEST_NAME} bytes")
    if not text.isprintable():
        raise BadSetting(f"{what}: its {field} {text!r} has characters that cannot be printed; remove them")


def _check_arguments(what: str, arguments: Mapping[str, Any]) -> None:
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise BadSetting(f"{what}: arguments={arguments!r}; use a dict with the names of RabbitMQ")
    for name, value in arguments.items():
        try:
            encoded_table({name: value})
        except (ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise BadSetting(
                f"{what}: arguments has {name!r}: {value!r}, which RabbitMQ cannot store; use text, a number, a "
                "boolean, a time, or a list or dict of these"
            ) from error
