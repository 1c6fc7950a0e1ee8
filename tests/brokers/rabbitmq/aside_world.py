"""A world of aside streams in memory: owners, former owners, operators and readers take turns in any order.

A judge sees every append as it happens, and knows from that alone what has an effect. It knows nothing of copies.
"""

import random
from collections.abc import Generator, Sequence

import msgspec

from onward.brokers.base import AsideRecord, State, Tries
from onward.brokers.core.folded_aside import FENCE, MOVE, BodyRoom, MoveRequest
from onward.brokers.rabbitmq.aside.aside_entries import (
    NEXT,
    OPEN,
    AsideEntry,
    fence_entry,
    generation_and_offset,
    move_entry,
    next_entry,
    owned_entry,
    record_entry,
)
from onward.brokers.rabbitmq.aside.aside_fold import AsideFold
from onward.event import Event, Partition

Steps = Generator[None, None, None]
Message = tuple[object, list[AsideEntry]]  # with the mark of its writer


def record(n: int, state: State = State.DEAD, *, value: bytes = b"") -> AsideRecord:
    event = Event(f"e{n}", "orders", f"key-{n % 3}", value)
    return AsideRecord(f"g:log:2:{n}", "g", Partition("orders", 2), n, state, None, event, Tries(failed=5), None)


class Deleted(Exception):
    """The stream does not exist any more."""


class Judge:
    """What is true, by the order of the appends."""

    def __init__(self) -> None:
        self.generation = 0
        self.records: dict[str, AsideRecord] = {}
        self.fence = 0
        self.outcomes: dict[str, int] = {}
        self.witnessed: tuple[int, bytes] | None = None
        self.effective: set[object] = set()  # the marks of messages that had an effect
        self._opened = set[int]()

    def appended(self, generation: int, mark: object, entries: Sequence[AsideEntry]) -> None:
        for entry in entries:
            if generation == self.generation and not entry.copied and self._counts(entry):
                self.effective.add(mark)
            if entry.key == OPEN:
                self._opened.add(generation)

    def _counts(self, entry: AsideEntry) -> bool:
        if entry.key.startswith(MOVE):
            return self._moved(entry)
        if entry.key == OPEN:
            return False
        if entry.fence < self.fence:
            return False
        if entry.key == FENCE:
            self.fence = entry.fence
        elif entry.key == "!owned":
            self.witnessed = (entry.fence, entry.value or b"")
        elif entry.key.startswith(NEXT):
            if self.generation not in self._opened or entry.key != f"{NEXT}{self.generation + 1}":
                return False
            self.generation += 1
        elif entry.value is None:
            self.records.pop(entry.key, None)
        else:
            self.records[entry.key] = msgspec.msgpack.decode(entry.value, type=AsideRecord)
        return True

    def _moved(self, entry: AsideEntry) -> bool:
        if entry.key in self.outcomes:
            return False
        request = msgspec.msgpack.decode(entry.value or b"", type=MoveRequest)
        mine = [self.records[name] for name in dict.fromkeys(request.ids) if name in self.records]
        moved = [each for each in mine if each.state is request.expect]
        for each in moved:
            if request.to is None:
                del self.records[each.id]
            else:
                self.records[each.id] = each.moved(request.to, request.due)
        self.outcomes[entry.key] = len(moved)
        return True


class World:
    def __init__(self) -> None:
        self.streams: dict[int, list[Message]] = {0: [("founder", [AsideEntry(OPEN)])]}
        self.registered = 0
        self.judge = Judge()
        self.judge.appended(0, "founder", [AsideEntry(OPEN)])

    def append(self, generation: int, mark: object, entries: list[AsideEntry]) -> None:
        if generation not in self.streams:
            raise Deleted
        self.streams[generation].append((mark, entries))
        self.judge.appended(generation, mark, entries)

    def declare(self, generation: int) -> None:
        self.streams.setdefault(generation, [])

    def body(self, place: int, key: str) -> bytes:
        generation, offset = generation_and_offset(place)
        (value,) = [each.value for each in self.streams[generation][offset][1] if each.key == key]
        assert value is not None
        return value


