"""What only the SQLite broker has: its file, its lock, its retention, other processes that use the file."""

import asyncio
import contextlib
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pytest

from onward import Onward, clock
from onward.brokers.base import PASSING, Assigned, Broker, Fenced, Progress, Reached, Subscription, TopicSpec, Topology
from onward.brokers.sqlite import lock_holder, open_broker
from onward.brokers.sqlite.backlog import Backlog
from onward.brokers.sqlite.leases import Lease
from onward.brokers.sqlite.mounts import network_type
from onward.brokers.sqlite.retention import Retention
from onward.brokers.sqlite.store import Store, locate
from onward.brokers.sqlite.transaction import Transaction
from onward.errors import (
    Backlogged,
    BadSetting,
    BadStore,
    BrokerError,
    GroupDropped,
    PartitionsDiffer,
    PublishError,
    TooLarge,
    Unserialisable,
)
from onward.event import Delivery, Event, Partition, new_id
from onward.settings import Settings

PUBLISHER = """
import asyncio, sys
from onward.brokers.sqlite import open_broker
from onward.event import Event, new_id
from onward.settings import Settings

async def main(path, name, batches):
    broker = open_broker(f"sqlite:///{path}", Settings(partitions=4))
    for n in range(int(batches)):
        await broker.publish([Event(new_id(), "orders", f"{name}-{k}", b"%d" % n) for k in range(10)])
        print(n, flush=True)
    await broker.close()

asyncio.run(main(*sys.argv[1:]))
"""


def event(n: int, key: str | None = "k", size: int = 0) -> Event:
    return Event(new_id(), "orders", key, str(n).encode().ljust(size, b"."))


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[Broker]:
    options = {"partitions": 4, "lease_s": 1.0, "takeover_grace_s": 0.1} | options
    broker = open_broker(f"sqlite:///{path}", Settings(**options))
    try:
        yield broker
    finally:
        await broker.close()


async def join(broker: Broker, group: str = "billing", **options: Any) -> Subscription:
    return await broker.subscribe(
        ["orders"], group=group, member="m", ordering="key", **{"start": "earliest"} | options
    )


async def publish_until_refused(broker: Broker, size: int) -> tuple[int, PublishError]:
    """Publish one event at a time until one is refused. Returns how many were accepted, and the error."""
    for n in range(1_000):
        try:
            await broker.publish([event(n, size=size)])
        except PublishError as error:
            return n, error
    raise AssertionError("never refused")


async def take(subscription: Subscription, count: int, *, wait_s: float = 1.0) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(40):
        while len(found) < count:
            messages = await subscription.receive(1_000, 1 << 24, wait_s)
            found += [message for message in messages if isinstance(message, Delivery)]
    return found


def numbers(deliveries: Sequence[Delivery]) -> list[int]:
    return [int((each.event.value or b"").rstrip(b".")) for each in deliveries]


async def settle(subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
    ends = {each.partition: Progress(each.partition, each.epoch, each.position + 1) for each in deliveries}
    assert not await subscription.settle(list(ends.values()))


def publisher(path: Path, name: str, batches: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PUBLISHER, str(path), name, str(batches)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def trim(path: Path, **options: Any) -> None:
    """Run retention once, as the broker does every few seconds."""
    settings = Settings(**options)
    with closing(Store(path, settings).connect()) as db:
        db.execute("BEGIN IMMEDIATE")
        Retention(settings, Backlog(1), lambda chore, at: None).work(Transaction(db))
        db.execute("COMMIT")


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("SELECT count(*) FROM onward_log").fetchone()[0])


# The file


def make_text(path: Path) -> None:
    path.write_bytes(b"Dear diary, today I was nearly taken for a database.\n" * 50)


def make_garbage(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\x00" + bytes(range(256)) * 64)


def make_truncated(path: Path) -> None:
    asyncio.run(_publish_some(path))
    path.write_bytes(path.read_bytes()[:8192])


def make_newer(path: Path) -> None:
    asyncio.run(_publish_some(path))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE onward_meta SET value = '999'")


def make_namesake(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE onward_log (mine)")


async def _publish_some(path: Path) -> None:
    async with opened(path) as broker:
        await broker.publish([event(n, size=1_000) for n in range(100)])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (make_text, "not a SQLite database"),
        (make_garbage, "SQLite|damaged"),
        (make_truncated, "damaged"),
        (make_newer, "newer Onward"),
        (make_namesake, "not Onward's"),
    ],
)
def test_a_file_that_is_not_a_store_of_onward_is_not_changed(tmp_path: Path, make: Any, says: str) -> None:
    path = tmp_path / "shop.db"
    make(path)
    (tmp_path / "shop.db-lock").unlink(missing_ok=True)
    before = path.read_bytes()
    with pytest.raises(BadStore, match=says):
        open_broker(f"sqlite:///{path}", Settings())
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["shop.db"]


def test_our_tables_can_share_a_file_with_tables_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA user_version = 7")
        db.execute("CREATE TABLE customer (name)")
        db.execute("INSERT INTO customer VALUES ('Ada')")
    asyncio.run(_publish_some(path))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM customer").fetchall() == [("Ada",)]
        assert db.execute("PRAGMA user_version").fetchone() == (7,)
        assert db.execute("PRAGMA application_id").fetchone() == (0,)


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://host/file.db", "sqlite://u:SECRET@host/file.db"]
)
def test_a_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(BadSetting, match="file") as caught:
        open_broker(url, Settings())
    assert "SECRET" not in str(caught.value)


