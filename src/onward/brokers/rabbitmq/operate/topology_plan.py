"""What the server lacks of a declared topology, and what cannot be made without losing messages. Pure."""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from onward.brokers.base import Change
from onward.brokers.rabbitmq.operate.differences import Difference
from onward.brokers.rabbitmq.operate.routing import ExchangeRoute, RouteMap
from onward.brokers.rabbitmq.operate.topology import (
    BUILT_IN,
    DEFAULT_EXCHANGE,
    NO_DELIVERY_LIMIT,
    WITHOUT_KEYS,
    Binding,
    Exchange,
    PlainTopology,
    Queue,
)

_NEW_NAME = "give it a new name here, or delete it at the server when it is empty, and apply again"


class LiveExchange(NamedTuple):
    """An exchange at the server. `route`: None if the server cannot be asked for it."""

    differences: Sequence[Difference] = ()
    route: ExchangeRoute | None = None


class LiveTopology(NamedTuple):
    """What the server has of the objects that a topology names. `bindings`: None if the server cannot list them."""

    exchanges: Mapping[str, LiveExchange] = {}
    queues: Mapping[str, Sequence[Difference]] = {}
    bindings: Sequence[Binding] | None = None


class TopologyPlan(NamedTuple):
    """What to create, in this order, and what is refused. `again`: bindings that may exist already. To bind them once
    more has no effect."""

    exchanges: Sequence[Exchange]
    queues: Sequence[Queue]
    bindings: Sequence[Binding]
    again: Sequence[Binding]
    refused: Sequence[Change]

    @property
    def changes(self) -> list[Change]:
        created = [
            *(Change(f"exchange {each.name}", "create", _created_exchange(each)) for each in self.exchanges),
            *(Change(f"queue {each.name}", "create", _created_queue(each)) for each in self.queues),
            *(Change(str(each), "create", f"create {each}") for each in self.bindings),
        ]
        return [*created, *self.refused]


def planned(wanted: PlainTopology, live: LiveTopology) -> TopologyPlan:
    refused = [(str(each), why) for each in wanted.bindings for why in _nowhere(each, wanted, live)]
    left = wanted
    while new := list(_refusals(left, live)):
        refused += new
        left = _without(left, {what for what, _ in new})  # no other object may rely on it
    names = {what for what, _ in refused}
    open_ = [each for each in wanted.bindings if not names & {str(each), *_ends(each)}]
    new_bindings = [each for each in open_ if _is_new(each, live)]
    return TopologyPlan(
        [each for each in left.exchanges.values() if each.name not in live.exchanges],
        [each for each in left.queues.values() if each.name not in live.queues],
        _dead_letter_routes_first(new_bindings, wanted),
        [each for each in open_ if each not in new_bindings] if live.bindings is None else [],
        [Change(what, "refuse", f"{what}: {why}") for what, why in refused],
    )


def _without(wanted: PlainTopology, refused: Container[str]) -> PlainTopology:
    return PlainTopology(
        {name: each for name, each in wanted.exchanges.items() if f"exchange {name}" not in refused},
        {name: each for name, each in wanted.queues.items() if f"queue {name}" not in refused},
        wanted.bindings,
        wanted.only_sources,
    )


def _ends(binding: Binding) -> set[str]:
    target = f"queue {binding.queue}" if binding.queue else f"exchange {binding.to_exchange}"
    return {f"exchange {binding.exchange}", target}


def _is_new(binding: Binding, live: LiveTopology) -> bool:
    """Whether it surely does not exist yet."""
    if live.bindings is not None:
        return binding.identity not in {each.identity for each in live.bindings}
    known = {*live.exchanges, *BUILT_IN}
    has_target = binding.queue in live.queues if binding.queue else binding.to_exchange in known
    return binding.exchange not in known or not has_target


def _dead_letter_routes_first(bindings: Sequence[Binding], wanted: PlainTopology) -> list[Binding]:
    """A queue gets messages as soon as it is bound. By then its dead letters must have a route."""
    sinks = {each.table.get("x-dead-letter-exchange") for each in wanted.queues.values()}
    sinks |= {each.alternate for each in wanted.exchanges.values()}
    return sorted(bindings, key=lambda each: each.exchange not in sinks)


