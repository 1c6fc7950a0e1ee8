"""Which deliveries of a channel to acknowledge together and which one by one. Pure.

The server numbers the deliveries of a channel 1, 2, 3, … One acknowledgement can cover a delivery and all before it, so
everything below the lowest open delivery is acknowledged at once.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Acks(NamedTuple):
    """`up_to`: acknowledge this tag and all lower ones; 0: none. `singles`: acknowledge these one by one."""

    up_to: int
    singles: list[int]


class AckLedger:
    __slots__ = ("_above", "floor")

    def __init__(self) -> None:
        self.floor = 1  # the lowest tag that is not acknowledged
        self._above: set[int] = set()  # acknowledged tags above the floor

    def finish(self, tags: Iterable[int]) -> Acks:
        """These tags are done. Tags that are already acknowledged are ignored.

        `up_to` is never a tag that was acknowledged before: for an unknown tag the server closes the channel."""
        above = self._above
        fresh = {tag for tag in tags if tag >= self.floor and tag not in above}
        floor, up_to = self.floor, 0
        while True:
            if floor in fresh:
                up_to = floor
            elif floor in above:
                above.remove(floor)
            else:
                break
            floor += 1
        self.floor = floor
        singles = sorted([tag for tag in fresh if tag > floor])
        above.update(singles)
        return Acks(up_to, singles)

    def forget(self, tags: Iterable[int]) -> None:
        """These tags were given back to the server, so they are not open any more and must not be acknowledged."""
        above = self._above
        above.update([tag for tag in tags if tag >= self.floor])
        while self.floor in above:
            above.remove(self.floor)
            self.floor += 1
