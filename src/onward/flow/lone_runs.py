"""The lone runs of one plane: which events wait for one, which one runs, and whose end is not recorded yet. Pure."""

from collections import deque
from collections.abc import Container

from onward.event import Partition
from onward.flow.blame import ALONE
from onward.flow.entry import MARKING, RUNNING, Entry
from onward.flow.holding import Holding
from onward.flow.quarantine import Quarantine
from onward.flow.settling import Settling


class LoneRuns:
    """An event that was running in a crash runs alone. First everything else ends, then its start is recorded, then it
    runs, then its end is recorded."""

    __slots__ = ("_recording", "_settling", "ended", "entry", "holding", "quarantine", "suspects")

    def __init__(self, quarantine: Quarantine, settling: Settling) -> None:
        self.quarantine = quarantine
        self._settling = settling
        self.suspects: deque[tuple[Holding, int, Entry]] = deque()
        self.holding: Holding | None = None
        self.entry: Entry | None = None  # runs alone, or is about to
        self.ended: tuple[Holding, int] | None = None  # the last lone run, until its end is recorded
        self._recording: tuple[Holding, int] | None = None  # the lone run whose end the settle in flight records

    @property
    def is_wanted(self) -> bool:
        return bool(self.entry is not None or self.suspects or self.ended is not None)

    def is_calm(self) -> bool:
        """Whether no plane of this process runs an event alone, or needs to."""
        return self.entry is None and self.ended is None and not self.suspects and self.quarantine.is_quiet()

    def end(self, position: int) -> None:
        """The lone run of this position has ended."""
        assert self.holding is not None
        self.ended, self.entry = (self.holding, position), None

    def suspect(self, holding: Holding, entry: Entry) -> None:
        """Queue an event that may only run alone."""
        entry.stage = MARKING
        self.suspects.append((holding, holding.epoch or 0, entry))

    def barred(self, *, ready: bool) -> bool:
        """Whether another handler of this process has a lone run, or waits for one. `ready`: this plane has events to
        start."""
        quarantine, wanted = self.quarantine, self.is_wanted
        if wanted:
            quarantine.ask(self)
        barred = quarantine.barred(self)
        if barred and ready and not wanted:
            quarantine.turn_away(self)
        else:
            quarantine.serve(self)
        return barred

    def share(self, running: int, *, sure: bool) -> None:
        """Report the running calls to the other planes of this process, and give back a quarantine without use."""
        quarantine = self.quarantine
        quarantine.report(self, running)
        if quarantine.is_quiet():
            return
        idle = not sure and (self.entry is None or self.entry.stage is not RUNNING)
        if idle or not self.is_wanted:
            quarantine.give_back(self)
        if not sure:
            quarantine.serve(self)

    def choose(self, running: int, now: float) -> None:
        """Have the start of the next suspect recorded, if nothing else runs."""
        while self.suspects and not running and self.quarantine.granted(self):
            holding, epoch, entry = self.suspects.popleft()
            if holding.epoch != epoch or holding.release_at is not None:
                continue
            if entry.parked is not None and holding.pending.refusing:
                holding.shelve(entry)
                continue
            self._settling.press(holding)
            if entry.removed:
                holding.done(entry, now)
                continue
            self.holding, self.entry = holding, entry
            holding.mark(entry, ALONE)
            return

    def start(self, running: int, now: float) -> tuple[Holding, Entry] | None:
        """The event to run alone now; None: there is none yet."""
        lone, holding = self.entry, self.holding
        if lone is None or holding is None:
            self.choose(running, now)
            return None
        if lone.stage is not MARKING or not lone.marked or not self.quarantine.granted(self):
            return None
        if lone.removed:
            self.entry = None
            holding.done(lone, now)
            self._settling.press(holding)
            self.choose(running, now)
            return None
        return holding, lone

    def withdraw(self, holding: Holding) -> Entry | None:
        """Nothing more of this partition starts. Returns its event that was about to run alone, if there was one."""
        lone = self.entry
        if lone is None or lone.stage is not MARKING or holding.events.find(lone.delivery.position) is not lone:
            return None
        self.entry = None
        return lone

    def shelved(self, holding: Holding) -> None:
        """Starts could not be recorded in this partition. If the lone run's was among them, it does not run now."""
        lone = self.entry
        if lone is not None and holding.pending.shelved.get(lone.delivery.position) is lone:
            self.entry = None

    def forget(self, holding: Holding) -> None:
        """The partition is no longer ours."""
        self.withdraw(holding)
        if self.ended is not None and self.ended[0] is holding:
            self.ended = None

    def settling(self) -> None:
        """A settle of all dirty partitions begins."""
        self._recording = self.ended

    def settled(self, refused: Container[Partition]) -> None:
        """The settle was answered. In `refused` partitions nothing was done."""
        if self._recording is self.ended and self.ended is not None and self.ended[0].partition not in refused:
            self.ended = None
            self.quarantine.give_back(self)  # a plane with more suspects asks again, behind the others

    def is_urgent(self) -> bool:
        """Whether the end of a lone run must be recorded. Nothing starts before that."""
        return self.ended is not None and self.ended[0] in self._settling.dirty
