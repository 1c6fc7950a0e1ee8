"""Problems of queues, put together for the operator: thousands of queues may have the same one. Pure."""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from onward.brokers.base import Finding

_NAMED = 3  # queues that are named before the rest is only counted


class QueueTrouble(NamedTuple):
    """A problem of one queue. The sentence is `before`, the queue, and `after`."""

    level: Literal["warning", "error"]
    before: str
    queue: str
    after: str
    cure: str


def combined(troubles: Iterable[QueueTrouble]) -> Iterator[Finding]:
    """One finding for all queues that have the same problem."""
    same: dict[QueueTrouble, list[str]] = {}
    for each in troubles:
        same.setdefault(each._replace(queue=""), []).append(each.queue)
    for trouble, queues in same.items():
        words = (trouble.before, _names(sorted(queues)) + trouble.after)
        yield Finding(trouble.level, " ".join(word for word in words if word), trouble.cure)


def _names(queues: list[str]) -> str:
    if len(queues) == 1:
        return f"queue {queues[0]}"
    more = len(queues) - _NAMED
    if more <= 0:
        return f"queues {', '.join(queues[:-1])} and {queues[-1]}"
    return f"queues {', '.join(queues[:_NAMED])} and {more:,} more"
