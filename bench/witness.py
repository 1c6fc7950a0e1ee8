"""Counts the events that handlers saw, inside the handlers. It shares no code with the path of the events."""

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    expected: int
    handled: int  # distinct events
    inverted: int  # handled before a predecessor of their key
    duplicates: int

    @property
    def lost(self) -> int:
        return self.expected - self.handled

    def __str__(self) -> str:
        return (
            f"{self.handled:,} of {self.expected:,} handled, "
            f"lost={self.lost} inverted={self.inverted} duplicates={self.duplicates}"
        )


class Witness:
    """The events of each key are numbered from 0. Memory grows with the number of keys, unless the order is broken."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._next: dict[str, int] = {}
        self._early: dict[str, set[int]] = {}
        self.handled = 0
        self._inverted = 0
        self._duplicates = 0

    def saw(self, key: str, number: int) -> bool:
        """Count an event; True once all have been seen."""
        if number == self._next.get(key, 0) and not self._early:
            self._next[key] = number + 1
            self.handled += 1
        else:
            self._out_of_turn(key, number)
        return self.handled >= self._expected

    def verdict(self) -> Verdict:
        return Verdict(self._expected, self.handled, self._inverted, self._duplicates)

    def _out_of_turn(self, key: str, number: int) -> None:
        due, early = self._next.get(key, 0), self._early.get(key, set())
        if number < due or number in early:
            self._duplicates += 1
            return
        self.handled += 1
        self._inverted += number > due
        early.add(number)
        while due in early:
            early.discard(due)
            due += 1
        self._next[key] = due
        self._early[key] = early
        if not early:
            del self._early[key]
