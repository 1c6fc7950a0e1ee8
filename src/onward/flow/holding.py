"""One partition as this process knows it. Pure."""

from onward.brokers.base import AsideRecord, Assigned, Ordering, Progress, Tries
from onward.event import Partition
from onward.flow.entry import Entry, Stage
from onward.flow.lanes import Lanes
from onward.flow.tracker import Tracker


class Holding:
    """One partition in this process. Its lanes outlive an ownership; the rest belongs to the current one."""

    __slots__ = (
        "aside_at",
        "bytes",
        "epoch",
        "lanes",
        "leaving",
        "log_id",
        "partition",
        "paused",
        "release_at",
        "running",
        "stale",
        "tracker",
        "tries",
    )

    def __init__(self, partition: Partition, ordering: Ordering) -> None:
        self.partition = partition
        self.lanes = Lanes(ordering)
        self.stale: dict[tuple[int, int], Entry] = {}  # by epoch and position: runs that outlived their ownership
        self.tracker = Tracker(None)
        self.epoch: int | None = None
        self.begin(None)

    def begin(self, assigned: Assigned | None) -> None:
        """Start an ownership, or (None) stand without one."""
        if self.epoch is not None:
            running = (entry for entry in self.tracker.open.values() if entry.stage is Stage.RUNNING)
            self.stale |= {(self.epoch, entry.delivery.position): entry for entry in running}
            self.lanes.abandon()
        stored = assigned.stored if assigned else None
        self.epoch = assigned.epoch if assigned else None
        self.log_id = assigned.log_id if assigned else ""
        self.tracker = Tracker(stored)
        self.tries: dict[int, Tries] = dict(stored.tries) if stored else {}
        self.leaving: dict[int, tuple[Entry, AsideRecord]] = {}  # by position: given up, letter not stored yet
        self.running = 0
        self.bytes = 0
        self.paused = False
        self.release_at: float | None = None
        self.aside_at = 0.0  # the store refused: no sooner than this

    def progress(self) -> Progress:
        tracker = self.tracker
        return Progress(
            self.partition,
            self.epoch or 0,
            tracker.watermark,
            tracker.done_above(),
            tuple(tracker.fresh),
            dict(self.tries),
        )
