"""Where exchanges route messages. Pure."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from onward.brokers.rabbitmq.operate.topology import DEFAULT_EXCHANGE, Binding

_BY_KEY = ("topic", "direct")


class ExchangeRoute(NamedTuple):
    """What decides where an exchange routes, beside its bindings."""

    kind: str
    alternate: str | None = None


class RouteMap:
    """The routes of a server, as far as they are known."""

    def __init__(
        self, exchanges: Mapping[str, ExchangeRoute], queues: Iterable[str], bindings: Iterable[Binding]
    ) -> None:
        self._exchanges = exchanges
        self._queues = frozenset(queues)
        self._bindings: defaultdict[str, list[Binding]] = defaultdict(list)
        for binding in bindings:
            self._bindings[binding.exchange].append(binding)

    def knows(self, exchange: str) -> bool:
        return exchange == DEFAULT_EXCHANGE or exchange in self._exchanges

    def keys(self, queue: str) -> set[str]:
        """The routing keys, or patterns of them, of the messages that bindings lead to the queue."""
        found = [each for every in self._bindings.values() for each in every if each.queue == queue]
        return set[str]().union(*(self._carried(each, frozenset()) for each in found)) if found else {queue}

    def _carried(self, binding: Binding, seen: frozenset[str]) -> set[str]:
        """The keys that pass through the binding. A fanout or headers exchange passes on all that enter it."""
        route = self._exchanges.get(binding.exchange)
        return {binding.key} if route is None or route.kind in _BY_KEY else self._entering(binding.exchange, seen)

    def _entering(self, exchange: str, seen: frozenset[str]) -> set[str]:
        """The keys that other exchanges pass on to this one; any, if there is no such exchange."""
        if exchange in seen:
            return set()
        seen |= {exchange}
        bound = [each for every in self._bindings.values() for each in every if each.to_exchange == exchange]
        found = set[str]().union(*(self._carried(each, seen) for each in bound))
        before = [name for name, route in self._exchanges.items() if route.alternate == exchange]
        return found.union(*(self._entering(name, seen) for name in before)) or {"#"}

    def targets(self, exchange: str, key: str) -> frozenset[str]:
        """The queues that every message reaches whose routing key matches `key`, which may be a pattern."""
        return self._targets(exchange, key, frozenset())

    def _targets(self, exchange: str, key: str, seen: frozenset[str]) -> frozenset[str]:
        if exchange == DEFAULT_EXCHANGE:
            return self._queues & {key}
        route = self._exchanges.get(exchange)
        if route is None or exchange in seen:
            return frozenset()
        seen |= {exchange}
        fitting = [each for each in self._bindings[exchange] if _fits(route.kind, each.key, key)]
        found = {each.queue for each in fitting if each.queue in self._queues}
        further = [self._targets(each.to_exchange, key, seen) for each in fitting if each.to_exchange]
        if not fitting and route.alternate is not None:
            further.append(self._targets(route.alternate, key, seen))
        return frozenset(found).union(*further)


def _fits(kind: str, bound: str, key: str) -> bool:
    """Whether an exchange of this kind routes by this binding every message whose key matches `key`."""
    if kind == "topic":
        return covers(bound, key)
    if kind == "direct":
        return bound == key
    return True  # fanout. The headers of future messages are unknown.


def covers(pattern: str, key: str) -> bool:
    """Whether the pattern of a topic exchange matches every routing key that `key` matches. Without wildcards in
    `key`: whether it matches that key."""
    outer, inner = _words(pattern), _words(key)

    @functools.cache
    def rest(o: int, i: int) -> bool:
        if o == len(outer):
            return i == len(inner)
        if outer[o] == "#":
            return rest(o + 1, i) or (i < len(inner) and rest(o, i + 1))
        if i == len(inner) or inner[i] == "#":
            return False
        return outer[o] in ("*", inner[i]) and rest(o + 1, i + 1)

    return rest(0, 0)


def _words(pattern: str) -> tuple[str, ...]:
    """Its words. In a run of wildcards each * comes before the #, which changes nothing in what it matches."""
    words: list[str] = []
    for word in pattern.split(".") if pattern else ():
        if words and words[-1] == "#" and word in ("*", "#"):
            words[-1:] = ["*", "#"] if word == "*" else ["#"]
        else:
            words.append(word)
    return tuple(words)