class Reader:
    """A reader that goes on where it was. Beginning again, it begins with the registered generation."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.room = BodyRoom(300)  # room for a few bodies only
        self.begin()

    def begin(self) -> None:
        self.fold = AsideFold(self.room, self.world.registered)
        self.seen: dict[object, bool] = {}  # by mark: whether it has an effect

    def catch_up(self, most: int | None = None) -> None:
        """Raises Deleted, and is at the beginning again, if the generation does not exist any more."""
        left = most
        while left is None or left > 0:
            stream = self.world.streams.get(self.fold.generation)
            if stream is None:
                self.begin()
                raise Deleted
            if self.fold.read == len(stream):
                return
            offset = self.fold.read
            mark, entries = stream[offset]
            self.seen[mark] = self.fold.apply(entries, offset)
            left = None if left is None else left - 1

    def records(self) -> dict[str, AsideRecord]:
        rows = self.fold.table.rows
        return {name: row.record(row.body or self.world.body(row.offset, name)) for name, row in rows.items()}


class Writer(Reader):
    """Writes, and reads on until it knows what came of it."""

    def write(self, entries: list[AsideEntry]) -> Generator[None, None, bool]:
        while True:
            mark, generation = object(), self.fold.generation
            try:
                self.world.append(generation, mark, entries)
                yield
                self.catch_up()
            except Deleted:
                self.begin()
                return (yield from self.write(entries))
            if mark in self.seen:
                assert self.seen[mark] == (mark in self.world.judge.effective), "the writer believes otherwise"
                return self.seen[mark]
            assert self.fold.generation > generation


class OwnerActor(Writer):
    def __init__(self, world: World, fence: int, rng: random.Random) -> None:
        super().__init__(world)
        self.fence = fence
        self.rng = rng

    def run(self) -> Steps:
        """It goes on with its work while it copies."""
        if not (yield from self.write([fence_entry(self.fence)])):
            return
        copying = self.complete()
        while (yield from self.act()):
            if self.rng.random() < 0.8 and next(copying, "complete") == "complete":
                if self.rng.random() < 0.5 and not (yield from self.close()):
                    return
                copying = self.complete()
            yield

    def act(self) -> Generator[None, None, bool]:
        n = self.rng.randrange(12)
        name = record(n).id
        match self.rng.randrange(4):
            case 0 | 1:
                state = self.rng.choice([State.DEAD, State.WAITING, State.HELD])
                return (
                    yield from self.write([record_entry(record(n, state, value=self.rng.randbytes(4)), self.fence)])
                )
            case 2:
                return (yield from self.write([AsideEntry(name, None, self.fence)]))
            case _:
                return (yield from self.write([owned_entry(b"progress %d" % n, self.fence)]))

    def rewrite(self) -> Steps:
        if (yield from self.close()):
            yield from self.complete()

    def close(self) -> Generator[None, None, bool]:
        following = self.fold.generation + 1
        self.world.declare(following)
        yield
        if not self.fold.is_open:  # it is being copied by another one
            return True
        return (yield from self.write([next_entry(following, self.fence)]))

    def complete(self) -> Steps:
        """Copy what the generation begins with; the owner before may have done a part of it."""
        base, generation = self.fold.base, self.fold.generation
        if base is None:
            return
        try:
            for row in base.rows:
                body = row.body or self.world.body(row.offset, row.id)
                copy = msgspec.structs.replace(record_entry(row.record(body), 0), copied=True)
                self.world.append(generation, object(), [copy])
                yield
            self.world.append(generation, object(), base.last_entries())
        except (Deleted, KeyError):  # another one has completed it, and went on
            return
        yield
        self.world.registered = max(self.world.registered, generation)
        yield
        self.world.streams.pop(generation - 1, None)


class OperatorActor(Writer):
    def __init__(self, world: World, name: str, rng: random.Random) -> None:
        super().__init__(world)
        self.name = name
        self.rng = rng
        self.answers: dict[str, int] = {}  # by request

    def run(self) -> Steps:
        for number in range(1_000):
            ids = [record(n).id for n in self.rng.sample(range(12), 4)]
            expect = self.rng.choice([State.DEAD, State.DEAD, State.WAITING])
            to = self.rng.choice([State.WAITING, State.DEAD, None])
            entry = move_entry(f"{self.name}-{number}", MoveRequest(ids, expect, to, float(number)))
            self.answers[entry.key] = yield from self.ask(entry)
            yield

    def ask(self, entry: AsideEntry) -> Generator[None, None, int]:
        while True:
            try:
                yield from self._until_known(entry)
            except Deleted:
                continue
            return self.fold.facts.outcomes[entry.key]

    def _until_known(self, entry: AsideEntry) -> Steps:
        """As an operator does: it writes again where the answer is not known, always the same request."""
        while True:
            self.catch_up()
            if entry.key in self.fold.facts.outcomes:
                return
            for _ in range(self.rng.randint(1, 2)):  # the answer to the first one was lost
                self.world.append(self.fold.generation, object(), [entry])
                yield
