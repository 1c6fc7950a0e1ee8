"""When a thread takes its next turn."""

import enum
import math
import threading

from onward import clock
from onward.brokers.redis.link import Pauses

_LONGEST_WAIT_S = 60.0


class Step(enum.Enum):
    """What a thread does next."""

    TURN = enum.auto()
    GLANCE = enum.auto()  # only look, between two turns
    END = enum.auto()


class TurnSchedule:
    """Any thread may ask for a turn. After one that failed there is a pause, whatever is asked for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due = math.inf
        self._glance = math.inf
        self._not_before = 0.0
        self._closed = False
        self._pauses = Pauses()

    def kick(self, at: float = 0.0) -> None:
        """Take a turn by then."""
        with self._changed:
            if at < self._due:
                self._due = at
                self._changed.notify()

    def glance(self, at: float) -> None:
        """Look then, unless a turn comes first. For the thread itself."""
        self._glance = at

    def failed(self, by: float) -> None:
        """The turn failed: try again after a pause, and by then."""
        self._not_before = min(clock.now() + self._pauses.next_s(), by)
        self.kick(self._not_before)

    def succeeded(self) -> None:
        self._not_before = 0.0
        self._pauses.reset()

    def wait(self) -> Step:
        """Until the next step is due."""
        with self._changed:
            while not self._closed and (left_s := self._next() - clock.now()) > 0:
                self._changed.wait(min(left_s, _LONGEST_WAIT_S))
            if self._closed:
                return Step.END
            step = Step.TURN if self._due <= clock.now() else Step.GLANCE
            self._due = math.inf if step is Step.TURN else self._due
            self._glance = math.inf
            return step

    def _next(self) -> float:
        return max(min(self._due, self._glance), self._not_before)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
