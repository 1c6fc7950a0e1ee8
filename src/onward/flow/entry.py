"""An open event inside the plane, and how its run may end."""

from enum import IntEnum

import msgspec

from onward.brokers.base import Failure
from onward.event import Delivery


class Stage(IntEnum):
    QUEUED = 0  # behind another event of its lane, or ready and waiting for a slot
    RUNNING = 1
    DELAYED = 2  # waits in place for its next attempt
    LEAVING = 3  # given up; its dead letter is not stored yet


class Entry(msgspec.Struct, gc=False):
    delivery: Delivery
    size: int
    stage: Stage = Stage.QUEUED
    first_failed: float = 0.0  # Unix time of the first failure, 0 when there was none


class Again(msgspec.Struct, frozen=True, gc=False):
    """Failed; to be tried again at this time of the plane's clock."""

    at: float


class Dead(msgspec.Struct, frozen=True, gc=False):
    """Given up; the event becomes a dead letter."""

    failure: Failure


class Done(msgspec.Struct, frozen=True, gc=False):
    """Handled."""


class Released(msgspec.Struct, frozen=True, gc=False):
    """Ended by shutdown before its end: nobody's failure, no attempt charged."""


Outcome = Done | Again | Dead | Released
DONE = Done()
RELEASED = Released()