# -- what is refused ------------------------------------------------------------------------------------------------


def _refusals(wanted: PlainTopology, live: LiveTopology) -> Iterator[tuple[str, str]]:
    """What is refused, and why."""
    for exchange in wanted.exchanges.values():
        found = live.exchanges.get(exchange.name)
        for why in (*_differ(found.differences if found else ()), *_alternate(exchange, wanted, live)):
            yield f"exchange {exchange.name}", why
    routes = routes_of(wanted, live)
    for queue in wanted.queues.values():
        for why in (
            *_differ(live.queues.get(queue.name, ()), queue),
            *_losses(queue),
            *_dead_letters(queue, wanted, live, routes),
            *_beside_tiers(queue, wanted, live),
        ):
            yield f"queue {queue.name}", why


def routes_of(wanted: PlainTopology, live: LiveTopology) -> RouteMap:
    """The routes after the plan is applied. A live exchange stays as it is, whatever is declared."""
    exchanges = {name: ExchangeRoute(kind) for name, kind in BUILT_IN.items()}
    exchanges |= {name: ExchangeRoute(each.kind, each.alternate) for name, each in wanted.exchanges.items()}
    exchanges |= {name: each.route for name, each in live.exchanges.items() if each.route is not None}
    bindings = {each.identity: each for each in (*wanted.bindings, *(live.bindings or ()))}
    return RouteMap(exchanges, {*wanted.queues, *live.queues}, bindings.values())


def _differ(differences: Sequence[Difference], queue: Queue | None = None) -> Iterator[str]:
    if differences:
        several = "they cannot be changed later" if len(differences) > 1 else "it cannot be changed later"
        as_it_is = f"declare it as it is there{_with_its_limit(differences, queue) if queue else ''}"
        yield f"{'; '.join(map(str, differences))}; {several}: {as_it_is}, {_NEW_NAME}"


def _with_its_limit(differences: Sequence[Difference], queue: Queue) -> str:
    """How to declare a queue that has another delivery limit than the one that Onward gives to its declaration."""
    name = "x-delivery-limit"
    found = next((each for each in differences if (each.name, each.wanted) == (name, NO_DELIVERY_LIMIT)), None)
    if found is None:
        return ""
    same = msgspec.structs.replace(queue, arguments={**queue.arguments, name: found.live})
    may_lose = " and may_lose=True" if loss(same) and not queue.may_lose else ""
    return f' (arguments={{"{name}": {found.live}}}{may_lose})'


def _alternate(exchange: Exchange, wanted: PlainTopology, live: LiveTopology) -> Iterator[str]:
    name = exchange.alternate
    if name is None or name in {*wanted.exchanges, *live.exchanges, *BUILT_IN}:
        return
    yield f"its alternate exchange {name} does not exist, so what it cannot route would be lost; declare {name}"


def _losses(queue: Queue) -> Iterator[str]:
    if (why := loss(queue)) and not queue.may_lose:
        yield f"{why}; set dead_letter_exchange, remove the limit, or write may_lose=True"


def loss(queue: Queue) -> str:
    """Why the queue deletes messages that were not handled. Empty: it does not."""
    table = queue.table
    if queue.kind == "stream":
        return ""  # a log, which is limited by its nature
    if "x-expires" in table:
        return f"RabbitMQ deletes it with its messages when it was unused for {table['x-expires']} ms (x-expires)"
    if "x-dead-letter-exchange" in table:
        return ""
    if "x-message-ttl" in table:
        return f"it deletes messages that have waited for {table['x-message-ttl']} ms (x-message-ttl)"
    limits = [name for name in ("x-max-length", "x-max-length-bytes") if name in table]
    if limits and table.get("x-overflow", "drop-head") == "drop-head":
        return f"when it is full ({limits[0]}={table[limits[0]]}) it deletes its oldest messages (x-overflow=drop-head)"
    if queue.kind == "quorum" and (limit := table.get("x-delivery-limit", 20)) < NO_DELIVERY_LIMIT:
        default = "" if "x-delivery-limit" in table else ", the default since RabbitMQ 4.0"
        return f"it deletes a message after {limit} deliveries (x-delivery-limit{default})"
    return ""


