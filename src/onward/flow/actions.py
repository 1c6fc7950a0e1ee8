"""The values that the control plane returns: what to do now, and its counts."""

from collections.abc import Sequence

import msgspec

from onward.brokers.base import AsideRecord, Progress
from onward.engines.base import Work
from onward.event import Delivery, Partition


class SettleCall(msgspec.Struct, frozen=True):
    """One settle call. The loop reports its answer to the plane by `settled` or `aside_refused`."""

    progress: Sequence[Progress]
    aside: Sequence[AsideRecord] = ()
    gone: Sequence[str] = ()


class LoadPage(msgspec.Struct, frozen=True):
    """Read a page of records, and pass it to the plane by `loaded`. Try again until it succeeds."""

    partition: Partition
    epoch: int
    after: int | None


class Accused(msgspec.Struct, frozen=True):
    """An event that may have been running when its process died. It runs alone next, or is given up."""

    delivery: Delivery
    crashes: int  # during lone runs, so they were certainly its fault
    dead: bool = False


class Actions(msgspec.Struct, frozen=True):
    """What to do now, in this order."""

    work: Sequence[Work] = ()
    pause: Sequence[Partition] = ()
    resume: Sequence[Partition] = ()
    load: Sequence[LoadPage] = ()
    settle: SettleCall | None = None
    drained: Sequence[Partition] = ()  # to release: nothing of them runs
    undrained: Sequence[Partition] = ()  # to release at their deadline, although events still run
    wake_at: float | None = None  # tick again by then even if nothing happens
    accused: Sequence[Accused] = ()  # to be logged


class Counts(msgspec.Struct):
    """What the plane has counted, for metrics and tests."""

    delivered: int = 0
    skipped: int = 0  # delivered again although done
    filtered: int = 0  # done at intake, because the handler filters out their type
    stale: int = 0  # deliveries and completions of an ownership that had ended
    done: int = 0
    retried: int = 0
    dead: int = 0