def test_the_error_names_a_path_that_does_not_exist_or_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadStore, match=r"nowhere does not exist"):
        open_broker(f"sqlite:///{tmp_path}/nowhere/a.db", Settings())
    with pytest.raises(BadStore, match="is a folder"):
        open_broker(f"sqlite:///{tmp_path}", Settings())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_the_error_names_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadStore, match="no permission to write to the folder"):
        open_broker(f"sqlite:///{tmp_path}/a.db", Settings())


def test_the_innermost_mount_decides_whether_a_path_is_on_a_network_file_system() -> None:
    mounts = (
        "/dev/sda / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n/dev/sdb /data/local xfs rw 0 0\n"
        "me@host: /home/a\\040b fuse.sshfs rw 0 0\n/dev/sdc /mnt ext4 rw 0 0\n//nas/share /mnt cifs rw 0 0\n"
    )
    for path, kind in {
        "/data/shop.db": "nfs4",
        "/data/local/shop.db": None,
        "/database/shop.db": None,
        "/home/a b/shop.db": "fuse.sshfs",
        "/mnt/shop.db": "cifs",
    }.items():
        assert network_type(PurePosixPath(path), mounts) == kind, path


def test_the_scheme_may_be_written_in_upper_case(tmp_path: Path) -> None:
    assert locate(f"SQLITE:///{tmp_path}/a.db") == locate(f"sqlite:///{tmp_path}/a.db") == tmp_path / "a.db"
    with pytest.raises(BadSetting, match=r"did you mean sqlite:///a\.db"):
        locate("SQLite://a.db")


