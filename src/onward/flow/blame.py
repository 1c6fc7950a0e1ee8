"""Which event may have killed a process: what is known of the tries of open events, and of their starts. Pure."""

from collections.abc import Container, Iterable

import msgspec

from onward.brokers.base import Assigned, Tries
from onward.flow.entry import MARKING, Entry
from onward.flow.tracker import Tracker

AMONG_OTHERS, ALONE = 1, 2  # Tries.started: how the event was running when the process crashed


class Blame:
    """Of one ownership. After an unclean end of the last one, what could have been running is looked at closely."""

    __slots__ = ("_watch", "_watch_to", "marking", "tries", "unclean")

    def __init__(self, assigned: Assigned, max_in_flight: int) -> None:
        self.unclean = assigned.unclean
        self.tries = {p: self.charged(tries) for p, tries in assigned.stored.tries.items()} if assigned.stored else {}
        self.marking: dict[int, Entry] = {}  # those whose start is being recorded
        self._watch = max_in_flight if self.unclean else 0  # how many more could have been running
        self._watch_to = -1  # the last of those

    def charged(self, tries: Tries) -> Tries:
        """After a crash what was running alone is charged with it. What was running among others is suspected, over
        later ownerships too, until it has ended well or ill."""
        if tries.started != ALONE:
            return tries
        return Tries(tries.failed, 0, tries.crashes + 1) if self.unclean else Tries(tries.failed, 0, tries.crashes)

    def arrived(self, entry: Entry, watermark: int) -> None:
        """An event of the log, for the first time in this ownership."""
        position = entry.delivery.position
        tries = entry.delivery.tries or self.tries.get(position, Tries())
        self.weigh(entry, tries, self._watched(position, watermark))

    def _watched(self, position: int, watermark: int) -> bool:
        """Could this have been running in the crash? The first `max_in_flight` could, and what the last receive had
        brought beyond them: so whatever comes while those are open is watched too."""
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
        """Its start may be recorded: the next progress takes that back, even if its record cannot be stored."""
        if entry.parked is None and entry.delivery.position in self.tries:
            self.tries[entry.delivery.position] = entry.tries

    def mark(self, entry: Entry, started: int) -> None:
        """Its start is to be recorded before it runs."""
        entry.stage = MARKING
        entry.tries = msgspec.structs.replace(entry.tries, started=started)
        self.marking[entry.delivery.position] = entry

    def marked(self, positions: Iterable[int]) -> list[Entry]:
        """The starts of these are recorded."""
        entries = [self.marking.pop(position) for position in positions if position in self.marking]
        for entry in entries:
            entry.marked = True
        return entries

    def unmark(self, entry: Entry) -> bool:
        """It does not run after all: a crash of the next owner must not be blamed on it. False: it was not to be."""
        entry.marked = False
        suspected = AMONG_OTHERS if entry.suspect and not entry.tries.crashes else 0  # that is not over by this
        if entry.tries.started == suspected:
            return False
        entry.tries = msgspec.structs.replace(entry.tries, started=suspected)
        return True

    def open_tries(self, tracker: Tracker, leaving: Container[int]) -> dict[int, Tries]:
        """The tries that go with the progress. `leaving`: positions that may be open again."""
        known, opened, end = self.tries, tracker.open, tracker.end
        tries = {p: tries for p, tries in known.items() if p in opened or p >= end}
        if len(tries) < len(known):  # but for what may be open again, the others turned out to be holes
            self.tries = tries | {p: tries for p, tries in known.items() if p in leaving}
        return tries
