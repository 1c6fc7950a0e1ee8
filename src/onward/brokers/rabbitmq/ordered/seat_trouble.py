"""Why nothing of a partition is delivered at this member, and how often a seat has failed."""

import logging

from onward.event import Partition

log = logging.getLogger("onward")

_FAULT_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0


class SeatTrouble:
    """`why`: what readiness reports. Each new text is logged once."""

    def __init__(self, partition: Partition, group: str) -> None:
        self.why = ""
        self._about = f"{partition} of group {group}"
        self._faults = 0

    def fault(self, why: str) -> float:
        """A try has failed. Returns how long to pause."""
        self.warn(why)
        self._faults += 1
        return min(_LONGEST_PAUSE_S, _FAULT_PAUSE_S * self._faults)

    def warn(self, why: str) -> None:
        if why != self.why:
            self.why = why
            log.warning("RabbitMQ: %s: %s", self._about, why)

    def clear(self) -> None:
        self.why = ""

    def clear_all(self) -> None:
        """It reads again, so the next fault is the first one."""
        self.why, self._faults = "", 0
