"""Functions that make readings for tests."""

from typing import Any

from onward.observe.reading import PartitionReading, Reading


def reading(*partitions: PartitionReading, **different: Any) -> Reading:
    counts = {"delivered": 12_400, "skipped": 0, "filtered": 0, "stale": 0}
    counts |= {"done": 12_345, "retried": 3, "dead": 0, "declined": 0}
    engine = {"engine": "tasks", "workers": 100, "busy": 12, "restarted": 0, "oldest_running_s": 0.42}
    lag = {"undelivered": None, "undelivered_oldest_s": None, "open": 30, "oldest_open_s": 1.5, "blocked_s": 0.25}
    lag |= {"gap": 7, "delayed": 2, "parked": 5, "parked_keys": 4}
    dead = {"dead_letters": None, "dead_oldest_s": None}
    names = {"topic": "orders", "group": "billing"}
    return Reading(**{**names, **engine, **counts, **lag, **dead, "partitions": partitions, **different})


def partition(number: int = 0, **different: Any) -> PartitionReading:
    """A partition whose event at position 7 is running."""
    counts = {"undelivered": 5, "open": 3, "gap": 2, "lag": 10, "parked": 0, "paused_by": None}
    state = {"queued": 2, "running": 1, "blocking_position": 7, "blocking_state": "running", "blocking_attempt": 1}
    return PartitionReading(**{"partition": number, **counts, **state, "blocked_s": 1.5, **different})
