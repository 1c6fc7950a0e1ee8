"""The decisions of the Kafka broker that need no Kafka."""

import asyncio
import random
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from confluent_kafka import Message

from onward import settings
from onward.brokers import Scheme, open_broker
from onward.brokers.base import AsideRecord, Progress, State, Tries
from onward.brokers.kafka import marks
from onward.brokers.kafka.client import Client
from onward.brokers.kafka.holdings import Hold, Holdings
from onward.brokers.kafka.letters import topic_name, topics_of
from onward.brokers.kafka.marks import Committed, Limit, Log
from onward.brokers.kafka.message import received
from onward.brokers.kafka.table import FENCE, MOVE, Entry, Request, Room, Table
from onward.errors import BadSetting, MissingExtra
from onward.event import Delivery, Event, Partition

PLACE = Partition("orders", 2)
LOG = Log("log-a", low=0, high=100, start=100)


def mark(watermark: int, *, fence: int = 7, clean: bool = True, log_id: str = "log-a", count: int = 4) -> str:
    progress = Progress(PLACE, 1, watermark, [(60, 70)], tries={55: Tries(failed=2)})
    text, _ = marks.written(progress, fence, clean=clean, suffix=marks.suffixed(log_id, count), limit=Limit())
    return text


# Where an owner begins


def test_an_owner_goes_on_where_the_last_one_stood() -> None:
    found = marks.origin(PLACE, Committed(50, mark(50)), LOG, begun=4)
    assert (found.position, found.fence, found.unclean, found.note) == (50, 8, False, "")
    assert found.stored is not None
    assert list(found.stored.done_above) == [(60, 70)]
    assert dict(found.stored.tries) == {55: Tries(failed=2)}
    assert marks.origin(PLACE, Committed(50, mark(50, clean=False)), LOG, begun=4).unclean


@pytest.mark.parametrize(
    ("committed", "log", "position", "done"),
    [
        (Committed(50, mark(40)), LOG, 50, []),  # moved by a tool that kept the text
        (Committed(50, ""), LOG, 50, []),
        (Committed(50, "foreign"), LOG, 50, []),
        (Committed(50, mark(50, log_id="log-b")), LOG, 0, []),  # of another log
        (Committed(50, mark(50)), LOG._replace(high=49), 0, []),  # the log was cut
        (Committed(50, mark(50)), LOG._replace(low=65), 65, [(65, 70)]),  # retention
        (Committed(50, mark(50)), LOG._replace(low=80), 80, []),
    ],
)
def test_nothing_is_skipped(committed: Committed, log: Log, position: int, done: list[tuple[int, int]]) -> None:
    found = marks.origin(PLACE, committed, log, begun=4)
    assert found.position == position
    assert list(found.stored.done_above if found.stored else []) == done


def test_a_fence_grows_though_the_group_was_reset() -> None:
    before = marks.origin(PLACE, Committed(None, ""), LOG, begun=0).fence
    assert marks.origin(PLACE, Committed(50, mark(50, fence=before)), LOG, begun=4).fence == before + 1
    assert marks.origin(PLACE, Committed(50, mark(50, fence=before, log_id="b")), LOG, begun=4).fence == before + 1
    assert marks.origin(PLACE, Committed(0, ""), LOG, begun=4).fence >= before


@pytest.mark.parametrize(("begun", "position"), [(0, 100), (4, 100), (2, 0)])
def test_a_group_starts_where_it_says_but_a_later_partition_at_its_beginning(begun: int, position: int) -> None:
    assert marks.origin(PLACE, Committed(None, ""), LOG, begun=begun).position == position


def test_the_count_that_a_group_began_with_is_kept_in_every_mark() -> None:
    assert marks.began_with({0: Committed(None, ""), 1: Committed(None, "")}, 2) == 0
    assert marks.began_with({0: Committed(5, mark(5, count=4)), 7: Committed(None, "")}, 8) == 4
    assert marks.began_with({0: Committed(5, ""), 1: Committed(None, "")}, 8) == 8


def test_a_refused_mark_becomes_smaller_and_keeps_the_lowest() -> None:
    progress = Progress(PLACE, 1, 0, [(n, n + 1) for n in range(1, 90_000, 3)])
    limit = Limit()
    for _ in range(4):
        text, encoded = marks.written(progress, 3, clean=False, suffix=marks.suffixed("log", 1), limit=limit)
        assert len(text) <= limit.chars
        said = marks.read(text, 0)
        assert said.said.fence == 3
        assert said.said.done_above == [span for span in progress.done_above if span[1] <= encoded.covered_to]
        limit = limit.smaller()


# The aside


def record(n: int, state: State = State.DEAD) -> AsideRecord:
    event = Event(f"e{n}", "orders", "k", b"v")
    return AsideRecord(f"g:log:2:{n}", "g", PLACE, n, state, None, event, Tries(failed=5), None)


def written(each: AsideRecord, fence: int) -> Entry:
    return Entry(each.id, msgspec.msgpack.encode(each), fence)