def _dead_letters(queue: Queue, wanted: PlainTopology, live: LiveTopology, routes: RouteMap) -> Iterator[str]:
    exchange = queue.table.get("x-dead-letter-exchange")
    if exchange is None:
        return
    if exchange != DEFAULT_EXCHANGE and not routes.knows(exchange):
        if exchange not in live.exchanges:
            yield f"its dead-letter exchange {exchange} does not exist, so dead letters would be lost; declare it"
        return  # it exists, and the server cannot be asked for its bindings
    own = queue.table.get("x-dead-letter-routing-key")
    is_keyless = _kind(exchange, wanted, live) in WITHOUT_KEYS
    for key in sorted(routes.keys(queue.name)) if own is None else [own]:
        reached = routes.targets(exchange, key)
        if not reached and is_keyless:
            yield (
                f"its dead-letter exchange {exchange} routes dead letters to no queue, so they would be lost; bind a "
                f"queue to {exchange}"
            )
            return
        if not reached:
            yield _unbound(queue, exchange, key)
        elif queue.name in reached and "x-message-ttl" in queue.table:
            yield "its dead letters come back to it, and RabbitMQ deletes what expires twice; change its routes"


def _kind(exchange: str, wanted: PlainTopology, live: LiveTopology) -> str:
    """Empty: it is not known."""
    found = live.exchanges.get(exchange)
    if found is not None and found.route is not None:
        return found.route.kind
    return wanted.exchanges[exchange].kind if exchange in wanted.exchanges else BUILT_IN.get(exchange, "")


def _beside_tiers(queue: Queue, wanted: PlainTopology, live: LiveTopology) -> Iterator[str]:
    """A binding from the time before the queue had tiers brings messages to it that another tier has too."""
    source = wanted.only_sources.get(queue.name)
    for each in live.bindings or ():
        if source is not None and each.queue == queue.name and each.exchange != source:
            yield f"it has tiers, and the {each} goes past them, so a message would be in two tiers; unbind it"


def _unbound(queue: Queue, exchange: str, key: str) -> str:
    if exchange == DEFAULT_EXCHANGE:
        return f"its dead letters go to queue {key}, which does not exist, so they would be lost; declare it"
    own = queue.dead_letter_key is None and queue.table.get("x-dead-letter-routing-key") is None
    which = f"with the key {key}" + (", which they keep (no dead_letter_key is set)" if own else "")
    return (
        f"its dead-letter exchange {exchange} routes dead letters {which} to no queue, so they would be lost; "
        f"bind a queue to {exchange} with this key"
    )


def _nowhere(binding: Binding, wanted: PlainTopology, live: LiveTopology) -> Iterator[str]:
    known = {*wanted.exchanges, *live.exchanges, *BUILT_IN}
    if binding.exchange not in known:
        yield f"exchange {binding.exchange} does not exist; declare it, or remove the binding"
    if binding.to_exchange and binding.to_exchange not in known:
        yield f"exchange {binding.to_exchange} does not exist; declare it, or remove the binding"
    if binding.queue and binding.queue not in {*wanted.queues, *live.queues}:
        yield f"queue {binding.queue} does not exist; declare it, or remove the binding"


# -- words ----------------------------------------------------------------------------------------------------------


def _created_exchange(exchange: Exchange) -> str:
    return f"create exchange {exchange.name} ({', '.join((exchange.kind, *_pairs(exchange.table)))})"


def _created_queue(queue: Queue) -> str:
    table = {name: value for name, value in queue.table.items() if name != "x-queue-type"}
    return f"create queue {queue.name} ({', '.join((queue.kind, *_pairs(table)))})"


def _pairs(table: Mapping[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in table.items()]
