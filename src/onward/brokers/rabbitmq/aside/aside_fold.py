"""The state of an aside, rebuilt from the generations of its stream. Pure.

A stream only grows, so its owner rewrites it from time to time. It closes the generation with an entry "!next". The
state at that place is final. The next generation begins with this state, before anything was written into it. So all
who read the old generation go on in the next one at once. For those who will begin with the next generation, the owner
copies the state into it, and then writes "!open".

Copied entries may come several times, from an owner that was interrupted and from the one that completed the copy. They
say the same each time. A reader that begins with a generation applies the other entries after the copied ones, whatever
their order in the stream.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from onward.brokers.core.folded_aside import FENCE, MOVE, AsideRow, AsideTable, BodyRoom, LogEntry
from onward.brokers.rabbitmq.aside.aside_entries import (
    NEXT,
    OPEN,
    OUTCOMES,
    OWNED,
    AsideEntry,
    chain_offset,
    entry_bytes,
    fence_entry,
    fence_fault,
    generation_and_offset,
    outcomes_entry,
    outcomes_of,
    owned_entry,
)

_MOST_OUTCOMES = 1_000
_LONG_ENTRIES = 10_000  # a shorter generation is not rewritten
_LONG_BYTES = 32 << 20
_NOWHERE = -1  # the place of a body that is only in memory
_GROWN = 3  # it is rewritten when it has so many times the entries, or the bytes, that are needed


class AsideFacts(msgspec.Struct):
    """What is known beside the records. `outcomes`: how many records each of the last requests moved."""

    log_id: str | None = None
    witnessed: tuple[int, bytes] | None = None
    outcomes: dict[str, int] = {}

    def note_outcome(self, request: str, moved: int) -> None:
        self.outcomes[request] = moved
        if len(self.outcomes) > _MOST_OUTCOMES:
            del self.outcomes[next(iter(self.outcomes))]

    def copy(self) -> "AsideFacts":
        return AsideFacts(self.log_id, self.witnessed, self.outcomes.copy())


class GenerationBase(NamedTuple):
    """The state with which a generation begins."""

    rows: tuple[AsideRow, ...]
    fence: int
    facts: AsideFacts

    def last_entries(self) -> list[AsideEntry]:
        """What is written after the copies of all rows. After it, the copy is complete."""
        entries = [fence_entry(self.fence, self.facts.log_id)]
        if self.facts.witnessed is not None:
            fence, progress = self.facts.witnessed
            entries.append(owned_entry(progress, fence))
        copied = [msgspec.structs.replace(entry, copied=True) for entry in entries]
        return [*copied, outcomes_entry(self.facts.outcomes), AsideEntry(OPEN)]


class GenerationLength:
    """How much a reader of this generation has to read."""

    def __init__(self) -> None:
        self.entries = 0
        self.bytes = 0

    def add(self, entry: AsideEntry) -> None:
        self.entries += 1
        self.bytes += entry_bytes(entry)


class DeferredEntries:
    """Entries that take effect once the generation is open. `fence`: the highest fence among them."""

    def __init__(self) -> None:
        self.entries: list[tuple[AsideEntry, int]] = []
        self.fence = 0

    def add(self, entry: AsideEntry, offset: int) -> bool:
        """False: it will have no effect, because its writer was fenced."""
        self.entries.append((entry, offset))
        if entry.key == FENCE:
            self.fence = max(self.fence, entry.fence)
        return entry.key.startswith(MOVE) or entry.fence >= self.fence


class AsideFold:
    """`read` is the next offset of the current generation. `base` is set while this generation is not open: the state
    that has to be copied into it. With `keeps_rows` False only the generations are followed."""

    def __init__(self, room: BodyRoom, generation: int, *, keeps_rows: bool = True) -> None:
        self.table = AsideTable(room)
        self.facts = AsideFacts()
        self.generation = generation
        self.read = 0
        self.is_open = False
        self.base: GenerationBase | None = None
        self.length = GenerationLength()
        self.faults: list[tuple[int, str]] = []  # offsets of entries that were skipped, and why
        self._deferred = DeferredEntries()
        self._keeps_rows = keeps_rows

    def apply(self, entries: Sequence[AsideEntry], offset: int) -> bool:
        """Apply the next message of the current generation. False: its writer was fenced, so it has no effect.

        An entry that is not valid is skipped and added to `faults`. After "!next" the next generation is current, and
        the rest of the message has no effect."""
        generation = self.generation
        self.read = offset + 1
        effective = True
        for entry in entries:
            self.length.add(entry)
            effective = self._apply(entry, offset) and effective
            if self.generation != generation:
                break
        return effective

    def skip(self, offset: int, why: str) -> None:
        """The next message is not ours."""
        self.read = offset + 1
        self.faults.append((offset, why))

    def begin_again(self) -> int:
        """The stream of this generation was deleted, so a new one begins with the records whose bodies are in memory.
        Returns how many are not."""
        lost = [row.id for row in self.table.rows.values() if row.body is None]
        for name in lost:
            self.table.remove(name)
        for name in self.table.rows:
            self.table.relocate(name, _NOWHERE)
        self._begin(self.generation)
        return len(lost)

    def passed(self, generation: int, end: int) -> bool:
        """Whether everything below this offset of this generation was applied, as far as it has an effect."""
        return (self.generation, self.read) >= (generation, end)

    @property
    def is_long(self) -> bool:
        """Whether rewriting it is worth the effort."""
        length, rows = self.length, self.table.rows
        if not self.is_open or (length.entries < _LONG_ENTRIES and length.bytes < _LONG_BYTES):
            return False
        if length.entries >= _LONG_ENTRIES and length.entries > _GROWN * len(rows):
            return True
        return length.bytes >= _LONG_BYTES and length.bytes > _GROWN * sum(row.size for row in rows.values())

    def _apply(self, entry: AsideEntry, offset: int) -> bool:
        if fault := fence_fault(entry, max(self.table.fence, self._deferred.fence)):
            self.faults.append((offset, fault))
            return False
        if entry.copied:
            self._copied(entry, offset)
        elif entry.key == OPEN:
            self._opened()
        elif not self.is_open and self.base is None:
            return self._deferred.add(entry, offset)
        else:
            return self._effective(entry, offset, early=not self.is_open)
        return True

    def _effective(self, entry: AsideEntry, offset: int, *, early: bool) -> bool:
        """`early`: it stands before "!open". A generation that is not yet open cannot be closed."""
        try:
            if entry.key.startswith(MOVE):
                self._requested(entry, offset)
                return True
            if entry.fence < self.table.fence:
                return False
            if entry.key.startswith(NEXT):
                return self._closed(entry, early=early)
            self._written(entry, offset)
        except (msgspec.MsgspecError, ValueError) as error:
            self.faults.append((offset, str(error)))
        return True

    def _written(self, entry: AsideEntry, offset: int) -> None:
        if entry.key == FENCE:
            self.table.apply(LogEntry(FENCE, b"", entry.fence))
            self.facts.log_id = (entry.value or b"").decode() or self.facts.log_id
        elif entry.key == OWNED:
            self.facts.witnessed = (entry.fence, entry.value or b"")
        elif entry.key == OUTCOMES:
            self.facts.outcomes = outcomes_of(entry)
        elif entry.key.startswith("!"):
            raise ValueError(f"{entry.key!r} is not known; is it from a newer version?")
        elif self._keeps_rows:
            place = chain_offset(self.generation, offset)
            self.table.apply(LogEntry(entry.key, entry.value, self.table.fence, place))

    def _requested(self, entry: AsideEntry, offset: int) -> None:
        """An operator that got no answer writes the same request again. Only the first one counts."""
        if not self._keeps_rows or entry.key in self.facts.outcomes:
            return
        place = chain_offset(self.generation, offset)
        self.table.apply(LogEntry(entry.key, entry.value or b"", 0, place))
        self.facts.note_outcome(entry.key, self.table.outcomes[entry.key])
        self.table.apply(LogEntry(entry.key, None))  # the table need not remember it

    def _copied(self, entry: AsideEntry, offset: int) -> None:
        if self.is_open:
            return
        if self.base is None:
            try:
                self._written(entry, offset)
            except (msgspec.MsgspecError, ValueError) as error:
                self.faults.append((offset, str(error)))
            return
        row = self.table.rows.get(entry.key)
        if row is not None and generation_and_offset(row.offset)[0] < self.generation:
            self.table.relocate(row.id, chain_offset(self.generation, offset))

    def _opened(self) -> None:
        if self.is_open:
            return
        self.is_open, self.base = True, None
        deferred, self._deferred = self._deferred, DeferredEntries()
        for entry, offset in deferred.entries:
            self._effective(entry, offset, early=True)

    def _closed(self, entry: AsideEntry, *, early: bool) -> bool:
        if early or int(entry.key.removeprefix(NEXT)) != self.generation + 1:
            return False
        self._begin(self.generation + 1)
        return True

    def _begin(self, generation: int) -> None:
        """This generation begins with the current state."""
        self.base = GenerationBase(tuple(self.table.rows.values()), self.table.fence, self.facts.copy())
        self.generation, self.read, self.is_open = generation, 0, False
        self.length = GenerationLength()
