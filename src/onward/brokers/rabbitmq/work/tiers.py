"""Which queue of a work group an event goes to, by its type, and in which shares the queues are read. Pure.

A group has one queue, or with tiers up to three. The server chooses the queue: an exchange for each tier passes on what
its pattern does not match, so no event is in two queues:

    onward.<topic> ──types──▶ to-critical ─▶ …work.critical
                                   │ alternate
                                   ▼
                                to-bulk ───▶ …work.bulk
                                   │ alternate
                                   ▼
                                to-normal ─▶ …work
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from onward.errors import BadSetting

CRITICAL, NORMAL_TIER, BULK = "critical", "normal", "bulk"
TRIED = (CRITICAL, BULK)  # the order in which the patterns are tried
WEIGHTS: Mapping[str, int] = {CRITICAL: 8, NORMAL_TIER: 3, BULK: 1}  # the order in which they are read
_LONGEST_KEY = 255  # bytes, of a binding key
ANY_TEXT = "*.#"  # one or more words of a routing key, each of which may be empty


class WorkRoute(NamedTuple):
    """One binding of a group. `source`: the exchange; empty is that of the topic. `target`: a queue or an exchange."""

    source: str
    target: str
    key: str
    to_exchange: bool = False

    def __str__(self) -> str:
        """The text that `parse` reads. Names of exchanges and queues have no tabs."""
        return "\t".join((self.source, self.target, self.key, "x" if self.to_exchange else "q"))

    @staticmethod
    def is_text(text: str) -> bool:
        """Whether `parse` can read it."""
        return text.count("\t") == len(WorkRoute._fields) - 1

    @classmethod
    def parse(cls, text: str) -> "WorkRoute":
        source, target, key, kind = text.split("\t")
        return cls(source, target, key, kind == "x")


class TierExchange(NamedTuple):
    """An exchange of a group. It passes on to `alternate` what it does not route."""

    name: str
    kind: str
    alternate: str | None


class WorkRouting(NamedTuple):
    """The objects that bring a topic's events to the queues of a group. `queues` is by tier."""

    queues: Mapping[str, str]
    exchanges: Sequence[TierExchange]
    routes: Sequence[WorkRoute]


def routing(queue: str, keys: Sequence[str], tiers: Mapping[str, str]) -> WorkRouting:
    """`queue`: the name of the queue for normal events. `keys`: of the bindings to the topic's exchange. `tiers`: by
    tier, the pattern of its types."""
    queues = {tier: f"{queue}.{tier}" for tier in WEIGHTS if tier in tiers or tier == NORMAL_TIER}
    queues[NORMAL_TIER] = queue
    if not tiers:
        return WorkRouting(queues, (), [WorkRoute("", queue, key) for key in keys])
    # An exchange cannot get another alternate later, so all of them exist, also those of tiers without a pattern.
    chain = [*TRIED, NORMAL_TIER]
    entries = {tier: f"{queue}.to-{tier}" for tier in chain}
    exchanges = [TierExchange(entries[tier], "topic", entries[following]) for tier, following in pairwise(chain)]
    exchanges.append(TierExchange(entries[NORMAL_TIER], "fanout", None))
    routes = [WorkRoute(entries[NORMAL_TIER], queue, "")]
    routes += [WorkRoute(entries[tier], queues[tier], binding_key(tiers[tier])) for tier in TRIED if tier in tiers]
    routes += [WorkRoute("", entries[chain[0]], key, to_exchange=True) for key in keys]
    return WorkRouting(queues, exchanges, routes)


def binding_key(pattern: str) -> str:
    """The key of a topic exchange that matches every type which `pattern` matches.

    In a pattern `*` is any text. Between dots that is the same as one or more words. As a part of a word it is not, so
    there the key matches more types, and the control plane filters them. A single `*` is also no type at all."""
    if pattern and not pattern.strip("*"):
        return "#"
    words = [ANY_TEXT if "*" in word else word for word in pattern.split(".")]
    key = ".".join(words)
    if len(key.encode()) > _LONGEST_KEY:
        raise BadSetting(f"the pattern {pattern[:40]!r}… of event types is too long for a binding; use a shorter one")
    return key


def topic_keys(types: Sequence[str]) -> list[str]:
    """The keys that bind a group to a topic exchange, whose routing keys are the types."""
    return ["#"] if not types or "*" in types else sorted({binding_key(each) for each in types})


def foreign_keys(kind: str, types: Sequence[str], exchange: str) -> list[str]:
    """The keys that bind a group to an exchange of another program, whose routing keys are the types."""
    if kind == "topic":
        return topic_keys(types)
    if kind != "direct":
        return [""]
    if not types or any("*" in each for each in types):
        raise BadSetting(
            f"exchange {exchange} is a direct exchange, which has no patterns; name each event type in types=[…]"
        )
    return sorted(set(types))


def tier_of(type_: str, tiers: Mapping[str, str]) -> str:
    """The tier of an event type, as the server's exchanges choose it."""
    words = type_.split(".")
    return next((tier for tier in TRIED if tier in tiers and _fits(tiers[tier].split("."), words)), NORMAL_TIER)


def _fits(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Whether the words match, where each * of the pattern stands for one or more of them."""
    reached = {0}  # how many words the pattern can have matched so far
    for part in pattern:
        if part == "*":
            reached = set(range(min(reached) + 1, len(words) + 1)) if reached else reached
        else:
            reached = {at + 1 for at in reached if at < len(words) and words[at] == part}
    return len(words) in reached


class TierTurns:
    """Shares the deliveries of a member among the tiers: of 12 events 8 are critical, 3 normal and 1 bulk, if there are
    enough of each. A tier without events leaves its share to the others."""

    def __init__(self) -> None:
        self._credit: dict[str, int] = {}

    def share(self, waiting: Mapping[str, int], limit: int) -> dict[str, int]:
        """How many events to take of each tier, at most `limit` in all. `waiting`: how many there are."""
        left = {tier: waiting.get(tier, 0) for tier in WEIGHTS}
        taken = dict.fromkeys(WEIGHTS, 0)
        credit = self._credit
        while limit > 0 and any(left.values()):
            hungry = [tier for tier in WEIGHTS if left[tier] and credit.get(tier, 0) > 0]
            if not hungry:
                for tier, weight in WEIGHTS.items():
                    credit[tier] = weight if left[tier] else 0
                continue
            tier = hungry[0]
            count = min(limit, left[tier], credit[tier])
            taken[tier] += count
            left[tier] -= count
            credit[tier] -= count
            limit -= count
        return {tier: count for tier, count in taken.items() if count}
