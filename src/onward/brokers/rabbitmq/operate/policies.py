"""Which policies of the server apply to a queue, and what they would do to its messages. Pure.

The server applies one policy of the users and one of the operators to a queue: of those whose pattern matches its name,
the one with the highest priority. A limit of a policy counts even if the queue has a larger one in its arguments."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from onward.brokers.rabbitmq.operate.queue_troubles import QueueTrouble

# log: a partition's stream. record: a stream from which nothing may be removed. work: a queue of messages to handle.
# rung: a queue whose messages wait for their retry.
Role = Literal["log", "record", "work", "rung"]
_APPLIES = {
    "all": {"quorum", "classic", "stream"},
    "queues": {"quorum", "classic", "stream"},
    "quorum_queues": {"quorum"},
    "classic_queues": {"classic"},
    "streams": {"stream"},
}
_WORDS = {
    "delivery-limit": "deletes a message after so many deliveries",
    "message-ttl": "deletes messages that have waited so many milliseconds",
    "expires": "deletes an unused queue with its messages",
    "max-length": "limits the number of messages",
    "max-length-bytes": "limits the bytes of messages",
    "max-age": "deletes what is older",
}
_STREAM_LIMITS = frozenset({"max-age", "max-length-bytes"})
_QUEUE_LIMITS = frozenset({"delivery-limit", "message-ttl", "expires", "max-length", "max-length-bytes"})
_FULL = ("max-length", "max-length-bytes")
LEAST_CONSUMER_TIMEOUT_MS = 1_800_000  # the default of the server


class Policy(NamedTuple):
    name: str
    pattern: str
    applies_to: str
    priority: int
    definition: Mapping[str, Any]
    is_operators: bool
    vhost: str = "/"

    @classmethod
    def of(cls, found: Mapping[str, Any], *, is_operators: bool) -> "Policy":
        """As the management API describes it."""
        place = found["name"], found["pattern"], found["apply-to"], int(found["priority"])
        return cls(*place, dict(found["definition"]), is_operators, found["vhost"])

    def matches(self, queue: str, kind: str) -> bool:
        if kind not in _APPLIES.get(self.applies_to, ()):
            return False
        try:
            return re.search(self.pattern, queue) is not None
        except re.error:  # a pattern that only Erlang understands; to be on the safe side it matches
            return True

    def __str__(self) -> str:
        return f"{'operator policy' if self.is_operators else 'policy'} {self.name}"


def applied(policies: Sequence[Policy], queue: str, kind: str) -> list[Policy]:
    """The policies that apply to the queue."""
    matching = [each for each in policies if each.matches(queue, kind)]
    users = [each for each in matching if not each.is_operators]
    operators = [each for each in matching if each.is_operators]
    return [max(each, key=lambda policy: policy.priority) for each in (users, operators) if each]


def harm(policies: Sequence[Policy], queue: str, kind: str, role: Role) -> Iterator[QueueTrouble]:
    """What the policies would do to the messages of a queue that Onward relies on."""
    found = applied(policies, queue, kind)
    overflow = next((each.definition["overflow"] for each in found if "overflow" in each.definition), "drop-head")
    for policy in found:
        for name, value in policy.definition.items():
            if (level := _level(name, role, kind, overflow)) is not None:
                before = f"{policy} sets {name}={value}, which {_WORDS[name]}, on"
                yield QueueTrouble(level, before, queue, "", _cure(policy))
        timeout_ms = policy.definition.get("consumer-timeout")
        if timeout_ms is not None and role == "work" and timeout_ms < LEAST_CONSUMER_TIMEOUT_MS:
            yield short_timeout(f"{policy} sets consumer-timeout={timeout_ms} on", queue)


def short_timeout(before: str, queue: str) -> QueueTrouble:
    after = ": a handler that runs longer loses its consumer, and its messages are delivered again"
    return QueueTrouble("warning", before, queue, after, "raise it, or set a lower timeout_s for the handler")


def _level(name: str, role: Role, kind: str, overflow: str) -> Literal["warning", "error"] | None:
    """None: it does no harm."""
    if name not in (_STREAM_LIMITS if kind == "stream" else _QUEUE_LIMITS):
        return None
    if role == "rung" and name == "message-ttl":
        return None  # its messages only come back too early, and wait again
    if role == "log":
        return "warning"  # it may shorten the time that the topic's settings promise
    if role in ("work", "rung") and name in _FULL and overflow != "drop-head":
        return "warning"  # a full queue refuses messages, so none is lost
    return "error"


def _cure(policy: Policy) -> str:
    command = "clear_operator_policy" if policy.is_operators else "clear_policy"
    which = f"-p {shlex.quote(policy.vhost)} {shlex.quote(policy.name)}"
    return f"change its pattern so that it does not match, or remove it: rabbitmqctl {command} {which}"