def asked(name: str, ids: list[str], expect: State, to: State | None) -> Entry:
    return Entry(MOVE + name, msgspec.msgpack.encode(Request(ids, expect, to, 9.0)))


def folded(*entries: Entry) -> Table:
    table = Table(Room(1 << 20))
    for entry in entries:
        table.apply(entry)
    return table


def records(table: Table) -> dict[str, AsideRecord]:
    return {name: row.record(row.body or b"") for name, row in table.rows.items()}


def test_what_a_former_owner_writes_is_void_and_written_over() -> None:
    one, two = record(1), record(2)
    table = folded(Entry(FENCE, b"", 1), written(one, 1), Entry(FENCE, b"", 2), written(two, 1), Entry(one.id, None, 1))
    assert records(table) == {one.id: one}
    assert list(table.spoilt) == [two.id, one.id]
    repairs = [Entry(two.id, None, 2), written(one, 2)]
    for entry in repairs:
        table.apply(entry)
    assert not table.spoilt
    compacted = folded(Entry(FENCE, b"", 2), *repairs)
    assert compacted.rows == table.rows


def test_a_request_takes_effect_once_at_its_place_in_the_log() -> None:
    one = record(1)
    moves = [asked(name, [one.id, "nobody"], State.DEAD, State.WAITING) for name in ("a", "b")]
    table = folded(Entry(FENCE, b"", 1), written(one, 1), *moves)
    assert table.outcomes == {MOVE + "a": 1, MOVE + "b": 0}
    moved = msgspec.structs.replace(one, state=State.WAITING, due=9.0, tries=Tries())
    assert records(table) == {one.id: moved}
    assert [list(news.ids) for news in table.news] == [[one.id]]
    assert table.spent() == [MOVE + "b"]
    table.apply(written(record(1, State.HELD), 1))  # the owner has written it anew
    assert set(table.spent()) == {MOVE + "a", MOVE + "b"}


def test_compaction_changes_nothing_of_the_outcome() -> None:
    one = record(1)
    again = written(record(1), 1)
    log = [written(one, 1), asked("a", [one.id], State.DEAD, State.WAITING), again]
    assert records(folded(*log)) == records(folded(*log[1:])) == {one.id: record(1)}


def test_records_come_by_position_whatever_was_written_and_removed() -> None:
    table, alive = Table(Room(100)), set[int]()
    rng = random.Random(3)
    for _ in range(3_000):
        n = rng.randrange(300)
        table.apply(written(record(n), 1) if rng.random() < 0.5 else Entry(record(n).id, None, 1))
        alive = {each.position for each in table.rows.values()}
        least = rng.randrange(-1, 300)
        assert [each.position for each in table.above(least)] == sorted(each for each in alive if each > least)
    assert alive


def test_bodies_are_kept_while_there_is_room_and_the_dead_take_half_of_it() -> None:
    one, room = written(record(1), 1), Room(0)
    room.most = 10 * len(one.value or b"") + 5
    table = Table(room)
    for n in range(8):
        table.apply(written(record(n), 1))
    assert [row.position for row in table.above(-1) if row.body is not None] == [0, 1, 2, 3, 4]
    for n in range(20, 30):
        table.apply(written(record(n, State.HELD), 1))
    kept = [row for row in table.above(-1) if row.body is not None]
    assert room.taken == sum(len(row.body or b"") for row in kept) <= room.most
    assert {row.state for row in kept} == {State.DEAD, State.HELD}
    table.apply(written(record(20, State.HELD), 1))  # again: it counts once
    table.apply(Entry(record(0).id, None, 1))
    table.apply(asked("a", [record(1).id], State.DEAD, None))
    assert room.taken == sum(row.size for row in table.rows.values() if row.body is not None)
    table.clear()
    assert room.taken == 0


def test_what_is_no_record_changes_nothing_and_is_written_over_where_it_hides_one() -> None:
    table = folded(Entry(FENCE, b"", 1), written(record(1), 1))
    for key in (record(1).id, "foreign", MOVE + "foreign"):
        with pytest.raises(msgspec.MsgspecError):
            table.apply(Entry(key, b"\xff\x00 foreign", 1))
    assert records(table) == {record(1).id: record(1)}
    assert list(table.spoilt) == [record(1).id]


def test_the_asides_of_a_group_are_told_apart_by_name() -> None:
    names = ["orders", topic_name("billing", "orders"), "payments", topic_name("mail", "payments")]
    assert topics_of("billing", names) == ["orders"]
    assert len(topic_name("g" * 200, "t" * 200)) <= 249


# Settings


def test_without_the_extra_the_error_names_the_line_to_run() -> None:
    schemes = {"kafka": Scheme("onward.brokers.kafka", "Kafka", needs="no_such_library", extra="kafka")}
    with pytest.raises(MissingExtra, match=r"pip install 'onward\[kafka\]'"):
        asyncio.run(open_broker(settings.load("kafka://localhost"), schemes))


