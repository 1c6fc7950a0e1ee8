"""An event inside the plane, and the possible outcomes of its run."""

from enum import IntEnum

import msgspec

from onward.brokers.base import Failure, State, Tries
from onward.event import Delivery, Event


class Instant(msgspec.Struct, frozen=True, gc=False):
    """One reading of both clocks: `now` is for decisions, `wall` (Unix time) is only stored."""

    now: float
    wall: float


class Stage(IntEnum):
    QUEUED = 0  # behind another event of its lane, or ready and waiting for a slot
    RUNNING = 1
    DELAYED = 2  # waits in memory for its next attempt
    MARKING = 3  # waits until its start is recorded, so that a crash can be blamed on it
    LEAVING = 4  # waits until its record is stored


QUEUED, RUNNING, DELAYED, MARKING, LEAVING = Stage  # in Python 3.11, `Stage.QUEUED` takes as long as four calls


class ParkedRecord(msgspec.Struct, gc=False):
    """A record of the aside in the plane's memory. `event` is None if there was no room for it."""

    id: str
    position: int
    key: str | None
    state: State
    due: float  # on the plane's clock
    event: Event | None
    size: int
    tries: Tries
    stored: bool
    failure: Failure | None = None  # as in an Entry
    cautious: bool = False  # loaded after a crash: its start is recorded before it runs
    drawn: bool = False  # its event is in a lane
    removed: bool = False  # an operator removed the record while it was drawn
    wall_due: float | None = None  # `due` as stored, in Unix time


class BatchCall(msgspec.Struct, gc=False):
    """One call of a batch handler. Its slot is free when all of its events have ended."""

    size: int
    left: int


class Entry(msgspec.Struct, gc=False):
    """An event in the plane. Neither an Entry nor a ParkedRecord can be part of a reference cycle, so the garbage
    collector need not track them (`gc=False`)."""

    delivery: Delivery
    size: int
    slot: int = 0  # used by the tracker
    stage: Stage = QUEUED
    tries: Tries = Tries()
    failure: Failure | None = None  # the last one, in brief, with the time of the first
    due: float = 0.0  # the end of its delay, on the plane's clock
    cautious: bool = False  # its start is recorded before it runs
    suspect: bool = False  # it may have been running in a crash, so it runs alone
    marked: bool = False  # its start is recorded
    batch_limit: int = 0  # the largest batch it may join, after its batch failed; 0: no limit
    parked: ParkedRecord | None = None  # the record it was drawn from
    call: BatchCall | None = None

    @property
    def removed(self) -> bool:
        """Whether an operator removed its record. Then it must not run any more."""
        return self.parked is not None and self.parked.removed


class Done(msgspec.Struct, frozen=True, gc=False):
    """Handled."""


class Again(msgspec.Struct, frozen=True, gc=False):
    """Failed; the next attempt is due at this time of the plane's clock. `crashed`: the run killed its worker."""

    at: float
    failure: Failure
    crashed: bool = False


class Dead(msgspec.Struct, frozen=True, gc=False):
    """Given up; the event becomes a dead letter."""

    failure: Failure


class Split(msgspec.Struct, frozen=True, gc=False):
    """Its batch failed as a whole. It runs again in a smaller batch; no attempt is charged."""


class Released(msgspec.Struct, frozen=True, gc=False):
    """The run did not finish, through no fault of the event: no attempt is charged. It may run again from `at` on."""

    at: float = 0.0


Outcome = Done | Again | Dead | Split | Released
DONE = Done()
SPLIT = Split()
RELEASED = Released()
