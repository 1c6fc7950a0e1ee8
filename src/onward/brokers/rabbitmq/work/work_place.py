"""The queues of one work group of one topic. Pure."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from onward.brokers.base import Asks
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.operate.topology import Exchange, Queue
from onward.brokers.rabbitmq.work.rungs import RUNGS_MS
from onward.brokers.rabbitmq.work.tiers import (
    NORMAL_TIER,
    TRIED,
    WorkRouting,
    foreign_keys,
    routing,
    tier_of,
    topic_keys,
)
from onward.errors import BadSetting

SUSPECTS = "suspects"  # beside the tiers, where messages arrive from
CONSUMER_TIMEOUT_S = 1_800.0  # the server's default: so long a consumer may have a message without an acknowledgement
LONGEST_CALL_S = 1_500.0


class WorkPlace(msgspec.Struct, frozen=True):
    """`queues`: by tier. `tiers`: the patterns that choose a tier. `exchange`: where the topic's events are published.
    `is_own`: Onward declares the queues. `is_counted`: they count how often a message was returned."""

    topic: str
    group: str
    queues: Mapping[str, str]
    exchange: str
    tiers: Mapping[str, str] = {}
    routing: WorkRouting = WorkRouting({}, (), ())
    is_own: bool = True
    is_counted: bool = True

    @property
    def suspects(self) -> str:
        return names.suspects_queue(self.topic, self.group)

    @property
    def starts(self) -> str:
        """The stream with the starts of suspects."""
        return f"{self.suspects}.starts"

    def tier(self, type_: str) -> str:
        return tier_of(type_, self.tiers)

    def rung(self, tier: str, wait_ms: int) -> str:
        return names.rung_queue(names.work_queue(self.topic, self.group, _or_none(tier)), wait_ms)

    def __str__(self) -> str:
        return f"group {self.group} of topic {self.topic}"


def place_of(topic: str, group: str, asks: Asks | None, exchange: Exchange | None, queue: Queue | None) -> WorkPlace:
    """`exchange` and `queue`: what the application has declared under the names of the topic and the group.

    Raises BadSetting if the handler asks for something that these cannot do."""
    source = names.exchange(topic) if exchange is None else exchange.name
    types, tiers = (asks.types, asks.tiers) if asks is not None else ((), {})
    if queue is not None:
        return _foreign(topic, group, queue, tiers, source)
    keys = topic_keys(types) if exchange is None else foreign_keys(exchange.kind, types, exchange.name)
    if tiers and exchange is not None and exchange.kind != "topic":
        raise BadSetting(f"tiers={dict(tiers)!r}: exchange {exchange.name} is no topic exchange; remove the tiers")
    plan = routing(names.work_queue(topic, group), keys, tiers)
    return WorkPlace(topic, group, plan.queues, source, tiers, plan)


def _foreign(topic: str, group: str, queue: Queue, tiers: Mapping[str, str], source: str) -> WorkPlace:
    if tiers:
        raise BadSetting(f"tiers={dict(tiers)!r}: group {group} is a declared queue; give the tiers to its declaration")
    if queue.kind == "stream":
        raise BadSetting(f"queue {queue.name} is a stream, which members cannot share; use ordering='key' and a topic")
    return WorkPlace(
        *(topic, group, queue.tier_queues, source, queue.tiers),
        is_own=False,
        is_counted=queue.kind == "quorum",
    )


def check_asks(asks: Asks | None, place: WorkPlace) -> None:
    """Raises BadSetting if a call could take longer than the server allows."""
    if asks is not None and (asks.timeout_s is None or asks.timeout_s > LONGEST_CALL_S):
        raise BadSetting(
            f"timeout_s={asks.timeout_s}: with ordering='none' in {place}, use {LONGEST_CALL_S:g} or less, because "
            f"RabbitMQ closes a consumer that has a message for longer than consumer_timeout, which is "
            f"{CONSUMER_TIMEOUT_S:g} s by default"
        )


def rungs(topic: str, group: str) -> Iterator[str]:
    """The names of all rungs that the group may have."""
    for tier in (NORMAL_TIER, *TRIED):
        base = names.work_queue(topic, group, _or_none(tier))
        yield from (names.rung_queue(base, wait_ms) for wait_ms in RUNGS_MS)


def own_queues(topic: str, group: str) -> Sequence[str]:
    """The names of all queues that the group may have, beside its rungs."""
    suspects = names.suspects_queue(topic, group)
    work = [names.work_queue(topic, group, _or_none(tier)) for tier in (*TRIED, NORMAL_TIER)]
    return [*work, suspects, f"{suspects}.starts", names.token_queue(topic, "work", group)]


def own_exchanges(topic: str, group: str) -> Sequence[str]:
    """The names of all exchanges that the group may have."""
    queue = names.work_queue(topic, group)
    tiers = [f"{queue}.to-{tier}" for tier in (*TRIED, NORMAL_TIER)]
    return [*tiers, names.members_exchange(topic, group)]


def _or_none(tier: str) -> str | None:
    return None if tier == NORMAL_TIER else tier
