"""Finds partitions that make no progress although they have events to handle. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from onward.observe.reading import PartitionReading, Reading

EVERY_S = 1.0  # how often to look
LEAST_S = 5.0  # no limit is shorter: on a busy machine a healthy handler waits too

Name = tuple[str, str]
"""Topic and group."""


class Patience(msgspec.Struct, frozen=True):
    """How long a partition of one handler may make no progress."""

    handler: str
    slots: int  # calls that run at once
    timeout_s: float | None
    wait_s: float  # the longest wait for a retry, and for a batch to fill

    @property
    def limit_s(self) -> float | None:
        """None: the handler has no time limit."""
        return None if self.timeout_s is None else max(LEAST_S, self.timeout_s + self.wait_s)


class Standstill:
    """Compares the readings of two looks, and reports the partitions that are stuck.

    The time between two looks counts as at most twice EVERY_S, so the time of a suspended process does not count.
    """

    def __init__(self, patience: Mapping[Name, Patience]) -> None:
        self._patience = patience
        self._looked_at = 0.0
        self._stood: dict[tuple[str, str, int], tuple[object, float]] = {}  # the last state, and for how long

    def look(self, readings: Sequence[Reading], now: float) -> list[str]:
        """A sentence for each partition that has been stuck for too long."""
        passed_s, self._looked_at = min(now - self._looked_at, 2 * EVERY_S), now
        before, self._stood = self._stood, {}
        troubles: list[str] = []
        for reading in readings:
            for part in reading.partitions:
                if not _has_work(part):
                    continue
                place, state = (reading.topic, reading.group, part.partition), self._state(reading, part)
                known, stood_s = before.get(place, (None, 0.0))
                stood_s = stood_s + passed_s if state == known else 0.0
                self._stood[place] = (state, stood_s)
                limit_s = self._limit_s(reading, part, readings)
                if limit_s is not None and stood_s > limit_s:
                    troubles.append(self._sentence(reading, part, stood_s, limit_s))
        return troubles

    def _state(self, reading: Reading, part: PartitionReading) -> object:
        """It changes when the partition makes progress. While every slot is taken, a queued event waits for other runs:
        then the end of any run is progress."""
        full = reading.busy >= self._patience[reading.topic, reading.group].slots
        ends = reading.done + reading.retried + reading.dead if full and part.blocking_state != "running" else 0
        return part.blocking_position, part.blocking_state, part.blocking_attempt, ends, part.paused_by, part.parked

    def _limit_s(self, reading: Reading, part: PartitionReading, readings: Sequence[Reading]) -> float | None:
        """A running event may take the time limit of its handler. A queued one may wait for a run of any handler: for a
        slot, or because an event that is suspected of a crash runs alone."""
        if part.blocking_state == "running":
            return self._patience[reading.topic, reading.group].limit_s
        busy = [self._patience[each.topic, each.group].limit_s for each in readings if each.busy]
        if None in busy:
            return None
        every = [each.limit_s for each in self._patience.values() if each.limit_s is not None]
        return max(every, default=LEAST_S)

    def _sentence(self, reading: Reading, part: PartitionReading, stood_s: float, limit_s: float) -> str:
        what = f"{self._patience[reading.topic, reading.group].handler}: {reading.topic}/{part.partition}"
        at = "" if part.blocking_position is None else f" at position {part.blocking_position}"
        doing = part.blocking_state or (f"paused by {part.paused_by}" if part.paused_by else "waiting for its records")
        return f"{what} is stuck{at}: {doing} for {stood_s:.0f} s, longer than {limit_s:.0f} s"


def _has_work(part: PartitionReading) -> bool:
    """Should it make progress? Yes, if an open event does not wait for its retry, or if the log has more events and the
    partition is paused because it is full."""
    if part.queued + part.running > 0:
        return part.blocking_state != "delayed"
    return part.paused_by is not None and bool(part.undelivered)