def test_settings_without_a_question_mark_do_not_become_part_of_the_file_name(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db&lease_s=3"
    with pytest.raises(BadSetting, match=r"has a & without a \?.* write \? before the first setting, .*%26"):
        Onward(url).publish_sync("orders", 1)
    assert not list(tmp_path.iterdir())
    Onward(f"sqlite:///{tmp_path}/a%26b.db?lease_s=3&partitions=1").publish_sync("orders", 1)
    assert (tmp_path / "a&b.db").exists()


def test_many_processes_may_create_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    processes = [publisher(path, f"p{n}", 1) for n in range(6)]
    for process in processes:
        with process:
            assert output(process).read() == "0\n"
    assert rows(path) > 0


def test_an_older_file_is_upgraded(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    asyncio.run(_publish_some(path))
    with closing(sqlite3.connect(path)) as db, db:  # as version 1 left it, with two records set aside
        for trigger in ("added", "removed", "changed"):
            db.execute(f"DROP TRIGGER onward_aside_{trigger}")
        db.execute("ALTER TABLE onward_topic DROP COLUMN aside")
        db.execute("DROP TABLE onward_fence")
        db.execute("DROP TABLE onward_relay")
        db.execute("ALTER TABLE onward_group DROP COLUMN waits")
        db.execute("ALTER TABLE onward_group DROP COLUMN gone_fence")
        db.execute("DELETE FROM onward_meta WHERE name = 'identity'")
        db.execute("UPDATE onward_meta SET value = '1' WHERE name = 'schema'")
        rows = [(f"r{n}", n, state) for n, state in enumerate(("held", "dead"))]
        db.executemany(
            "INSERT INTO onward_aside (id, grp, part, position, state, data) VALUES (?, 'g', 1, ?, ?, x'0102')", rows
        )

    async def scenario() -> None:
        async with opened(path) as broker:
            assert len(await take(await join(broker), 100)) == 100

    asyncio.run(scenario())
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT aside FROM onward_topic").fetchone() == (2,)
        assert db.execute("SELECT value FROM onward_meta WHERE name = 'identity'").fetchone()


def test_a_damaged_record_batch_stops_its_own_partition_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.brokers.sqlite.subscription._REST_S", 0.1)

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            await broker.publish([event(n, f"k{n}") for n in range(40)])
            with closing(sqlite3.connect(path)) as db, db:
                (at, count) = db.execute("SELECT at, count FROM onward_log ORDER BY at LIMIT 1").fetchone()
                db.execute("UPDATE onward_log SET data = x'c1' WHERE at = ?", (at,))
            subscription = await join(broker)
            assert len({each.partition for each in await take(subscription, 40 - count)}) == 3
            (logged,) = {record.getMessage() for record in caplog.records}
            assert logged.startswith("orders/0 of group billing is stopped: the record batch of positions 0 to")
            assert list(subscription.troubles()) == [logged], "readiness must show it"
            with closing(sqlite3.connect(path)) as db, db:
                db.execute(logged.rpartition(": ")[2])  # the statement that the message suggests
            await broker.publish([event(99, f"k{n}") for n in range(40)])
            assert len({each.partition for each in await take(subscription, 40)}) == 4
            assert not subscription.troubles()

    asyncio.run(scenario())


def test_a_checkup_names_problems_and_their_cures(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path, durability="window") as broker:
            await broker.publish([event(n) for n in range(10)])
            await (await join(broker)).close()
            found = {finding.what: finding for finding in await broker.diagnose() if finding.level == "warning"}
            assert "durability window: a power cut may lose the events of the last moments" in found
            (behind,) = [finding for what, finding in found.items() if what.startswith("group billing of topic orders")]
            assert "onward groups drop billing --topic orders" in behind.cure

    asyncio.run(scenario())


def test_a_checkup_finds_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    asyncio.run(_publish_some(path))
    with closing(sqlite3.connect(path)) as db:  # as a lost write would leave it
        db.execute("PRAGMA writable_schema = ON")
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'onward_log'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size + 8)
        file.write(b"\xff" * 64)

    async def scenario() -> None:
        async with opened(path) as broker:
            (damage,) = [finding for finding in await broker.diagnose() if finding.level == "error"]
            assert "is damaged" in damage.what
            assert "backup" in damage.cure

    asyncio.run(scenario())


def test_a_checkup_names_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            await broker.publish([event(0)])
            with open(f"{path}-lock", "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(f"{os.getpid()} {clock.now() - 60:.6f} stuck".encode().ljust(127) + b"\n")
                file.flush()
                (held,) = [finding for finding in await broker.diagnose() if finding.level == "error"]
            assert f"process {os.getpid()} (stuck)" in held.what

    asyncio.run(scenario())


def test_a_checkup_notices_a_transaction_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.brokers.sqlite.checkup._BUSY_S", 0.05)

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            await broker.publish([event(0)])
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                (found,) = [finding for finding in await broker.diagnose() if finding.level == "error"]
            assert "another program holds a transaction" in found.what

    asyncio.run(scenario())


def test_a_suspended_member_whose_topic_was_dropped_gets_group_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path, lease_s=0.3, max_poll_gap_s=0.2) as broker, opened(path) as other:
            await broker.publish([event(n) for n in range(5)])
            sleeper = await join(broker)
            await take(sleeper, 5)
            async with asyncio.timeout(40):
                while await other.topics():
                    with contextlib.suppress(BrokerError):
                        await other.drop_topic("orders")
            assert {lag.undelivered for lag in (await sleeper.lag()).values()} <= {None}
            (fenced,) = await sleeper.receive(10, 1 << 20, 40.0)
            assert isinstance(fenced, Fenced)
            with pytest.raises(GroupDropped, match="or the topic itself"):
                await sleeper.receive(10, 1 << 20, 40.0)

    asyncio.run(scenario())


# Topics and positions


def test_another_partition_count_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            await broker.publish([event(0)])
        before = rows(path)
        async with opened(path, partitions=8) as broker:
            with pytest.raises(PartitionsDiffer, match="4 partitions, this process expects 8"):
                await broker.publish([event(1)])
            with pytest.raises(PartitionsDiffer):
                await join(broker)
            (change,) = await broker.declare(Topology([TopicSpec("orders", 8)]), apply=True)
            assert change.action == "refuse"
        assert rows(path) == before

    asyncio.run(scenario())


def test_a_partition_count_changed_by_hand_stops_a_running_publisher(tmp_path: Path) -> None:
    """With the new count, its keys would change their partitions."""

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            await broker.publish([event(0)])
            with closing(sqlite3.connect(path)) as db, db:
                db.execute("UPDATE onward_topic SET partitions = 5")
                db.execute("INSERT INTO onward_partition (topic, idx) VALUES (1, 4)")
            with pytest.raises(PartitionsDiffer, match="5 partitions"):
                await broker.publish([event(1)])

    asyncio.run(scenario())


def test_an_undeclared_topic_is_refused_if_auto_declare_is_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "shop.db", auto_declare=False) as broker:
            with pytest.raises(PublishError, match="auto_declare") as raised:
                await broker.publish([event(0)])
            assert len(raised.value.refused) == 1
            with pytest.raises(BrokerError, match="auto_declare"):
                await join(broker)
            (change,) = await broker.declare(Topology([TopicSpec("orders", 2)]), apply=True)
            assert change.action == "create"
            await broker.publish([event(0)])
            assert not await broker.declare(Topology([TopicSpec("orders", 2)]), apply=True)

    asyncio.run(scenario())


