"""An event inside the plane, and how its run may end."""

from enum import IntEnum

import msgspec

from onward.brokers.base import Failure, State, Tries
from onward.event import Delivery, Event


class Instant(msgspec.Struct, frozen=True, gc=False):
    """One reading of both clocks: `now` decides, `wall` (Unix time) is written down."""

    now: float
    wall: float


class Stage(IntEnum):
    QUEUED = 0  # behind another event of its lane, or ready and waiting for a slot
    RUNNING = 1
    DELAYED = 2  # waits in place for its next attempt
    MARKING = 3  # waits until its start is recorded, because a crash would blame it
    LEAVING = 4  # waits until its record is stored


QUEUED, RUNNING, DELAYED, MARKING, LEAVING = Stage  # Python 3.11 takes as long for `Stage.QUEUED` as for four calls


class ParkedRecord(msgspec.Struct, gc=False):
    """A record of the aside as the plane knows it. Without its event when memory had no room for it."""

    id: str
    position: int
    key: str | None
    state: State
    due: float  # on the plane's clock
    event: Event | None
    size: int
    tries: Tries
    stored: bool
    failure: Failure | None = None  # as an Entry's
    cautious: bool = False  # loaded after a crash: its start is recorded before it runs
    drawn: bool = False  # in a lane right now
    removed: bool = False  # an operator removed the record while it was drawn
    wall_due: float | None = None  # `due` as it stands in the store


class BatchCall(msgspec.Struct, gc=False):
    """One call of a batch handler: the slot is free when all of its events have ended."""

    size: int
    left: int


class Entry(msgspec.Struct, gc=False):
    """Neither it nor a ParkedRecord can be part of a cycle, so the garbage collector need not track them."""

    delivery: Delivery
    size: int
    slot: int = 0  # the tracker's own
    stage: Stage = QUEUED
    tries: Tries = Tries()
    failure: Failure | None = None  # the last one, in brief, with the time of the first
    due: float = 0.0  # when it is delayed: until then, on the plane's clock
    cautious: bool = False  # its start is recorded before it runs
    suspect: bool = False  # it was running in a crash: it runs alone
    marked: bool = False  # its start is recorded
    batch_limit: int = 0  # it was in a batch that failed: no larger than this; 0: no limit
    parked: ParkedRecord | None = None  # the record it was drawn from
    call: BatchCall | None = None

    @property
    def removed(self) -> bool:
        """An operator removed its record: it must not run any more."""
        return self.parked is not None and self.parked.removed


class Done(msgspec.Struct, frozen=True, gc=False):
    """Handled."""


class Again(msgspec.Struct, frozen=True, gc=False):
    """Failed; to be tried again at this time of the plane's clock. `crashed`: it killed its worker."""

    at: float
    failure: Failure
    crashed: bool = False


class Dead(msgspec.Struct, frozen=True, gc=False):
    """Given up; the event becomes a dead letter."""

    failure: Failure


class Split(msgspec.Struct, frozen=True, gc=False):
    """Its batch failed as a whole: to be run again in smaller batches, no attempt charged."""


class Released(msgspec.Struct, frozen=True, gc=False):
    """It did not run to its end, through no fault of its own: no attempt charged. It may run again, not before `at`."""

    at: float = 0.0


Outcome = Done | Again | Dead | Split | Released
DONE = Done()
SPLIT = Split()
RELEASED = Released()
