"""The benchmarks of the outbox check what they measure: every event, in the order of its key."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import psycopg
import pytest
from bench.__main__ import main
from bench.contestants import outbox_faststream
from bench.kit import Bench, child
from bench.outbox_database import Meter, PostgresDatabase, fill, postgres
from bench.workload import items

from bench import outbox, outbox_delay, outbox_takeover, outbox_writes

EVENTS = 400

pytestmark = [pytest.mark.slow, pytest.mark.servers]


@pytest.fixture(scope="module")
def server(postgres_server: object) -> Iterator[PostgresDatabase]:
    with postgres() as server:
        yield PostgresDatabase(server)


@pytest.fixture
def database(server: PostgresDatabase) -> PostgresDatabase:
    server.renew()
    return server


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(quick=True, folder=tmp_path, say=lambda _: None)


def drained(bench: Bench, database: PostgresDatabase, module: str) -> tuple[int, int]:
    """How many events the contestant has seen, and how many of them out of order."""
    verdict = child(f"bench.contestants.{module}", bench.folder, database=database.url, events=EVENTS).verdict
    return verdict.handled, verdict.inverted


def test_every_contestant_drains_all_events_in_order(bench: Bench, database: PostgresDatabase) -> None:
    outbox_faststream.fill(database.url, items(EVENTS))
    assert drained(bench, database, "outbox_faststream") == (EVENTS, 0)
    fill(bench.folder, database.url, EVENTS)
    assert drained(bench, database, "outbox_relay") == (EVENTS, 0)
    database.renew()
    fill(bench.folder, database.url, EVENTS)
    assert drained(bench, database, "outbox_bare") == (EVENTS, 0)


def test_an_event_that_is_missing_fails_the_check(bench: Bench, database: PostgresDatabase) -> None:
    fill(bench.folder, database.url, EVENTS)
    with psycopg.connect(database.url) as connection:
        connection.execute("DELETE FROM onward_outbox WHERE id = (SELECT max(id) FROM onward_outbox)")
    assert drained(bench, database, "outbox_bare") == (EVENTS - 1, 0)


def test_the_meter_counts_what_the_server_spends(bench: Bench, database: PostgresDatabase) -> None:
    meter = Meter(database)
    fill(bench.folder, database.url, 10 * EVENTS)
    cost = meter.read(10 * EVENTS)
    assert 300 < cost.wal_bytes < 3_000  # the value alone has 300
    assert 1 < cost.cpu_us < 10_000


def test_transactions_with_an_event_leave_it_in_the_outbox(bench: Bench, database: PostgresDatabase) -> None:
    outbox_writes.run(bench, database)
    assert [check.ok for check in bench.checks] == [True]
    assert len(bench.figures) == len(outbox_writes.CONNECTIONS)


def test_delays_are_measured_for_every_event(bench: Bench, database: PostgresDatabase, tmp_path: Path) -> None:
    outbox_delay.run(bench, database, [("SQLite", f"sqlite:///{tmp_path}/broker.db")])
    assert [check.ok for check in bench.checks] == [True, True]
    assert all(min(figure.samples["delays_ms"]) > 0 for figure in bench.figures)


def test_the_shards_of_a_killed_relay_are_taken_over(bench: Bench, database: PostgresDatabase) -> None:
    assert outbox_takeover.measure(bench, database, lease_s=1.0) > 0.3


def test_an_event_that_was_written_and_published_at_once_is_counted(bench: Bench, database: PostgresDatabase) -> None:
    sink = outbox.Sink("SQLite", f"sqlite:///{bench.folder}/broker.db")
    outbox.sustained(bench, database, [sink])
    assert [check.ok for check in bench.checks] == [True, True]  # as the relay and as a handler saw them
    assert [figure.value > 0 for figure in bench.figures] == [True]


@pytest.mark.more
@pytest.mark.timeout(600)  # it takes a minute on two idle cores
def test_quick_mode_measures_the_outbox(postgres_server: object, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert main(["outbox", "--quick", "--json", str(path)]) == 0
    found = msgspec.json.decode(path.read_bytes())
    assert all(check["ok"] for check in found["checks"])
    assert any(figure["what"].startswith("outbox, a backlog of") for figure in found["figures"])