def test_an_event_that_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "shop.db", max_event_bytes=1_000) as broker:
            with pytest.raises(TooLarge, match="max_event_bytes is 1000"):
                await broker.publish([event(0), event(1, size=1_001)])
            bad: Any = Event(new_id(), "orders", "k", b"", {"n": 1})  # type: ignore[dict-item]
            with pytest.raises(Unserialisable):
                await broker.publish([event(0), bad])
            await broker.publish([event(2)])
            assert [each.event.value for each in await take(await join(broker), 1)] == [b"2"]

    asyncio.run(scenario())


def test_positions_are_never_used_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            subscription = await join(broker)
            await broker.publish([event(n) for n in range(10)])
            await settle(subscription, await take(subscription, 10))
            trim(path, retention_s=0)
            assert rows(path) == 0
            await broker.publish([event(10)])
            (found,) = await take(subscription, 1)
            assert found.position == 10
            # A later group gets Reached for the removed events.
            late = await join(broker, "late")
            messages = [*await late.receive(10, 1 << 20, 1.0), *await late.receive(10, 1 << 20, 1.0)]
            assigned = {each.partition: each for each in messages if isinstance(each, Assigned)}[found.partition]
            rest = [each for each in messages if not isinstance(each, Assigned)]
            assert rest[0] == Reached(found.partition, assigned.epoch, 10)
            assert isinstance(rest[1], Delivery)

    asyncio.run(scenario())


# Retention and backlog


def test_retention_removes_only_events_that_every_group_has_finished(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            fast, slow = await join(broker, "fast"), await join(broker, "slow")
            for n in range(20):
                await broker.publish([event(n, size=1_000)])
            done = await take(fast, 20)
            await settle(fast, done)
            trim(path, retention_s=0, retention_bytes=1)
            assert rows(path) == 20, "one group has not finished any event"
            await settle(slow, (await take(slow, 20))[:5])
            trim(path, retention_s=3_600)
            assert rows(path) == 20, "no event is too old, and retention_bytes is not exceeded"
            trim(path, retention_s=3_600, retention_bytes=3_300)
            assert rows(path) == 18, "of the five finished events, the two oldest exceed retention_bytes"
            trim(path, retention_s=0)
            assert rows(path) == 15
            await slow.close()
            again = await join(broker, "slow")
            assert numbers(await take(again, 15)) == [*range(5, 20)]

    asyncio.run(scenario())


def test_old_events_that_no_group_has_read_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shop.db"
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1_000.0)  # like a machine whose clock is not set yet
        asyncio.run(_publish_some(path))
    before = rows(path)
    trim(path, retention_s=0, retention_bytes=1)
    assert rows(path) == before

    async def scenario() -> None:
        async with opened(path, max_backlog_bytes=1_000) as broker:
            with pytest.raises(Backlogged):
                await broker.publish([event(0)])
            first = await join(broker)
            await settle(first, await take(first, 100))
            await broker.publish([event(0)])

    asyncio.run(scenario())
    trim(path, retention_s=3_600)
    assert rows(path) == 1, "old events that a group has finished are removed"


