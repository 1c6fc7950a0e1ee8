"""Finds the event that may have killed a process, from the stored tries and starts of open events. Pure."""

from collections.abc import Container, Iterable

import msgspec

from onward.brokers.base import Assigned, Tries
from onward.flow.entry import MARKING, Entry
from onward.flow.tracker import Tracker

AMONG_OTHERS, ALONE = 1, 2  # Tries.started: how the event was running when the process crashed


class Blame:
    """The blame of one ownership. If the last ownership ended unclean, events that could have been running then are
    suspected, or have their start recorded before they run."""

    __slots__ = ("_watch", "_watch_to", "marking", "tries", "unclean")

    def __init__(self, assigned: Assigned, max_in_flight: int) -> None:
        self.unclean = assigned.unclean
        self.tries = {p: self.charged(tries) for p, tries in assigned.stored.tries.items()} if assigned.stored else {}
        self.marking: dict[int, Entry] = {}  # events whose start is being recorded
        self._watch = max_in_flight if self.unclean else 0  # how many more events could have been running
        self._watch_to = -1  # the position of the last of those

    def charged(self, tries: Tries) -> Tries:
        """The tries after the last owner's end. An event that was running alone is charged with the crash. An event
        that was running among others stays suspected, also in later ownerships, until a run of it has ended."""
        if tries.started != ALONE:
            return tries
        return Tries(tries.failed, 0, tries.crashes + 1) if self.unclean else Tries(tries.failed, 0, tries.crashes)

    def arrived(self, entry: Entry, watermark: int) -> None:
        """An event of the log was delivered for the first time in this ownership."""
        position = entry.delivery.position
        tries = entry.delivery.tries or self.tries.get(position, Tries())
        self.weigh(entry, tries, self._watched(position, watermark))

    def _watched(self, position: int, watermark: int) -> bool:
        """Whether this event could have been running in the crash. The first `max_in_flight` could, and those that the
        last receive delivered beyond them. So events that arrive while these are open are watched too."""
        if self._watch > 0:
            self._watch -= 1
            self._watch_to = position
            return True
        return watermark <= self._watch_to

    def weigh(self, entry: Entry, tries: Tries, cautious: bool) -> None:
        entry.suspect = tries.crashes > 0 or tries.started > 0
        entry.cautious = self.unclean and (cautious or tries.started > 0)
        entry.tries = tries
        if tries.failed:
            entry.delivery = msgspec.structs.replace(entry.delivery, attempt=tries.failed + 1)

    def not_running(self, entry: Entry) -> None:
        """The run has ended. If its start was recorded, the next progress takes that back, even if the event's record
        cannot be stored."""
        if entry.parked is None and entry.delivery.position in self.tries:
            self.tries[entry.delivery.position] = entry.tries

    def mark(self, entry: Entry, started: int) -> None:
        """Have the start of an event recorded before it runs."""
        entry.stage = MARKING
        entry.tries = msgspec.structs.replace(entry.tries, started=started)
        self.marking[entry.delivery.position] = entry

    def marked(self, positions: Iterable[int]) -> list[Entry]:
        """The starts of these positions are recorded. Returns their entries."""
        entries = [self.marking.pop(position) for position in positions if position in self.marking]
        for entry in entries:
            entry.marked = True
        return entries

    def unmark(self, entry: Entry) -> bool:
        """The event does not run after all, so a later crash must not be blamed on it. False: nothing to take back."""
        entry.marked = False
        suspected = AMONG_OTHERS if entry.suspect and not entry.tries.crashes else 0  # it is still a suspect
        if entry.tries.started == suspected:
            return False
        entry.tries = msgspec.structs.replace(entry.tries, started=suspected)
        return True

    def open_tries(self, tracker: Tracker, leaving: Container[int]) -> dict[int, Tries]:
        """The tries to store with the progress. `leaving`: positions that may be reopened."""
        known, opened, end = self.tries, tracker.open, tracker.end
        tries = {p: tries for p, tries in known.items() if p in opened or p >= end}
        if len(tries) < len(known):  # the others turned out to be holes, except those that may be reopened
            self.tries = tries | {p: tries for p, tries in known.items() if p in leaving}
        return tries
