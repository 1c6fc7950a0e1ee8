"""The log store when its database was restored from a dump, reset or failed over: no event is lost or passed over."""

import subprocess
from collections.abc import Iterator, Sequence
from uuid import uuid4

import psycopg
import pytest

from onward.errors import BadOutbox, OutboxUnreachable
from onward.event import Event
from onward.outbox.base import ParkedRow
from onward.outbox.postgresql_log import PostgresLogStore
from tests.outbox.postgresql_kit import commit_before_each_statement, sql
from tests.outbox.store_kit import OutboxKit, StoreRelay, by_key, claim_all, event, keep
from tests.servers.needs import POSTGRES
from tests.servers.postgres import PostgresServer
from tests.servers.server import Server, until

pytestmark = pytest.mark.servers
WAIT_S = 60.0


class SecondServer(PostgresServer):
    """A new cluster: its transaction numbers are low. It has prepared transactions."""

    def command(self) -> list[str]:
        return [*super().command(), "--max_prepared_transactions=5"]


class Replica(SecondServer):
    """A hot standby of another server, until it is promoted."""

    primary: Server

    def prepare(self) -> None:
        backup = str(POSTGRES.path.with_name("pg_basebackup"))
        target = ("-D", str(self.folder / "data"), "-R", "--checkpoint=fast", "--no-sync")
        self.run(backup, "-d", self.primary.url.removesuffix("onward") + "postgres", *target)

    def probe(self) -> None:
        psycopg.connect(self.url).close()

    def promote(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")


@pytest.fixture(scope="module")
def second_server(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    server = SecondServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def kits() -> Iterator[list[OutboxKit]]:
    """All outboxes of a test, which are closed at its end."""
    kits: list[OutboxKit] = []
    yield kits
    for kit in kits:
        kit.close()


@pytest.fixture
def kit(postgres_server: PostgresServer, kits: list[OutboxKit]) -> OutboxKit:
    kits.append(OutboxKit(postgres_server.url, "log"))
    return kits[-1]


def spend_numbers(kit: OutboxKit, count: int) -> None:
    """Use up transaction numbers."""
    loop = f"FOR n IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP"
    sql(kit, f"DO $$ BEGIN {loop}; END $$")


def dump(kit: OutboxKit, *options: str) -> bytes:
    command = [str(POSTGRES.path.with_name("pg_dump")), "-d", kit.url, "-t", f"{kit.table}*", *options]
    return subprocess.run(command, check=True, capture_output=True).stdout


def load(kit: OutboxKit, script: bytes) -> None:
    command = [str(POSTGRES.path.with_name("psql")), "-q", "-v", "ON_ERROR_STOP=1", "-d", kit.url]
    subprocess.run(command, check=True, capture_output=True, input=script)


def empty_copy(kit: OutboxKit, server: PostgresServer, kits: list[OutboxKit]) -> OutboxKit:
    """A new database on the server, for a copy of the outbox."""
    name = f"copy_{uuid4().hex[:8]}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    copy = OutboxKit(server.url.removesuffix("onward") + name, "log")
    copy.table = kit.table
    kits.append(copy)
    return copy


def restored(kit: OutboxKit, server: PostgresServer, kits: list[OutboxKit]) -> OutboxKit:
    copy = empty_copy(kit, server, kits)
    load(copy, dump(kit))
    return copy


def values(events: Sequence[Event]) -> list[str]:
    return sorted((each.value or b"").decode() for each in events)


@pytest.mark.parametrize("move", ["same cluster", "lower numbers", "higher numbers"])
def test_a_restored_outbox_publishes_what_was_not_published(
    move: str, postgres_server: PostgresServer, second_server: PostgresServer, kits: list[OutboxKit]
) -> None:
    source = second_server if move == "higher numbers" else postgres_server
    target = second_server if move == "lower numbers" else postgres_server
    kit = OutboxKit(source.url, "log")
    kits.append(kit)
    if source is postgres_server:
        spend_numbers(kit, 20_000)
    relay = StoreRelay(kit)
    long = kit.connect()
    kit.write(long, event("long", 1))  # its number is listed in the cursors, and its id is low
    kit.commit(*[event(f"k{n % 7}", n) for n in range(30)], event("bad", 1))
    batch = relay.read()
    relay.store.advance(
        batch, relay.held, [ParkedRow(row, "no", False) for row in batch.rows if row.event.key == "bad"]
    )
    kit.commit(*[event(f"k{n % 7}", n) for n in range(30, 90)])
    relay.step(limit=11)
    published = [row.event for row in batch.rows] + relay.published
    long.commit()
    kit.commit(event("bad", 2))

    copy = restored(kit, target, kits)
    copy.commit(event("k0", 100))  # before a relay has noticed
    open_ = copy.connect()
    copy.write(open_, event("k0", 101))
    other = StoreRelay(copy)
    restored_id = other.identity.outbox_id
    assert other.identity == (restored_id, 8, other.identity.version, True)
    assert restored_id != relay.identity.outbox_id
    assert all(other.held[shard] > relay.held[shard] for shard in relay.held)
    copy.commit(event("k1", 102))
    other.drain(limit=9)
    open_.commit()
    other.drain(limit=9)

    new = {"k0:100", "k0:101", "k1:102", "long:1", "bad:2"}
    expected = {f"k{n % 7}:{n}" for n in range(90)} - set(values(published)) | new
    assert values(other.published) == sorted(expected)
    assert by_key(other.published, "k0")[-2:] == ["k0:100", "k0:101"]
    assert other.store.count_parked() == 1
    other.turn(keep)
    assert other.identity == (restored_id, 8, other.identity.version, False)
    assert not other.drain()
    relay.drain()  # the original goes on
    assert values([*published, *relay.published[11:]]) == sorted(
        [f"k{n % 7}:{n}" for n in range(90)] + ["bad:1", "bad:2", "long:1"]
    )


def test_rows_that_commit_while_a_restored_outbox_is_corrected_are_published_once(
    second_server: PostgresServer, kit: OutboxKit, kits: list[OutboxKit], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = StoreRelay(kit)
    kit.commit(*[event("a", n) for n in range(5)])
    relay.drain()
    kit.commit(*[event("a", n) for n in range(5, 10)])
    copy = restored(kit, second_server, kits)
    with monkeypatch.context() as patch:
        commit_before_each_statement(copy, "w", patch)
        other = StoreRelay(copy)
    assert other.identity.rebaselined
    other.drain()
    written = sql(copy, "SELECT count(*) FROM {t} WHERE event_key = 'w'")[0][0]
    assert by_key(other.published, "w") == [f"w:{n}" for n in range(written)]
    assert by_key(other.published, "a") == [f"a:{n}" for n in range(5, 10)]


def test_a_copy_of_a_copy_still_knows_what_was_published(
    second_server: PostgresServer, postgres_server: PostgresServer, kit: OutboxKit, kits: list[OutboxKit]
) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1), event("b", 1))
    relay.drain()
    kit.commit(event("a", 2))
    copy = restored(kit, second_server, kits)
    first = StoreRelay(copy)
    copy.commit(event("b", 2))
    assert values(first.drain()) == ["a:2", "b:2"]
    copy.commit(event("a", 3))
    second = StoreRelay(restored(copy, postgres_server, kits))
    assert second.identity.rebaselined
    assert values(second.drain()) == ["a:3"]


@pytest.mark.parametrize("move", ["same cluster", "lower numbers"])
def test_a_copy_of_an_outbox_that_had_no_relay_has_an_id_of_its_own(
    move: str, postgres_server: PostgresServer, second_server: PostgresServer, kit: OutboxKit, kits: list[OutboxKit]
) -> None:
    spend_numbers(kit, 20_000)
    kit.commit(event("a", 1))
    copy = restored(kit, second_server if move == "lower numbers" else postgres_server, kits)
    copy.commit(event("a", 2))
    one, two = StoreRelay(kit), StoreRelay(copy)
    assert one.identity.outbox_id != two.identity.outbox_id
    assert by_key(one.drain(), "a") == ["a:1"]
    assert by_key(two.drain(), "a") == ["a:1", "a:2"]


def test_a_restore_that_is_not_complete_is_left_alone(
    second_server: PostgresServer, kit: OutboxKit, kits: list[OutboxKit]
) -> None:
    """A dump is restored table by table. A relay that corrects half of it would break the other half."""
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    relay.drain()
    kit.commit(event("a", 2))
    copy = empty_copy(kit, second_server, kits)
    load(copy, dump(kit, "--section=pre-data", "--section=data"))
    store = PostgresLogStore(copy.url, copy.table)
    store.open()
    with pytest.raises(OutboxUnreachable, match="not complete"):
        store.turn("a", 10.0, claim_all)
    load(copy, dump(kit, "--section=post-data"))
    held = store.turn("a", 10.0, claim_all).held
    assert by_key(store.read(held, limit=9, max_bytes=999).rows, "a") == ["a:2"]
    store.close()


def test_nothing_is_read_advanced_or_deleted_with_the_cursors_of_another_database(
    second_server: PostgresServer, kit: OutboxKit, kits: list[OutboxKit]
) -> None:
    """A pooler may lead to another database between two transactions."""
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    relay.drain()
    kit.commit(event("a", 2))
    batch = relay.read()
    sql(kit, "UPDATE {t}_meta SET value = 'elsewhere' WHERE name = 'identity'")
    for call in (relay.read, lambda: relay.store.clean(keep_s=0, limit=10)):
        with pytest.raises(OutboxUnreachable, match="replaced"):
            call()
    assert set(relay.store.advance(batch, relay.held)) == relay.held.keys()
    relay.turn(claim_all)
    assert relay.identity.rebaselined
    assert by_key(relay.drain(), "a") == ["a:2"]


def test_after_truncate_with_restart_identity_new_rows_are_published(
    second_server: PostgresServer, kit: OutboxKit, kits: list[OutboxKit]
) -> None:
    relay = StoreRelay(kit)
    spend_numbers(kit, 20_000)
    kit.commit(*[event("bad", n) for n in range(3)], *[event("a", n) for n in range(100)])
    batch = relay.read(limit=1000)
    bad = [row for row in batch.rows if row.event.key == "bad"]
    relay.store.advance(batch, relay.held, [ParkedRow(row, "no", refused=False) for row in bad])
    sql(kit, "TRUNCATE {t} RESTART IDENTITY")
    kit.commit(event("a", 200), event("bad", 200))
    with pytest.raises(OutboxUnreachable):  # the ids of parked rows are used again
        relay.read()
    relay.turn(claim_all)
    assert relay.identity.rebaselined
    batch = relay.read()
    assert [row.event.key for row in batch.rows] == ["a", "bad"]
    relay.store.advance(batch, relay.held, [ParkedRow(batch.rows[1], "behind", refused=False)])
    parked = relay.store.parked(relay.held, limit=10, max_bytes=1000)
    assert by_key(parked, "bad") == ["bad:0", "bad:1", "bad:2", "bad:200"]

    copy = restored(kit, second_server, kits)  # its new ids are lower than those of the first 100 events
    copy.commit(event("a", 201))
    assert by_key(StoreRelay(copy).drain(), "a") == ["a:201"]


def test_a_restored_outbox_without_its_sequence_publishes_rather_twice_than_never(
    second_server: PostgresServer, kit: OutboxKit, kits: list[OutboxKit]
) -> None:
    relay = StoreRelay(kit)
    spend_numbers(kit, 20_000)
    kit.commit(*[event("a", n) for n in range(50)])
    relay.drain()
    while relay.store.clean(keep_s=0, limit=100):
        pass
    kit.commit(event("b", 1))
    relay.drain()
    copy = restored(kit, second_server, kits)
    sql(copy, "ALTER TABLE {t} ALTER COLUMN id RESTART WITH 1")
    copy.commit(event("b", 2))  # its id is low, and its number is visible in the cursors
    assert by_key(StoreRelay(copy).drain(), "b") == ["b:2", "b:1"]


def test_rows_that_were_loaded_with_numbers_of_the_future_are_published(kit: OutboxKit) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    relay.drain()
    kit.commit(event("a", 2))
    sql(kit, "UPDATE {t} SET xid = '999999999999' WHERE id = (SELECT max(id) FROM {t})")
    with pytest.raises(OutboxUnreachable):
        relay.read()
    relay.turn(claim_all)
    assert by_key(relay.drain(), "a") == ["a:2"]


def test_two_relays_that_find_a_restored_outbox_correct_it_once(
    second_server: PostgresServer, kit: OutboxKit, kits: list[OutboxKit]
) -> None:
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    relay.drain()
    copy = restored(kit, second_server, kits)
    one, two = StoreRelay(copy, "one"), StoreRelay(copy, "two", keep)
    assert (one.identity.rebaselined, two.identity.rebaselined) == (True, False)
    assert one.identity.outbox_id == two.identity.outbox_id


def test_a_prepared_transaction_delays_only_its_own_rows(second_server: PostgresServer, kits: list[OutboxKit]) -> None:
    kit = OutboxKit(second_server.url, "log")
    kits.append(kit)
    relay = StoreRelay(kit)
    connection = kit.connect()
    connection.tpc_begin(connection.xid(1, "onward", kit.table))
    kit.write(connection, event("k", 1))
    connection.tpc_prepare()
    kit.commit(event("other", 1))
    assert [each.key for each in relay.drain()] == ["other"]
    connection.tpc_commit()
    kit.commit(event("k", 2))
    assert by_key(relay.drain(), "k") == ["k:1", "k:2"]


def test_a_replica_is_refused_and_serves_after_it_was_promoted(
    second_server: PostgresServer, kits: list[OutboxKit]
) -> None:
    kit = OutboxKit(second_server.url, "log")
    kits.append(kit)
    relay = StoreRelay(kit)
    kit.commit(event("a", 1))
    relay.drain()
    kit.commit(event("a", 2))
    relay.step()
    kit.commit(event("a", 3))
    replica = Replica()
    replica.primary = second_server
    try:
        replica.start()
        store = PostgresLogStore(replica.url, kit.table)
        with pytest.raises(BadOutbox, match="primary"):
            store.open()
        until(lambda: caught_up(kit, replica), WAIT_S, "the replica does not catch up", replica.log)
        replica.promote()
        store.open()
        turn = store.turn("b", 10.0, claim_all)
        assert not turn.identity.rebaselined
        assert by_key(store.read(turn.held, limit=9, max_bytes=999).rows, "a") == ["a:3"]
        store.close()
    finally:
        replica.close()


def caught_up(kit: OutboxKit, replica: PostgresServer) -> bool:
    with psycopg.connect(replica.url) as connection:
        return connection.execute(f"SELECT count(*) FROM {kit.table}").fetchone() == (3,)
