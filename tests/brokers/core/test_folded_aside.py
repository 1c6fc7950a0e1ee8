"""The aside that is rebuilt from a log: fences, requests, compaction, and bodies in bounded memory."""

import random

import msgspec
import pytest

from onward.brokers.base import AsideRecord, State, Tries
from onward.brokers.core.folded_aside import FENCE, MOVE, AsideTable, BodyRoom, LogEntry, MoveRequest
from onward.event import Event, Partition


def record(n: int, state: State = State.DEAD) -> AsideRecord:
    event = Event(f"e{n}", "orders", "k", b"v")
    return AsideRecord(f"g:log:2:{n}", "g", Partition("orders", 2), n, state, None, event, Tries(failed=5), None)


def written(each: AsideRecord, fence: int) -> LogEntry:
    return LogEntry(each.id, msgspec.msgpack.encode(each), fence)


def asked(name: str, ids: list[str], expect: State, to: State | None) -> LogEntry:
    return LogEntry(MOVE + name, msgspec.msgpack.encode(MoveRequest(ids, expect, to, 9.0)))


def folded(*entries: LogEntry) -> AsideTable:
    table = AsideTable(BodyRoom(1 << 20))
    for entry in entries:
        table.apply(entry)
    return table


def records(table: AsideTable) -> dict[str, AsideRecord]:
    return {name: row.record(row.body or b"") for name, row in table.rows.items()}


def test_entries_of_a_former_owner_have_no_effect_and_can_be_overwritten() -> None:
    one, two = record(1), record(2)
    table = folded(
        LogEntry(FENCE, b"", 1), written(one, 1), LogEntry(FENCE, b"", 2), written(two, 1), LogEntry(one.id, None, 1)
    )
    assert records(table) == {one.id: one}
    assert list(table.spoilt) == [two.id, one.id]
    repairs = [LogEntry(two.id, None, 2), written(one, 2)]
    for entry in repairs:
        table.apply(entry)
    assert not table.spoilt
    compacted = folded(LogEntry(FENCE, b"", 2), *repairs)
    assert compacted.rows == table.rows


def test_a_request_takes_effect_once_at_its_place_in_the_log() -> None:
    one = record(1)
    moves = [asked(name, [one.id, "unknown"], State.DEAD, State.WAITING) for name in ("a", "b")]
    table = folded(LogEntry(FENCE, b"", 1), written(one, 1), *moves)
    assert table.outcomes == {MOVE + "a": 1, MOVE + "b": 0}
    moved = msgspec.structs.replace(one, state=State.WAITING, due=9.0, tries=Tries())
    assert records(table) == {one.id: moved}
    assert [list(news.ids) for news in table.news] == [[one.id]]
    assert table.spent() == [MOVE + "b"]
    table.apply(written(record(1, State.HELD), 1))  # the owner has written it again
    assert set(table.spent()) == {MOVE + "a", MOVE + "b"}


def test_compaction_does_not_change_the_outcome() -> None:
    one = record(1)
    again = written(record(1), 1)
    log = [written(one, 1), asked("a", [one.id], State.DEAD, State.WAITING), again]
    assert records(folded(*log)) == records(folded(*log[1:])) == {one.id: record(1)}


def test_rows_are_sorted_by_position_whatever_the_order_of_writes_and_removals() -> None:
    table, alive = AsideTable(BodyRoom(100)), set[int]()
    rng = random.Random(3)
    for _ in range(3_000):
        n = rng.randrange(300)
        table.apply(written(record(n), 1) if rng.random() < 0.5 else LogEntry(record(n).id, None, 1))
        alive = {each.position for each in table.rows.values()}
        least = rng.randrange(-1, 300)
        assert [each.position for each in table.above(least)] == sorted(each for each in alive if each > least)
    assert alive


def test_bodies_stay_in_memory_while_there_is_room_and_dead_ones_get_half_of_it() -> None:
    one, room = written(record(1), 1), BodyRoom(0)
    room.most = 10 * len(one.value or b"") + 5
    table = AsideTable(room)
    for n in range(8):
        table.apply(written(record(n), 1))
    assert [row.position for row in table.above(-1) if row.body is not None] == [0, 1, 2, 3, 4]
    for n in range(20, 30):
        table.apply(written(record(n, State.HELD), 1))
    kept = [row for row in table.above(-1) if row.body is not None]
    assert room.taken == sum(len(row.body or b"") for row in kept) <= room.most
    assert {row.state for row in kept} == {State.DEAD, State.HELD}
    table.apply(written(record(20, State.HELD), 1))  # written again, it counts once
    table.apply(LogEntry(record(0).id, None, 1))
    table.apply(asked("a", [record(1).id], State.DEAD, None))
    assert room.taken == sum(row.size for row in table.rows.values() if row.body is not None)
    table.clear()
    assert room.taken == 0


def test_an_entry_that_is_not_a_record_changes_nothing_and_is_marked_if_it_could_hide_one() -> None:
    table = folded(LogEntry(FENCE, b"", 1), written(record(1), 1))
    for key in (record(1).id, "foreign", MOVE + "foreign"):
        with pytest.raises(msgspec.MsgspecError):
            table.apply(LogEntry(key, b"\xff\x00 foreign", 1))
    assert records(table) == {record(1).id: record(1)}
    assert list(table.spoilt) == [record(1).id]
