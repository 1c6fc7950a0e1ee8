"""Readings: the state of each handler at one moment. The JSON has the same names."""

import msgspec


class PartitionReading(msgspec.Struct, frozen=True, kw_only=True):
    """One partition that this process owns. Unknown is None, never 0."""

    partition: int
    undelivered: int | None  # in the log, not delivered to this process yet
    open: int  # delivered and not done
    gap: int  # done, while an earlier event is open
    lag: int | None  # the sum of the three: events between the watermark and the end of the log
    parked: int  # in the aside: waiting for a retry, or behind an event that does
    paused_by: str | None  # the limit that is full; None: it is not paused
    queued: int  # open events that neither run nor wait for a retry
    running: int
    blocking_position: int | None  # of the event that blocks the watermark; None: there is none
    blocking_state: str | None  # loading, queued, running, delayed (for a retry), marking or leaving
    blocking_attempt: int | None
    blocked_s: float  # how long the watermark has not moved


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One handler: its engine, its counts since the start, how far behind it is."""

    topic: str
    group: str
    engine: str
    worker: int | None = None  # the number of its process under `onward run --workers`
    workers: int
    busy: int
    restarted: int
    oldest_running_s: float | None
    delivered: int
    skipped: int
    filtered: int
    stale: int
    done: int
    retried: int
    dead: int
    declined: int
    undelivered: int | None
    undelivered_oldest_s: float | None
    open: int
    oldest_open_s: float | None
    blocked_s: float
    gap: int
    delayed: int
    parked: int
    parked_keys: int
    dead_letters: int | None  # None: another process counts them, or they were not counted yet
    dead_oldest_s: float | None
    partitions: tuple[PartitionReading, ...] = ()
