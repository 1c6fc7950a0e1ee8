"""The names of our queues and exchanges at the server, and the arguments of our queues. Pure.

A topic has one stream per partition, `onward.<topic>.<index>`, and one exchange for its work queues, `onward.<topic>`,
whose routing keys are the types of events. What belongs to a group as well is named `onward.<topic>:<group>:<rest>`.
Topics and groups may contain dots, but no colon, so two different things never have the same name.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal

Place = int | Literal["work"]  # of a token or an aside: the index of a partition, or the work queue of a group

PREFIX = "onward."
REGISTRY = "onward.registry"
MAX_NAME_BYTES = 255  # of AMQP, also for routing keys
MAX_TYPE_BYTES = 200  # of an event

# Left out, newer servers delete a message at its 21st delivery without an ack. -1 deletes it on 3.10 at the second.
_NO_DELIVERY_LIMIT = 1_000_000_000
_SEGMENT_BYTES = 64 << 20  # retention removes whole segments; the server's own default is 500 MB
_LONGEST_PAIR = 160  # characters of a topic and a group together, in a name that is not cut
_CUT = 60

Arguments = Mapping[str, Any]

QUORUM_ARGUMENTS: Arguments = {"x-queue-type": "quorum", "x-delivery-limit": _NO_DELIVERY_LIMIT}
TOKEN_ARGUMENTS: Arguments = {**QUORUM_ARGUMENTS, "x-single-active-consumer": True}
WORK_ARGUMENTS: Arguments = QUORUM_ARGUMENTS
LOG_ARGUMENTS: Arguments = {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": _SEGMENT_BYTES}  # keeps all


def stream_arguments(retention_s: float) -> dict[str, Any]:
    """Of a partition. The server deletes segments whose events are all older than `retention_s`."""
    return {**LOG_ARGUMENTS, "x-max-age": f"{max(1, math.ceil(retention_s))}s"}


def rung_arguments(work_queue: str, wait_ms: int) -> dict[str, Any]:
    """Of a queue from which a message goes to the work queue after this time."""
    return {
        **QUORUM_ARGUMENTS,
        "x-message-ttl": wait_ms,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": work_queue,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }


def exchange(topic: str) -> str:
    return f"{PREFIX}{topic}"


def stream(topic: str, index: int) -> str:
    return f"{PREFIX}{topic}.{index}"


def token_queue(topic: str, place: Place, group: str) -> str:
    return _of_group(topic, group, f"{place}.token")


def aside_stream(topic: str, group: str, place: Place, generation: int) -> str:
    return _of_group(topic, group, f"{place}.aside.{generation}")


def members_exchange(topic: str, group: str) -> str:
    return _of_group(topic, group, "members")


def work_queue(topic: str, group: str, tier: str | None = None) -> str:
    return _of_group(topic, group, "work" if tier is None else f"work.{tier}")


def suspects_queue(topic: str, group: str) -> str:
    return _of_group(topic, group, "suspects")


def rung_queue(queue: str, wait_ms: int) -> str:
    """The rung of a work queue."""
    return f"{queue}.rung.{wait_ms}"


def is_ours(name: str) -> bool:
    """Whether only Onward may create a queue or exchange of this name."""
    return name.startswith(PREFIX)


def _of_group(topic: str, group: str, rest: str) -> str:
    name = f"{PREFIX}{topic}:{group}:{rest}"
    if len(topic) + len(group) > _LONGEST_PAIR:
        digest = hashlib.sha256(f"{topic}:{group}".encode()).hexdigest()[:32]
        name = f"{PREFIX}{topic[:_CUT]}:{group[:_CUT]}~{digest}:{rest}"
    assert len(name) <= MAX_NAME_BYTES, f"{name} is too long for AMQP"
    return name