def test_importing_onward_does_not_import_the_client() -> None:
    script = "import onward, sys; sys.exit('confluent_kafka' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_settings_of_the_client_are_passed_by_name_and_never_printed() -> None:
    url = "kafka://ann:pa%40ss@one,two:9093?client.security.protocol=SASL_SSL&partitions=3&client.linger.ms=7"
    loaded = settings.load(url, client={"sasl.password": "secret", "ssl.key.password": "secret"})
    assert loaded.partitions == 3
    assert dict(loaded.client) == {
        "security.protocol": "SASL_SSL",
        "linger.ms": "7",
        "sasl.password": "secret",
        "ssl.key.password": "secret",
    }
    assert "secret" not in repr(loaded)
    client = Client(loaded.url, loaded)
    assert client.servers == "one:9092,two:9093"
    assert "pa" not in repr(client)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"enable.idempotence": "false"}, "enable.idempotence cannot be set"),
        ({"group.id": "x"}, "group.id cannot be set"),
        ({"no.such.setting": "x"}, "no.such.setting"),
        ({"security.protocol": "carrier-pigeon"}, "security.protocol"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], match: str) -> None:
    loaded = settings.load("kafka://localhost:1", client=given)
    with pytest.raises(BadSetting, match=match):
        Client(loaded.url, loaded).producer()


@pytest.mark.parametrize(
    ("url", "client"),
    [
        ("kafka://ann:s3cret@localhost:1", {}),
        ("kafka://localhost:1?client.sasl.mechanism=PLAIN", {"sasl.username": "ann", "sasl.password": "s3cret"}),
        ("kafka://localhost:1", {"oauth_cb": print}),
    ],
)
def test_a_login_that_would_not_be_used_is_refused_at_open(url: str, client: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match=r"\?client\.security\.protocol=SASL_SSL") as raised:
        asyncio.run(open_broker(settings.load(url, client=client)))
    assert "s3cret" not in str(raised.value)


def test_a_wrong_secret_is_not_in_the_error() -> None:
    loaded = settings.load("kafka://localhost:1", client={"ssl.ca.pem": "-----secret-----", "security.protocol": "ssl"})
    with pytest.raises(BadSetting) as raised:
        Client(loaded.url, loaded).producer()
    assert "secret" not in str(raised.value)


# What is decoded, and when


@pytest.mark.parametrize(
    ("headers", "own"),
    [
        ([("ce_id", b"7"), ("ce_type", b"Placed"), ("note", None), ("note", b"\xff")], {"note": "\\xff"}),
        ([("ce_id", b"7"), ("ce_type", b"Placed")], {}),
        (None, {}),
    ],
)
def test_headers_are_the_same_before_and_after_the_rest_is_decoded(headers: Any, own: dict[str, str]) -> None:
    message: Any = Message(topic="orders", partition=1, offset=5, value=b"{}", headers=headers, timestamp=(1, 1234))
    event = received(message, "orders")
    assert event.headers == own
    assert event.id == ("7" if headers else "orders/1/5")
    assert event.headers == event.whole().headers == own


# What is read ahead


def flowing(holdings: Holdings) -> Hold:
    origin = marks.origin(PLACE, Committed(0, mark(0)), LOG, begun=4)
    hold = Hold(PLACE, origin, log_id="log-a", suffix=marks.suffixed("log-a", 4), epoch=1)
    holdings.add(hold)
    assert holdings.collect(0, 1 << 20, now=1.0)  # announced
    return hold


def read(hold: Hold, start: int, count: int, value: bytes = b"v") -> dict[Hold, list[Delivery]]:
    event = Event("e", PLACE.topic, "k", value)
    return {hold: [Delivery(event, PLACE, position, 1) for position in range(start, start + count)]}


def test_who_only_listens_makes_the_reader_read_no_further() -> None:
    holdings = Holdings()
    hold = flowing(holdings)
    holdings.collect(1_000, 1 << 20, now=1.0)
    assert holdings.hungry.is_set()
    holdings.stock(read(hold, 0, 2_000), {})
    assert not holdings.hungry.is_set()
    assert holdings.collect(0, 1 << 20, now=1.0) == []
    assert not holdings.hungry.is_set()
    assert len(holdings.collect(1_000, 1 << 20, now=1.0)) == 1_000
    assert holdings.hungry.is_set()


def test_large_events_are_not_read_ahead_beyond_the_bytes_that_are_asked_for() -> None:
    holdings = Holdings()
    hold = flowing(holdings)
    holdings.collect(1_000, 1_000, now=1.0)
    holdings.stock(read(hold, 0, 3, value=b"x" * 400), {})
    assert not holdings.hungry.is_set()
    assert len(holdings.collect(1_000, 1_000, now=1.0)) == 2
    assert holdings.hungry.is_set()
    assert len(holdings.collect(1_000, 10, now=1.0)) == 1  # the first always fits
    assert (hold.buffered, hold.buffered_bytes) == (0, 0)


def test_a_setting_of_the_producer_that_cannot_be_is_refused_before_anything_is_published() -> None:
    with pytest.raises(BadSetting, match="Invalid value"):
        asyncio.run(open_broker(settings.load("kafka://127.0.0.1:9?client.linger.ms=abc")))
