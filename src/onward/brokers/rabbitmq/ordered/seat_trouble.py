"""Why nothing of a partition is delivered at this member, and how often a seat has failed."""

import logging

from onward.event import Partition

log = logging.getLogger("onward")

_FAULT_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
_LEASES = 3  # how long a partition may have no owner. The server needs some time to find out that a member is dead


class SeatTrouble:
    """Each new text is logged once. A fault is what has failed here; a vacancy is that the partition has no owner."""

    def __init__(self, partition: Partition, group: str, lease_s: float) -> None:
        self._about = f"{partition} of group {group}"
        self._lease_s = lease_s
        self._why = ""
        self._faults = 0
        self._vacant_since: float | None = None
        self._loss = ""  # how the last try ended since then
        self._vacancy = ""

    @property
    def why(self) -> str:
        """What readiness reports; empty: nothing."""
        return self._why or self._vacancy

    def fault(self, why: str) -> float:
        """A try has failed. Returns how long to pause."""
        self.warn(why)
        self._faults += 1
        return min(_LONGEST_PAUSE_S, _FAULT_PAUSE_S * self._faults)

    def warn(self, why: str) -> None:
        if why != self._why:
            self._why = why
            log.warning("RabbitMQ: %s: %s", self._about, why)

    def clear(self) -> None:
        self._why = ""

    def clear_all(self) -> None:
        """It is read again, so the next fault is the first one."""
        self._why, self._faults = "", 0

    def lost(self, why: str) -> None:
        """A try has ended as it may: another member may be the owner."""
        self._loss = why

    def occupied(self) -> None:
        """It has an owner, or that is not known."""
        self._vacant_since, self._loss, self._vacancy = None, "", ""

    def vacant(self, now: float, queue: str) -> None:
        """It has no owner now, and this member stands by at its token queue."""
        if self._vacant_since is None:
            self._vacant_since = now
        is_known = self._why or self._vacancy
        if is_known or now <= self._vacant_since + _LEASES * self._lease_s:
            return
        last = f" (the last try ended so: {self._loss})" if self._loss else ""
        self._vacancy = (
            f"no live member has had it for {_LEASES * self._lease_s:g} s, although this member stands by at queue "
            f"{queue}{last}. Does another program consume this queue, or write to it? See `rabbitmqctl list_consumers`"
        )
        log.warning("RabbitMQ: %s: %s", self._about, self._vacancy)
