"""The suite of outbox stores: the promises of onward.outbox.base, on every database and in both modes."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.errors import BadOutbox
from onward.event import Event
from onward.outbox.base import LeasePlan, OutboxStore, ParkedRow, RelaysView
from onward.outbox.rows import COLUMNS
from onward.outbox.stores import open_store
from tests.outbox.store_kit import (
    DATABASES,
    TOPIC,
    OutboxKit,
    StoreRelay,
    by_key,
    claim_all,
    event,
    keep,
    mode_of,
    url_of,
)

MARKS = [pytest.param(name, marks=[] if name == "sqlite" else [pytest.mark.servers]) for name in DATABASES]


@pytest.fixture(params=MARKS)
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutboxKit]:
    kit = OutboxKit(url_of(request.param, request, tmp_path), mode_of(request.param))
    yield kit
    kit.close()


# -- reading ------------------------------------------------------------------------------------------------------


def test_committed_rows_are_read_as_they_were_written(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    written = [
        event("a", 1),
        Event("e-2", TOPIC, None, None),
        Event("e-3", TOPIC, "ключ ", b"\x00\xff", {"h": "wert ü", "": "x"} | {"b": "\n"}, "tÿpe", 1.5),
        Event("e-4", TOPIC, "", b"", {}, "", 0.0),
    ]
    kit.commit(*written)
    assert sorted(relay.drain(), key=lambda each: each.id) == sorted(written, key=lambda each: each.id)


def test_a_row_is_read_until_it_was_advanced_past(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1), event("a", 2))
    assert by_key(relay.read().rows, "a") == ["a:1", "a:2"]
    assert by_key(relay.step().rows, "a") == ["a:1", "a:2"]
    assert not relay.read().rows


def test_another_relay_continues_where_the_last_one_advanced(kit: OutboxKit) -> None:
    first = StoreRelay(kit)
    kit.commit(event("a", 1))
    first.step()
    kit.commit(event("a", 2))
    second = StoreRelay(kit, "b")
    assert by_key(second.drain(), "a") == ["a:2"]


def test_uncommitted_and_rolled_back_rows_are_never_read(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    connection = kit.connect()
    kit.write(connection, event("a", 1))
    assert not relay.drain()
    connection.rollback()
    kit.commit(event("a", 2))
    assert by_key(relay.drain(), "a") == ["a:2"]


def test_a_row_that_commits_after_rows_with_higher_ids_is_not_lost(kit: OutboxKit) -> None:
    if kit.single:
        pytest.skip("SQLite has one writer at a time")
    relay = StoreRelay(kit)
    late = kit.connect()
    kit.write(late, event("late", 1))
    kit.commit(event("early", 1))
    assert by_key(relay.drain(), "early") == ["early:1"]
    late.commit()
    assert by_key(relay.drain(), "late") == ["late:1"]


def test_a_key_stays_in_order_when_its_rows_commit_between_two_pages(kit: OutboxKit) -> None:
    """The first row of the key gets a low id and commits late. Its second row has a high id. A reader that pages by
    `id > last` has passed the first one, and would publish the second one before it."""
    if kit.single:
        pytest.skip("SQLite has one writer at a time")
    relay = StoreRelay(kit)
    late = kit.connect()
    kit.write(late, event("k", 1))
    kit.commit(*[event(f"other-{n}", n) for n in range(20)])
    relay.step(limit=7)
    late.commit()
    kit.commit(event("k", 2))
    relay.drain(limit=7)
    assert by_key(relay.published, "k") == ["k:1", "k:2"]
    assert len(relay.published) == len({each.id for each in relay.published}) == 22


def test_a_long_transaction_delays_only_its_own_rows(kit: OutboxKit) -> None:
    if kit.single:
        pytest.skip("SQLite has one writer at a time")
    relay = StoreRelay(kit)
    long = kit.connect()
    kit.write(long, event("long", 1))
    for n in range(5):
        kit.commit(event("short", n))
        assert by_key(relay.drain(), "short") == [f"short:{n}"]
    long.commit()
    assert by_key(relay.drain(), "long") == ["long:1"]


def test_a_backlog_is_read_in_pages_while_writers_go_on(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event(f"k{n % 5}", n) for n in range(100)])
    for n in range(100, 110):
        batch = relay.step(limit=9)
        assert 1 <= len(batch.rows) <= 9
        assert batch.more
        kit.commit(event(f"k{n % 5}", n))
    relay.drain(limit=9)
    for key in range(5):
        assert by_key(relay.published, f"k{key}") == [f"k{key}:{n}" for n in range(110) if n % 5 == key]
    assert len(relay.published) == 110


def test_a_crash_within_a_backlog_repeats_one_page_at_most(kit: OutboxKit) -> None:
    first = StoreRelay(kit)
    kit.commit(*[event("k", n) for n in range(40)])
    for _ in range(3):
        first.step(limit=8)
    first.read(limit=8)  # and dies before it advances
    second = StoreRelay(kit, "b")
    second.drain(limit=8)
    assert by_key(second.published, "k") == [f"k:{n}" for n in range(24, 40)]


def test_a_batch_is_bounded_by_bytes_but_has_one_row(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event("k", n, size=1000) for n in range(10)])
    assert 1 <= len(relay.read(limit=100, max_bytes=2500).rows) <= 3
    assert len(relay.read(limit=100, max_bytes=10).rows) == 1
    relay.drain(limit=100, max_bytes=2500)
    assert by_key(relay.published, "k") == [f"k:{n}" for n in range(10)]


def test_long_keys_and_headers_count_as_bytes(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    long = [Event(f"e-{n}", TOPIC, f"{n}" * 20_000, b"", {"h": "x" * 20_000}, "", 0.0) for n in range(1, 9)]
    kit.commit(*long)
    assert 1 <= len(relay.read(limit=100, max_bytes=100_000).rows) <= 3
    assert len(relay.drain(limit=100, max_bytes=100_000)) == 8


def test_an_idle_relay_reads_nothing_and_says_so(kit: OutboxKit) -> None:
    batch = StoreRelay(kit).read()
    assert (list(batch.rows), batch.more) == ([], False)


def test_headers_of_another_program_that_are_no_json_object_are_a_fault_of_their_row(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    with kit.transaction() as connection:
        kit.write(connection, event("a", 1))
        cursor = connection.cursor()
        cursor.execute(f"UPDATE {kit.table} SET headers = '[1]'")
        kit.write(connection, event("b", 1))
    rows = {row.event.key: row for row in relay.read().rows}
    assert "headers" in rows["a"].fault
    assert not rows["b"].fault


# -- shards, leases and fences --------------------------------------------------------------------------------------


def test_every_claim_has_a_higher_fence(kit: OutboxKit) -> None:
    first, second = StoreRelay(kit), StoreRelay(kit, "b")
    assert second.held.keys() == first.held.keys()
    assert all(second.held[shard] > first.held[shard] for shard in first.held)


def test_a_turn_reports_only_what_is_still_ours(kit: OutboxKit) -> None:
    first = StoreRelay(kit)
    StoreRelay(kit, "b")
    first.turn(keep)
    assert first.held == {}


def test_a_beat_changes_with_every_turn(kit: OutboxKit) -> None:
    seen: list[int] = []

    def look(view: RelaysView) -> LeasePlan:
        seen.extend(relay.beat for relay in view.relays if relay.name == "a")
        return LeasePlan()

    first, second = StoreRelay(kit), StoreRelay(kit, "b", keep)
    for _ in range(2):
        first.turn(keep)
        second.turn(look)
    assert len(set(seen)) == 2


def test_a_struck_relay_owns_nothing_until_it_claims_again(kit: OutboxKit) -> None:
    first = StoreRelay(kit)
    second = StoreRelay(kit, "b", lambda view: LeasePlan(strike=["a"]))
    assert second.held == {}
    shards: list[str | None] = []
    second.turn(lambda view: shards.extend(each.owner for each in view.shards) or LeasePlan())  # type: ignore[func-returns-value]
    assert set(shards) == {None}
    first.turn(keep)
    assert first.held == {}
    first.turn(claim_all)
    assert first.held


def test_released_shards_are_free_and_a_relay_that_leaves_is_gone(kit: OutboxKit) -> None:
    first = StoreRelay(kit)
    first.turn(lambda view: LeasePlan(release=list(first.held), leave=True))
    views: list[RelaysView] = []
    StoreRelay(kit, "b", lambda view: views.append(view) or LeasePlan())  # type: ignore[func-returns-value]
    assert [relay.name for relay in views[0].relays] == ["b"]
    assert {shard.owner for shard in views[0].shards} == {None}


def test_a_former_owner_advances_nothing_and_learns_which_shards_it_lost(kit: OutboxKit) -> None:
    first = StoreRelay(kit)
    kit.commit(*[event(f"k{n}", n) for n in range(10)])
    batch = first.read()
    parked = [ParkedRow(batch.rows[0], "no", refused=True)]
    second = StoreRelay(kit, "b")
    assert set(first.store.advance(batch, first.held, parked)) == first.held.keys()
    assert second.store.count_parked() == 0
    assert len(second.drain()) == 10


def test_only_shards_that_are_passed_to_advance_move(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    if len(relay.held) == 1:
        pytest.skip("this database has one shard")
    kit.commit(*[event(f"k{n}", n) for n in range(40)])
    batch = relay.read()
    shards = {row.shard for row in batch.rows}
    some = {shard: relay.held[shard] for shard in sorted(shards)[:2]}
    relay.store.advance(batch, some)
    left = {row.event.id for row in batch.rows if row.shard not in some}
    again: set[str] = set()
    while rows := relay.step().rows:
        again.update(row.event.id for row in rows)
    assert again == left


def test_a_key_is_always_in_the_same_shard_and_shards_are_used_evenly(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    for n in range(2):
        kit.commit(*[event(f"key-{key}", n) for key in range(100)])
    places: dict[str | None, set[int]] = {}
    for row in relay.read(limit=1000).rows:
        places.setdefault(row.event.key, set()).add(row.shard)
    assert all(len(shards) == 1 for shards in places.values())
    assert set.union(*places.values()) == relay.held.keys()


def test_a_raised_fence_counts_from_then_on(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    shard, fence = next(iter(relay.held.items()))
    assert not relay.store.raise_fence(shard, fence + 1, fence + 9)
    assert relay.store.raise_fence(shard, fence, fence + 9)
    relay.turn(keep)
    assert relay.held[shard] == fence + 9
    kit.commit(event("a", 1))
    assert len(relay.drain()) == 1


def test_shards_with_different_progress_catch_up_without_loss(kit: OutboxKit) -> None:
    """A relay takes over shards whose last owner was behind."""
    one = StoreRelay(kit)
    if len(one.held) == 1:
        pytest.skip("this database has one shard")
    half = sorted(one.held)[: len(one.held) // 2]
    kit.commit(*[event(f"k{n}", n) for n in range(50)])
    two = StoreRelay(kit, "b", lambda view: LeasePlan(claim=half))
    one.turn(keep)
    one.drain(limit=7)
    kit.commit(*[event(f"k{n}", n + 50) for n in range(50)])
    one.step(limit=7)
    two.step(limit=5)
    both = StoreRelay(kit, "c")
    both.drain(limit=6)
    published = [*one.published, *two.published, *both.published]
    assert len({each.id for each in published}) == len(published) == 100
    for key in range(50):
        assert by_key(published, f"k{key}") == [f"k{key}:{key}", f"k{key}:{key + 50}"]


# -- parked rows ----------------------------------------------------------------------------------------------------


def parked_at(relay: StoreRelay, *keys: str, refused: bool) -> None:
    """Park the rows of these keys, and publish the others."""
    batch = relay.read()
    heads: set[str | None] = set()
    parked = []
    for row in batch.rows:
        if row.event.key in keys:
            parked.append(ParkedRow(row, "the broker said no", refused and row.event.key not in heads))
            heads.add(row.event.key)
    assert not relay.store.advance(batch, relay.held, parked)


def test_parked_rows_leave_the_flow_and_survive_their_relay(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("bad", 1), event("good", 1), event("bad", 2))
    parked_at(relay, "bad", refused=False)
    assert not relay.read().rows
    second = StoreRelay(kit, "b")
    assert not second.read().rows
    assert second.store.count_parked() == 2
    lanes = [lane for lanes in second.store.parked_lanes(second.held).values() for lane in lanes]
    assert lanes == [(TOPIC, "bad")]
    assert by_key(second.store.parked(second.held, limit=10, max_bytes=1 << 20), "bad") == ["bad:1", "bad:2"]


def test_rows_of_a_lane_with_a_refused_row_are_not_tried_again(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("bad", 1), event("bad", 2), event("slow", 1))
    parked_at(relay, "bad", refused=True)
    kit.commit(event("slow", 2))
    parked_at(relay, "slow", refused=False)
    rows = relay.store.parked(relay.held, limit=10, max_bytes=1 << 20)
    assert [row.event.key for row in rows] == ["slow"]


def test_unparked_rows_are_gone_and_a_row_can_become_refused(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1), event("a", 2), event("b", 1))
    parked_at(relay, "a", "b", refused=False)
    rows = relay.store.parked(relay.held, limit=10, max_bytes=1 << 20)
    published = [row for row in rows if row.event.key == "b"]
    refused = [ParkedRow(rows[0], "too large", refused=True)]
    assert not relay.store.unpark(relay.held, published, refused)
    assert relay.store.count_parked() == 2
    assert not relay.store.parked(relay.held, limit=10, max_bytes=1 << 20)


def test_a_former_owner_unparks_nothing(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    parked_at(relay, "a", refused=False)
    rows = relay.store.parked(relay.held, limit=10, max_bytes=1 << 20)
    second = StoreRelay(kit, "b")
    assert set(relay.store.unpark(relay.held, rows)) >= {rows[0].shard}
    assert second.store.count_parked() == 1


def test_parked_rows_are_read_in_pages_from_the_lowest_id(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event("a", n) for n in range(6)])
    parked_at(relay, "a", refused=False)
    first = relay.store.parked(relay.held, limit=4, max_bytes=1 << 20)
    relay.store.unpark(relay.held, first)
    second = relay.store.parked(relay.held, limit=4, max_bytes=1 << 20)
    assert by_key([*first, *second], "a") == [f"a:{n}" for n in range(6)]


def test_parked_rows_of_some_topics_can_be_left_out(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1, topic="one"), event("a", 1, topic="two"), event("a", 2, topic="two"))
    parked_at(relay, "a", refused=False)
    rows = relay.store.parked(relay.held, limit=10, max_bytes=1 << 20, without={"two", "three"})
    assert [row.event.topic for row in rows] == ["one"]


def test_many_refused_lanes_do_not_make_a_look_at_the_parked_rows_slow(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    columns = f"id, shard, {', '.join(COLUMNS)}, refused, why, since"
    mark = "?" if kit.single else "%s"
    shard = next(iter(relay.held))
    rows = [
        (n, shard, f"e{n}", "orders", f"k{n // 2}", "", 0.0, None, b"", n % 2 == 0, "too large", 0.0)
        for n in range(20_000)
    ]
    with kit.transaction() as connection:
        statement = f"INSERT INTO {kit.table}_parked ({columns}) VALUES ({', '.join([mark] * 12)})"
        connection.cursor().executemany(statement, rows)
    started = time.monotonic()
    assert not relay.store.parked(relay.held, limit=500, max_bytes=1 << 20)
    assert time.monotonic() - started < 5, "it compares each row with each refused one"


def test_keys_that_differ_in_case_or_spaces_are_different_lanes(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1), event("A", 1), event("a ", 1))
    parked_at(relay, "a", refused=True)
    parked_at(relay, refused=False)
    kit.commit(event("A", 2), event("a ", 2))
    parked_at(relay, "A", "a ", refused=False)
    rows = relay.store.parked(relay.held, limit=10, max_bytes=1 << 20)
    assert {row.event.key for row in rows} == {"A", "a "}


def test_parked_events_without_a_key_do_not_hold_each_other_up(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event(None, 1), event(None, 2))
    batch = relay.read()
    parked = [ParkedRow(batch.rows[0], "too large", refused=True), ParkedRow(batch.rows[1], "later", refused=False)]
    relay.store.advance(batch, relay.held, parked)
    assert not any(relay.store.parked_lanes(relay.held).values())
    rows = relay.store.parked(relay.held, limit=10, max_bytes=1 << 20)
    assert [row.id for row in rows] == [batch.rows[1].id]


# -- the rest -------------------------------------------------------------------------------------------------------


def test_cleaning_never_deletes_what_is_not_published(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event("a", n) for n in range(10)])
    relay.step(limit=4)
    while relay.store.clean(keep_s=0, limit=3):
        pass
    relay.drain(limit=4)
    assert by_key(relay.published, "a") == [f"a:{n}" for n in range(10)]


def test_published_rows_with_impossible_times_are_cleaned_too(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[Event(f"e-{time_}", TOPIC, "k", b"", {}, "", time_) for time_ in (1e300, 4e9, -5.0)])
    assert len(relay.drain()) == 3
    while relay.store.clean(keep_s=60, limit=10):
        pass
    with kit.transaction() as connection:
        cursor = connection.cursor()
        cursor.execute(f"SELECT count(*) FROM {kit.table}")
        assert cursor.fetchone() == (0,)


def test_a_store_works_again_after_close_and_open(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    relay.store.close()
    relay.store.close()
    relay.store.open()
    relay.turn(keep)
    assert by_key(relay.drain(), "a") == ["a:1"]


def test_missing_tables_are_reported_with_the_command_that_creates_them(kit: OutboxKit) -> None:
    store: OutboxStore = open_store(kit.url, "nothing_here")
    with pytest.raises(BadOutbox, match="onward outbox init"):
        store.open()
    store.close()


def test_waiting_for_the_bell_ends_after_its_time(kit: OutboxKit) -> None:
    StoreRelay(kit).store.wait(0.01)
