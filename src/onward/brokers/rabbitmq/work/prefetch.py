"""How many messages a consumer may have unacknowledged. Pure.

More than the handler runs at once, so that it never waits for the network. Few enough that other members get a share,
that a crash returns few, and that their bytes fit into memory. A fast handler is limited by how often the control plane
settles, so its prefetch grows.
"""

_FIRST = 20  # until the size of messages is known
_LEAST = 20
_PER_CALL = 2  # for each call that runs at once
_GROWN = 4  # times the limit of events in flight
_STEP = 4  # it grows by this factor; each time a consumer is added
_GROW_AT = 0.5  # of the prefetch, done between two settles
_SHRINK_AT = 0.1
_CAUTIOUS_S = 10.0  # after messages came back: a process may have died, and the next may die with many too
_CALM_S = 5.0


class Prefetch:
    def __init__(self, concurrency: int | None, rounds: int, *, max_in_flight: int, max_bytes: int) -> None:
        """`concurrency`: how many calls run at once; None if it is unknown. `rounds`: how many calls can follow each
        other, each as long as it may take, before the server wants an acknowledgement."""
        base = max_in_flight if concurrency is None else max(_LEAST, _PER_CALL * concurrency)
        self._base = min(base, max_in_flight, max_in_flight if concurrency is None else rounds * concurrency)
        self._most = max(self._base, _GROWN * max_in_flight)
        self._max_bytes = max_bytes
        self._size = 0.0  # the average size of a message in bytes; 0: unknown
        self._wanted = self._base
        self._cautious_until = 0.0
        self._given_back = 0  # messages that we returned ourselves and that have not come back
        self._given_until = 0.0  # later they are forgotten: other members have them
        self._busy_at = 0.0  # when most of the prefetch was last in use

    @property
    def count(self) -> int:
        """The prefetch to consume with."""
        if not self._size:
            return min(_FIRST, self._base)
        return max(1, min(self._wanted, int(self._max_bytes / self._size)))

    def received(self, messages: int, size: int) -> None:
        """So many messages with so many bytes in all have arrived."""
        average = max(1.0, size / messages)
        # It follows at once when messages become larger, and slowly when they become smaller.
        self._size = average if average > self._size else 0.9 * self._size + 0.1 * average

    def gave_back(self, messages: int, now: float) -> None:
        """We returned so many messages, for example in a pause. If they come back, no process has died."""
        if now >= self._given_until:
            self._given_back = 0
        self._given_back += messages
        self._given_until = now + _CAUTIOUS_S

    def came_back(self, now: float) -> None:
        """A message arrived that was delivered before."""
        if self._given_back and now < self._given_until:
            self._given_back -= 1
            return
        self._cautious_until = now + _CAUTIOUS_S
        self._wanted = self._base

    def settled(self, messages: int, now: float) -> None:
        """One settle acknowledged so many messages."""
        if messages > _SHRINK_AT * self._wanted:
            self._busy_at = now
        if messages >= _GROW_AT * self._wanted and now >= self._cautious_until:
            self._wanted = min(self._most, _STEP * self._wanted)
        elif self._wanted > self._base and now > self._busy_at + _CALM_S:
            self._wanted = max(self._base, self._wanted // 2)
            self._busy_at = now

    def differs(self, count: int) -> bool:
        """Whether a consumer with this prefetch should be replaced."""
        return self.count > 1.5 * count or self.count < count / 1.5