def test_publish_raises_backlogged_until_a_group_catches_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "shop.db", max_backlog_bytes=50_000) as broker:
            subscription = await join(broker)
            sent, error = await publish_until_refused(broker, size=1_000)
            assert isinstance(error, Backlogged)
            assert "max_backlog_bytes=50,000" in str(error)
            assert f"`onward groups drop billing --topic orders --url sqlite:///{tmp_path}/shop.db`" in str(error)
            assert 40 <= sent < 50
            assert [each.value for each in error.refused] == [event(sent, size=1_000).value]
            # Later calls of the same key that were in the queue are refused too.
            answers = await asyncio.gather(
                *(broker.publish([event(n, size=1_000)]) for n in range(5)), return_exceptions=True
            )
            assert all(isinstance(answer, PublishError) for answer in answers)
            await settle(subscription, await take(subscription, sent))
            await broker.publish([event(sent, size=1_000)])
            assert len(await take(subscription, 1)) == 1
            await subscription.close()
            await broker.drop_group("orders", "billing")
            error = (await publish_until_refused(broker, size=1_000))[1]
            assert "no group reads it" in str(error)
            assert "no group reads topic orders" in "".join(each.what for each in await broker.diagnose())

    asyncio.run(scenario())


def test_the_events_that_wait_for_a_blocked_writer_are_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path, max_outgoing_bytes=10_000) as broker:
            await broker.publish([event(0)])
            with open(f"{path}-lock", "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                calls = [asyncio.ensure_future(broker.publish([event(n, f"k{n}", 1_000)])) for n in range(1, 20)]
                done, waiting = await asyncio.wait(calls, timeout=0.5)
                fcntl.flock(file, fcntl.LOCK_UN)
            refused = [call.exception() for call in done]
            assert refused
            assert all(isinstance(error, Backlogged) for error in refused)
            assert all("max_outgoing_bytes=10,000" in str(error) for error in refused)
            await asyncio.gather(*waiting)
            assert len(await take(await join(broker), 1 + len(waiting))) == 1 + len(waiting)

    asyncio.run(scenario())


def test_events_are_refused_and_not_lost_if_the_disk_is_full(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            db: sqlite3.Connection = broker._writer._db  # type: ignore[attr-defined]
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count = {pages + 20}")
            accepted, error = await publish_until_refused(broker, size=10_000)
            assert "disk is full" in str(error)
            assert not error.unknown
            db.execute("PRAGMA max_page_count = 1000000")
            await broker.publish(error.refused)
            assert numbers(await take(await join(broker), accepted + 1)) == [*range(accepted + 1)]

    asyncio.run(scenario())


# Other processes


def test_a_stopped_process_that_holds_the_lock_is_named_and_no_event_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"

    async def scenario(stopped: subprocess.Popen[str]) -> None:
        async with opened(path, publish_timeout_s=3.0) as broker:
            seen = lock_holder(path)
            assert seen is not None
            assert seen.pid == stopped.pid
            started = time.monotonic()
            calls = [broker.publish([event(n)]) for n in range(3)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert 2.5 < time.monotonic() - started < 30
            for answer in answers:
                assert isinstance(answer, PublishError)
                assert f"process {stopped.pid}" in str(answer)
                assert len(answer.refused) == 1
            assert lock_holder(path) == seen, "the same process still holds the lock"
            stopped.kill()
            stopped.wait()
            for n in range(3):
                await broker.publish([event(n)])
            found = [each.event.value for each in await _drain(broker) if each.event.key == "k"]
            assert found == [b"0", b"1", b"2"], "refused events are not stored, retried ones are stored once"

    with stopped_with_the_lock(path) as stopped:
        asyncio.run(scenario(stopped))


@contextmanager
def stopped_with_the_lock(path: Path) -> Any:
    """A publisher that is stopped while it holds the lock."""
    process = publisher(path, "flood", 1_000_000)
    with process:
        output(process).readline()
        end = time.monotonic() + 20
        while True:
            assert time.monotonic() < end
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            if lock_holder(path) is not None:
                break
            process.send_signal(signal.SIGCONT)
            time.sleep(0.001)
        try:
            yield process
        finally:
            process.kill()


async def _drain(broker: Broker) -> list[Delivery]:
    subscription = await join(broker)
    found: list[Delivery] = []
    while True:
        messages = await subscription.receive(1_000, 1 << 24, 0.3)
        found += [message for message in messages if isinstance(message, Delivery)]
        if not messages:
            return found


def test_two_publishing_processes_keep_the_order_of_each_key(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"

    async def scenario() -> None:
        async with opened(path) as broker:
            found = await take(await join(broker), 10_000)
            by_key: dict[str | None, list[int]] = {}
            for each in found:
                by_key.setdefault(each.event.key, []).append(int(each.event.value or b""))
            assert len(by_key) == 20
            assert all(found == [*range(500)] for found in by_key.values())

    processes = [publisher(path, name, 500) for name in ("a", "b")]
    for process in processes:
        with process:
            output(process).read()
    asyncio.run(scenario())


def test_a_killed_publisher_loses_no_accepted_event(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    process = publisher(path, "a", 1_000_000)
    with process:
        for _ in range(50):
            output(process).readline()
        process.kill()
        process.wait()
        returned = 50 + len(output(process).read().split())

    async def scenario() -> None:
        async with opened(path) as broker:
            found = await take(await join(broker), returned * 10)
            for key in range(10):
                of_key = [each for each in found if each.event.key == f"a-{key}"]
                assert numbers(of_key)[:returned] == [*range(returned)]

    asyncio.run(scenario())


@pytest.fixture
def only_the_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members do not look for events by themselves, so a lost ring would stop them."""
    monkeypatch.setattr("onward.brokers.sqlite.subscription._LOOK_S", 60.0)


def test_a_publish_of_another_process_wakes_a_waiting_reader(tmp_path: Path, only_the_bell: None) -> None:
    path = tmp_path / "shop.db"
    ticker = (
        PUBLISHER.replace("print(n, flush=True)", "print(n, flush=True); await asyncio.sleep(0.02)")
        .replace('b"%d" % n', "str(time.time()).encode()")
        .replace("import asyncio", "import time, asyncio")
    )

    async def scenario() -> None:
        async with opened(path) as broker:
            subscription = await join(broker)
            arguments = [sys.executable, "-c", ticker, str(path), "a", "30"]
            with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:  # noqa: ASYNC220
                delays: list[float] = []
                while len(delays) < 300:
                    messages = await subscription.receive(1_000, 1 << 24, 60.0)
                    arrived = time.time()
                    delays += [
                        arrived - float(each.event.value or 0) for each in messages if isinstance(each, Delivery)
                    ]
                process.wait()
            delays.sort()
            assert delays[len(delays) // 2] < 5.0, delays[len(delays) // 2]

    asyncio.run(scenario())


def test_a_reader_is_also_woken_without_inotify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_the_bell: None
) -> None:
    monkeypatch.setattr("onward.brokers.sqlite.doorbell._inotify", lambda: None)

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker, opened(path) as other:
            subscription = await join(broker)
            await subscription.receive(10, 1, 1.0)
            for n in range(5):
                publishing = asyncio.create_task(delayed(other, n))
                assert numbers(await take(subscription, 1, wait_s=60.0)) == [n]
                await publishing

    async def delayed(other: Broker, n: int) -> None:
        await asyncio.sleep(0.05)
        await other.publish([event(n)])

    asyncio.run(scenario())


def test_the_error_blames_another_program_that_holds_a_transaction(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path, publish_timeout_s=4.0) as broker:
            await broker.publish([event(0)])
            with closing(sqlite3.connect(path, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                with pytest.raises(PublishError, match="another program holds a transaction"):
                    await broker.publish([event(1)])
                db.execute("ROLLBACK")
            await broker.publish([event(2)])
            assert [each.event.value for each in await take(await join(broker), 2)] == [b"0", b"2"]

    asyncio.run(scenario())


def test_close_finishes_the_publishes_that_have_begun(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            calls = [asyncio.ensure_future(broker.publish([event(n)])) for n in range(50)]
            await asyncio.sleep(0)
            await broker.close()
            await asyncio.gather(*calls)
            with pytest.raises(BrokerError, match="closed"):
                await broker.publish([event(50)])
        async with opened(path) as broker:
            assert numbers(await take(await join(broker), 50)) == [*range(50)]

    asyncio.run(scenario())


# Ownership


def test_a_lease_is_valid_only_in_its_time_and_boot() -> None:
    lease = Lease(until=110.0, ttl=10.0, boot="a")
    assert lease.counts(100.0, "a")
    assert not lease.counts(110.0, "a")
    assert not lease.counts(100.0, "b")
    assert not Lease(until=5_000.0, ttl=10.0, boot="").counts(100.0, ""), "from before a reboot, where boots have no id"
    now = clock.now()
    assert all(Lease(now + ttl, ttl, "a").counts(now, "a") for ttl in (0.1, 1 / 3, 10.0)), "rounding does not matter"


def test_a_partition_that_was_never_announced_is_given_back_clean(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "shop.db") as broker:
            await (await join(broker)).close()  # it owned the partitions, but never received Assigned
            messages = await (await join(broker)).receive(10, 1 << 20, 1.0)
            assigned = [each for each in messages if isinstance(each, Assigned)]
            assert {each.partition for each in assigned} == {Partition("orders", n) for n in range(4)}
            assert not any(each.unclean for each in assigned)
            assert {each.fence for each in assigned} == {2}

    asyncio.run(scenario())


def test_other_members_take_the_partitions_of_a_member_that_is_about_to_leave(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "shop.db") as broker:
            leaver = await join(broker)
            held = [each.partition for each in await leaver.receive(10, 1, 1.0) if isinstance(each, Assigned)]
            stayer = await join(broker)
            await leaver.release(held, drained=True)
            found = 0
            async with asyncio.timeout(40):
                while found < 4:
                    messages = await stayer.receive(10, 1, 0.2)
                    found += sum(isinstance(each, Assigned) for each in messages)
                    assert not any(isinstance(each, Assigned) for each in await leaver.receive(10, 1, 0.0))

    asyncio.run(scenario())


@pytest.mark.parametrize("locked", [False, True])
def test_a_cancelled_join_leaves_no_member_and_no_owner(tmp_path: Path, locked: bool) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            await broker.publish([event(0)])
            with closing(sqlite3.connect(path, isolation_level=None)) as db:
                for delay_s in [0.3] if locked else [0.0, 0.001, 0.002, 0.003, 0.005, 0.01]:
                    if locked:
                        db.execute("BEGIN IMMEDIATE")
                    joining = asyncio.ensure_future(join(broker))
                    await asyncio.sleep(delay_s)
                    joining.cancel()
                    await asyncio.wait([joining])
                    if not joining.cancelled():
                        await joining.result().close()
                if locked:
                    db.execute("ROLLBACK")
        with closing(sqlite3.connect(path)) as db:
            assert not db.execute("SELECT * FROM onward_group WHERE owner IS NOT NULL OR NOT clean").fetchall()
            assert not db.execute("SELECT * FROM onward_member").fetchall()

    asyncio.run(scenario())


def test_a_suspended_member_does_not_create_its_dropped_group_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path, lease_s=0.3, max_poll_gap_s=0.2) as broker, opened(path) as other:
            await broker.publish([event(n) for n in range(5)])
            sleeper = await join(broker, start="latest")
            owned = [each.partition for each in await sleeper.receive(10, 1 << 20, 1.0) if isinstance(each, Assigned)]
            async with asyncio.timeout(40):
                while await other.groups("orders"):  # again and again: on a slow machine the owner may renew its lease
                    with contextlib.suppress(BrokerError):
                        await other.drop_group("orders", "billing")
            fenced: Sequence[Any] = ()
            while not fenced:
                fenced = await sleeper.receive(10, 1 << 20, 1.0)
            assert set(fenced[0].partitions) == set(owned)
            with pytest.raises(GroupDropped, match=r"group billing of topic orders.* was dropped"):
                await sleeper.receive(10, 1 << 20, 10.0)
            assert await sleeper.settle([Progress(owned[0], 1, 1)]) == [owned[0]]
            assert not await other.groups("orders")
            await sleeper.close()
            assert not await other.groups("orders")
            assert numbers(await take(await join(broker), 5)) == [*range(5)], "a new join creates it, at its own start"

    asyncio.run(scenario())


def test_close_does_not_wait_for_a_program_that_holds_a_transaction(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        broker = open_broker(f"sqlite:///{path}", Settings(publish_timeout_s=30.0))
        await broker.publish([event(0)])
        await take(await join(broker), 1)
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            started = time.monotonic()
            await broker.close()
            assert time.monotonic() - started < 20
            db.execute("ROLLBACK")

    asyncio.run(scenario())


def test_a_process_without_a_partition_count_uses_the_stored_one(tmp_path: Path) -> None:
    async def main() -> None:
        url = f"sqlite:///{tmp_path}/events.db"
        first = open_broker(url, Settings(partitions=3))
        await first.publish([Event(new_id(), "orders", "k", b"1")])
        await first.close()
        second = open_broker(url, Settings())
        await second.publish([Event(new_id(), "orders", "k", b"2")])
        member = await second.subscribe(["orders"], group="g", member="m", ordering="key", start="earliest")
        seen: list[bytes | None] = []
        while len(seen) < 2:
            seen += [m.event.value for m in await member.receive(10, 1 << 20, 1.0) if isinstance(m, Delivery)]
        assert seen == [b"1", b"2"]
        await second.close()

    asyncio.run(main())


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Otherwise the forked workers of a pool would hold the lock of their killed parent forever."""
    script = f"""
import asyncio, os, sys, time
from onward.brokers.sqlite import open_broker
from onward.brokers.sqlite.gate import Gate, lock_path
from pathlib import Path
gate = Gate(lock_path(Path({str(tmp_path / "events.db")!r})))
with gate.held():
    if os.fork() == 0:
        print("forked", flush=True)  # the child prints this, after it has closed its copy of the lock
    time.sleep(30)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "forked\n"
        database = tmp_path / "events.db"
        assert lock_holder(database) is not None
        program.kill()
        program.wait()
        try:
            assert lock_holder(database) is None, "the orphaned child still holds the lock"
        finally:
            os.killpg(program.pid, signal.SIGKILL)


@pytest.mark.parametrize("place", ["/proc/x.db", "/proc/version", "folder", "blocked.db", "x" * 300, "nul\0.db"])
def test_the_error_for_an_impossible_path_names_the_path_and_the_cure(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "blocked.db-lock").mkdir()
    with pytest.raises(BadStore, match=r"; (name|create|change|put)") as caught:
        open_broker(f"sqlite:///{tmp_path / place}", Settings())
    assert place.rpartition("/")[2].partition("\0")[0] in str(caught.value)


async def fences(broker: Broker, start: Any = "earliest") -> dict[Partition, int | None]:
    """The fences of a member that joins, owns all partitions, and leaves."""
    subscription, found = await join(broker, start=start), dict[Partition, int | None]()
    async with asyncio.timeout(40):
        while len(found) < 4:
            messages = await subscription.receive(100, 1 << 20, 1.0)
            found |= {each.partition: each.fence for each in messages if isinstance(each, Assigned)}
    await subscription.close()
    return found


def test_fences_continue_to_grow_after_their_group_was_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "shop.db", lease_s=5.0) as broker:
            await broker.publish([event(1)])
            before = await fences(broker)
            for start in ("earliest", "latest", "earliest"):
                await broker.drop_group("orders", "billing")
                assert not await broker.groups("orders")
                after = await fences(broker, start)
                assert all((after[each] or 0) > (before[each] or 0) for each in before)
                before = after

    asyncio.run(scenario())


def test_the_rows_of_a_temporary_group_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.brokers.sqlite.retention._INTERVAL_S", 0.1)
    tables = ("onward_group", "onward_member", "onward_roster", "onward_fence", "onward_aside", "onward_moved")

    def left(db: sqlite3.Connection) -> list[str]:
        """The tables with rows of a temporary group."""
        named = f"grp LIKE '{PASSING}%'"
        return [table for table in tables if db.execute(f"SELECT 1 FROM {table} WHERE {named}").fetchone()]

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path, lease_s=0.5, max_poll_gap_s=60.0) as broker:
            await broker.publish([event(n) for n in range(5)])
            gone = await join(broker, f"{PASSING}gone")
            stays = await join(broker, f"{PASSING}stays")
            kept = await join(broker)
            await gone.close()  # as after a kill: the group was not dropped
            with closing(sqlite3.connect(path)) as db:
                async with asyncio.timeout(20):
                    while len(await broker.groups("orders")) > 2:
                        await stays.receive(0, 0, 0.05)
                await kept.close()
                assert [info.group for info in await broker.groups("orders")] == ["billing", f"{PASSING}stays"]
                await stays.close()
                async with asyncio.timeout(20):
                    while left(db):
                        await asyncio.to_thread(time.sleep, 0.02)
            assert [info.group for info in await broker.groups("orders")] == ["billing"]

    asyncio.run(scenario())
