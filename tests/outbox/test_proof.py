"""The proof: the relay loses and inverts nothing under an adversary that finds the faults of popular relays.

Relays are processes here. They are killed, and suspended for longer than their lease.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from onward.event import Event
from onward.outbox import schema, status
from tests.outbox import adversary_process
from tests.outbox.adversary import Judgement, Place, Published, arrived, judge, ledger, prepare, write_for
from tests.outbox.adversary_fleet import LEASE_S, RelayFleet
from tests.outbox.adversary_relays import (
    PopularRelay,
    after_the_last_id,
    in_the_order_of_xids,
    skipping_locked_rows,
    watched,
)
from tests.outbox.fresh import fresh_database
from tests.storm import STORM_S

PATIENCE_S = 60.0
ROUND_S = 2.0
APPLICATION = """
from onward import Onward
from onward.outbox import Outbox

app = Onward({broker!r}, lease_s={lease_s}, partitions=4)
Outbox(app, {database!r})
"""

pytestmark = pytest.mark.slow

DATABASES = [
    pytest.param("postgresql", marks=pytest.mark.servers),
    pytest.param("postgresql-queue", marks=pytest.mark.servers),
    pytest.param("mariadb", marks=pytest.mark.servers),
    "sqlite",
]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A database with a new outbox."""
    dialect, _, mode = request.param.partition("-")
    with fresh_database(dialect, request, tmp_path) as database:
        schema.init(database.url, mode=mode or None)
        place = Place(database.url, database.connect)
        if dialect == "sqlite":
            place = Place(database.url, lambda: _connect(tmp_path / "shop.db"), serial=True)
        prepare(place)
        yield place


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


# -- popular relays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", DATABASES[:3], indirect=True)
def test_a_relay_that_reads_after_the_last_id_loses_events(place: Place) -> None:
    assert worst(place, after_the_last_id, "lost") > 0


@pytest.mark.parametrize("place", DATABASES[:1], indirect=True)
def test_a_relay_that_reads_in_the_order_of_transaction_numbers_inverts_events(place: Place) -> None:
    assert worst(place, in_the_order_of_xids, "inverted") > 0


@pytest.mark.parametrize("place", DATABASES[1:3], indirect=True)
def test_relays_that_skip_locked_rows_invert_events(place: Place) -> None:
    assert worst(place, skipping_locked_rows, "inverted", relays=4) > 0


def worst(place: Place, relay: PopularRelay, fault: str, *, relays: int = 1) -> int:
    """How often the relay shows this fault, in the first round in which it does."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        judgement = watched(place, relay, relays=relays, seconds=ROUND_S)
        count: int = getattr(judgement, fault)
        if count or time.monotonic() > deadline:
            print(f"\n{judgement}")  # noqa: T201
            return count


# -- the judge ------------------------------------------------------------------------------------------------------


def test_the_judge_counts_what_is_lost_inverted_invented_and_repeated() -> None:
    committed = {Published(name, n, f"{name}{n}") for name, n in [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2)]}
    a1, a2, a3, b1, b2 = sorted(committed)
    assert judge(committed, [a1, b1, a2, b2, a3]) == Judgement(5, lost=0, inverted=0, invented=0, duplicates=0)
    assert judge(committed, [a1, a2, a1, a2, a3, b1, b2]).duplicates == 2
    assert judge(committed, [a1, a2, a1, a2, a3, b1, b2]).inverted == 0
    assert judge(committed, [a1, a3, a2, b1, b2]).inverted == 1
    assert judge(committed, [a1, a2, a3, b2]).lost == 1
    assert judge(committed, [a1, a2, a3, b1, b2, Published("b", 2, "rolled back")]).invented == 1


# -- the relay ------------------------------------------------------------------------------------------------------


@pytest.mark.storm
@pytest.mark.timeout(STORM_S + 180)
@pytest.mark.parametrize("place", DATABASES, indirect=True)
def test_killed_and_suspended_relays_lose_and_invert_nothing(place: Place, tmp_path: Path) -> None:
    """The broker is a SQLite file, which refuses a relay that another one has replaced."""
    broker = tmp_path / "broker.db"
    application = APPLICATION.format(broker=f"sqlite:///{broker}", lease_s=LEASE_S, database=place.url)
    (tmp_path / "application.py").write_text(application)
    command = ["-m", "onward", "relay", "application:app"]
    storm(place, command, tmp_path, lambda: events_of(broker))


@pytest.mark.storm
@pytest.mark.timeout(STORM_S + 180)
@pytest.mark.parametrize("place", DATABASES[::2], indirect=True)
def test_a_broker_that_checks_no_fences_gets_every_event_in_order_too(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "arrivals"
    command = ["-m", "tests.outbox.adversary_process", place.url, str(path)]
    storm(place, command, tmp_path, lambda: adversary_process.read(path))


def storm(place: Place, command: list[str], folder: Path, published: Callable[[], list[Published]]) -> None:
    """Write, and torment the relays. Then let them finish, and judge what was published."""
    with RelayFleet(command, folder) as fleet:
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write_for, place, STORM_S * 0.5)
            fleet.torment_until(writing.done, published)
            assert writing.result() == 0, "the relays have caused deadlocks among the writers"
        committed, meanwhile = ledger(place), len(set(published()))
        finished(place, committed, published, fleet)
    judgement = judge(committed, published())
    print(f"\n{judgement}, {meanwhile} of them meanwhile, {fleet.kills} kills, {fleet.stops} stops")  # noqa: T201
    assert judgement.right, f"{judgement}; the relays wrote: {fleet.output()}"


def finished(
    place: Place, committed: set[Published], published: Callable[[], list[Published]], fleet: RelayFleet
) -> None:
    """Wait until every event was published and the relays know it, or until that takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not committed <= set(published()) and time.monotonic() < deadline:
        assert not fleet.failed(), fleet.output()
        time.sleep(0.2)
    while unpublished(place) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not unpublished(place), f"rows are left in the outbox; the relays wrote: {fleet.output()}"


def unpublished(place: Place) -> int:
    """As the outbox sees it."""
    found = status.read(place.url)
    return found.waiting + found.parked_rows


def events_of(broker: Path) -> list[Published]:
    """The log of a SQLite broker, partition by partition."""
    with closing(sqlite3.connect(broker, timeout=PATIENCE_S)) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'onward_log'").fetchone():
            return []
        rows = db.execute("SELECT data FROM onward_log ORDER BY at").fetchall()
    events = [event for (data,) in rows for event in msgspec.msgpack.decode(data, type=list[Event])]
    return [arrived(event.id, event.value or b"") for event in events]
