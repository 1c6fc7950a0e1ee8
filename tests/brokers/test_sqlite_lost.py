"""A SQLite file that is deleted, replaced or overwritten while in use: Onward notices it and accepts no more events."""

import asyncio
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from onward import Onward
from onward.brokers.base import PASSING, Broker, Fenced, Progress, Subscription
from onward.brokers.sqlite import open_broker
from onward.errors import BadStore, BrokerError, PublishError, StoreLost
from onward.event import Delivery, Event, new_id
from onward.settings import Settings

CURE = "stop all processes that use it, put the right file in place, .* and start again"


def event(n: int, topic: str = "orders") -> Event:
    return Event(new_id(), topic, f"k{n}", str(n).encode())


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[Broker]:
    broker = open_broker(f"sqlite:///{path}", Settings(**{"partitions": 2} | options))
    try:
        yield broker
    finally:
        await broker.close()


async def join(broker: Broker, group: str = "billing", topic: str = "orders") -> Subscription:
    return await broker.subscribe([topic], group=group, member="m", ordering="key", start="earliest")


async def publish_some(path: Path, numbers: range) -> None:
    async with opened(path) as broker:
        for n in numbers:
            await broker.publish([event(n)])


async def take(subscription: Subscription, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(40):
        while len(found) < count:
            found += [each for each in await subscription.receive(100, 1 << 20, 1.0) if isinstance(each, Delivery)]
    return found


def back_up(path: Path, copy: Path) -> None:
    with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(copy)) as to:
        db.backup(to)


def vacuum_into(path: Path, copy: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("VACUUM INTO ?", (str(copy),))


def checkpoint(path: Path) -> str:
    """Write the log into the file, as far as readers allow it. SQLite does this by itself now and then."""
    with closing(sqlite3.connect(path)) as db:
        _, log, done = db.execute("PRAGMA wal_checkpoint").fetchone()
        return "complete" if log == done else "partial"


# What people do to a file. Each function gets the file, an older backup of it, and another database of Onward.


def delete(path: Path, backup: Path, other: Path) -> None:
    path.unlink()


def delete_all(path: Path, backup: Path, other: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-lock"):
        Path(f"{path}{suffix}").unlink()


def delete_the_log(path: Path, backup: Path, other: Path) -> None:
    Path(f"{path}-wal").unlink()
    Path(f"{path}-shm").unlink()


def move_another_over_it(path: Path, backup: Path, other: Path) -> None:
    other.rename(path)


def move_the_backup_over_it(path: Path, backup: Path, other: Path) -> None:
    backup.rename(path)


def copy_another_over_it(path: Path, backup: Path, other: Path) -> None:
    shutil.copyfile(other, path)


def copy_the_backup_over_it(path: Path, backup: Path, other: Path) -> None:
    shutil.copyfile(backup, path)


def copy_the_backup_and_its_times(path: Path, backup: Path, other: Path) -> None:
    shutil.copy2(backup, path)


def copy_the_backup_and_delete_the_log(path: Path, backup: Path, other: Path) -> None:
    shutil.copyfile(backup, path)
    delete_the_log(path, backup, other)


def copy_a_page_wise_copy_over_it(path: Path, backup: Path, other: Path) -> None:
    """The file without its log, as `cp` made it some checkpoints ago."""
    shutil.copyfile(backup.with_name("copied.db"), path)


def copy_a_text_over_it(path: Path, backup: Path, other: Path) -> None:
    path.write_text("Dear diary\n" * 1000)


def empty_it(path: Path, backup: Path, other: Path) -> None:
    os.truncate(path, 0)


def restore_into_it(path: Path, backup: Path, other: Path) -> None:
    """Like sqlite3's .restore: SQLite itself writes the older state."""
    back_up(backup, path)


ACCIDENTS = [
    (delete, r"shop\.db was deleted"),
    (delete_all, r"shop\.db was deleted"),
    (delete_the_log, r"shop\.db-wal was deleted"),
    (move_another_over_it, r"shop\.db was replaced by another file"),
    (move_the_backup_over_it, r"shop\.db was replaced by another file"),
    (copy_another_over_it, r"shop\.db was overwritten with another database"),
    (copy_the_backup_over_it, r"shop\.db was overwritten with an older copy"),
    (copy_the_backup_and_its_times, r"shop\.db was overwritten with an older copy"),
    (copy_the_backup_and_delete_the_log, r"shop\.db(-wal was deleted| was overwritten with an older copy)"),
    (copy_a_page_wise_copy_over_it, r"shop\.db was overwritten with an older copy"),
    (copy_a_text_over_it, r"shop\.db was overwritten with something else"),
    (empty_it, r"shop\.db was overwritten with another database"),
]


async def prepared(path: Path, accident: Callable[[Path, Path, Path], None]) -> Callable[[], None]:
    """Create a file with ten events, and backups that were made after a checkpoint. Returns a function that causes the
    accident."""
    backup, other = path.with_name("backup.db"), path.with_name("other.db")
    await publish_some(path, range(5))
    back_up(path, backup)
    shutil.copyfile(path, path.with_name("copied.db"))
    await publish_some(other, range(8))
    await publish_some(path, range(5, 10))
    return lambda: accident(path, backup, other)


@pytest.mark.parametrize(("accident", "says"), ACCIDENTS)
def test_a_publish_is_refused_and_the_error_names_the_cause(tmp_path: Path, accident: Any, says: str) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        cause = await prepared(path, accident)
        async with opened(path) as broker:
            await broker.publish([event(10)])
            cause()
            if "-wal" in says:  # it is checked every 0.1 s
                await asyncio.sleep(0.15)
            for n in (11, 12):
                late = event(n)
                with pytest.raises(PublishError, match=f"{says}.*{CURE}") as caught:
                    await broker.publish([late])
                assert caught.value.refused == (late,)

    asyncio.run(scenario())


@pytest.mark.parametrize(("accident", "says"), ACCIDENTS)
def test_a_member_that_only_reads_notices_the_accident(tmp_path: Path, accident: Any, says: str) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        cause = await prepared(path, accident)
        async with opened(path, lease_s=600.0) as broker:
            member = await join(broker)
            held = {each.partition for each in await take(member, 10)}
            cause()
            (fenced,) = await member.receive(100, 1 << 20, 30.0)
            assert isinstance(fenced, Fenced)
            assert set(fenced.partitions) == held
            with pytest.raises(StoreLost, match=says):
                await member.receive(100, 1 << 20, 30.0)
            (trouble,) = member.troubles()
            assert str(path) in trouble
            async with asyncio.timeout(5):
                await member.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("make", [back_up, vacuum_into])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backup_made_while_the_process_runs_is_noticed_too(tmp_path: Path, checkpointed: bool, make: Any) -> None:
    """The open files and the pages in memory would hide the older copy until the next start."""

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            await broker.publish([event(1)])
            make(path, tmp_path / "backup.db")
            await broker.publish([event(2)])
            if checkpointed:
                assert checkpoint(path) == "complete"
                await broker.publish([event(3)])
            shutil.copyfile(tmp_path / "backup.db", path)
            with pytest.raises(PublishError, match=f"{path} was overwritten with an older copy of itself"):
                await broker.publish([event(4)])

    asyncio.run(scenario())


def test_a_restore_into_the_open_file_is_noticed_by_a_lease_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        cause = await prepared(path, restore_into_it)
        async with opened(path, lease_s=0.3, takeover_grace_s=0.0) as broker:
            member = await join(broker)
            await take(member, 10)
            cause()
            assert isinstance((await member.receive(100, 1 << 20, 40.0))[0], Fenced)
            with pytest.raises(StoreLost, match="overwritten with an older copy"):
                await member.receive(100, 1 << 20, 40.0)
            with pytest.raises(PublishError, match="overwritten with an older copy"):
                await broker.publish([event(11)])

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", [False, True])
def test_a_restore_into_the_open_file_is_noticed_by_the_next_publish(tmp_path: Path, turns: bool) -> None:
    """With `turns`, the backup is older than the last lease turn."""

    async def scenario() -> None:
        path, backup = tmp_path / "shop.db", tmp_path / "backup.db"
        async with opened(path, lease_s=0.3 if turns else 600.0, takeover_grace_s=0.0) as broker:
            member = await join(broker)
            for n in range(3):
                await broker.publish([event(n)])
            await take(member, 3)
            back_up(path, backup)
            await broker.publish([event(3)])
            await take(member, 1)
            if turns:
                await member.receive(0, 1, 1.0)
            back_up(backup, path)
            with pytest.raises(PublishError, match="overwritten with an older copy"):
                await broker.publish([event(4)])
            with pytest.raises(PublishError, match="overwritten with an older copy"):
                await broker.publish([event(5)])

    asyncio.run(scenario())


def test_a_restore_into_the_open_file_is_noticed_by_a_member_that_has_read_the_lost_events(tmp_path: Path) -> None:
    """The processes that published the lost events have ended, but a member has read these events."""

    async def scenario() -> None:
        path, backup = tmp_path / "shop.db", tmp_path / "backup.db"
        await publish_some(path, range(1))
        async with opened(path, lease_s=600.0) as broker:
            member = await join(broker)
            await take(member, 1)
            back_up(path, backup)
            await publish_some(path, range(1, 10))
            await take(member, 9)
            back_up(backup, path)
            await publish_some(path, range(10, 11))
            assert isinstance((await member.receive(100, 1 << 20, 40.0))[0], Fenced)
            with pytest.raises(StoreLost, match="overwritten with an older copy"):
                await member.receive(100, 1 << 20, 40.0)

    asyncio.run(scenario())


def test_a_settle_is_refused_after_the_file_was_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        cause = await prepared(path, delete)
        async with opened(path, lease_s=600.0) as broker:
            member = await join(broker)
            done = (await take(member, 10))[-1]
            cause()
            with pytest.raises(StoreLost, match="was deleted"):
                await member.settle([Progress(done.partition, done.epoch, done.position + 1)])
            assert isinstance((await member.receive(0, 1, 30.0))[0], Fenced)
            assert member.troubles()

    asyncio.run(scenario())


def test_an_application_is_not_ready_and_handles_no_more_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "shop.db"
    app = Onward(f"sqlite:///{path}", partitions=1, drain_timeout_s=5.0)
    handled: list[int] = []
    going, lost = asyncio.Event(), asyncio.Event()

    @app.handler("orders", concurrency=1)
    async def bill(order: int) -> None:
        handled.append(order)
        going.set()
        await lost.wait()

    async def scenario() -> None:
        async with app:
            for n in range(50):
                await app.publish("orders", n, key="k")
        async with app.running():
            await going.wait()
            path.unlink()
            async with asyncio.timeout(40):
                while not any("was deleted" in trouble for trouble in app.health().troubles):
                    await asyncio.to_thread(time.sleep, 0.02)
            assert not app.health().ready
            lost.set()  # now a queued event could start
            for n in range(50):  # each publish takes some turns of the event loop
                with pytest.raises(BrokerError, match="was deleted"):
                    await app.publish("orders", n, key="k")
        assert handled == [0]
        lines = [each.getMessage() for each in caplog.records]
        assert len([line for line in lines if re.match(rf"\S+bill: {path} was deleted or moved", line)]) == 1
        assert not [line for line in lines if "another member" in line or "trying again" in line], "both are wrong here"

    asyncio.run(scenario())


def test_the_error_of_a_new_process_says_that_the_log_may_have_been_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, written = tmp_path / "shop.db", tmp_path / "shop.db-wal"
        async with opened(path) as broker:
            await broker.publish([event(n) for n in range(50)])
            written.unlink()
            command = [sys.executable, "-c", PUBLISHER, str(path)]
            ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            assert re.search(f"{path}: SQLite failed .*{path}-wal or -shm may have been deleted", ended.stderr), ended

    asyncio.run(scenario())


def test_a_deleted_file_is_not_created_again_by_a_process_that_used_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            await broker.publish([event(1)])
            path.unlink()
            with pytest.raises(StoreLost, match="was deleted"):
                await broker.topics()
            with pytest.raises(BrokerError):
                await broker.diagnose()
            assert not path.exists()

    asyncio.run(scenario())


def test_a_new_process_creates_no_new_file_while_others_use_the_deleted_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, elsewhere = tmp_path / "shop.db", tmp_path / "elsewhere.db"
        async with opened(path) as broker:
            await broker.publish([event(1)])
            path.rename(elsewhere)
            with pytest.raises(
                BadStore, match=f"{path} is missing, but its log {path}-wal exists.*put the file back.*rm"
            ):
                open_broker(f"sqlite:///{path}", Settings())
            assert not path.exists()
            elsewhere.rename(path)
            async with opened(path) as other:
                await other.publish([event(2)])

    asyncio.run(scenario())


def test_normal_work_of_sqlite_and_other_programs_is_not_taken_for_a_loss(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path, lease_s=0.3, takeover_grace_s=0.0) as broker, opened(path) as other:
            member = await join(broker)
            for n, statement in enumerate(
                [
                    "PRAGMA wal_checkpoint(TRUNCATE)",
                    "CREATE TABLE mine (x)",
                    "VACUUM",
                    "PRAGMA wal_checkpoint(TRUNCATE)",
                    "DROP TABLE mine",
                    "PRAGMA wal_checkpoint(RESTART)",
                ]
            ):
                await broker.publish([event(n), event(n, "passing")])
                with closing(sqlite3.connect(path, timeout=20, isolation_level=None)) as db:
                    db.execute(statement)
                passing = await join(other, f"{PASSING}tail", "passing")
                await passing.close()
                await other.drop_group("passing", f"{PASSING}tail")
                await other.drop_topic("passing")
                assert len(await take(member, 1)) == 1
            os.link(path, tmp_path / "hard-link.db")
            path.chmod(0o640)
            await other.publish([event(99)])
            assert len(await take(member, 1)) == 1
            assert not member.troubles()

    asyncio.run(scenario())


def test_a_checkpoint_that_stopped_halfway_is_not_taken_for_a_loss(tmp_path: Path) -> None:
    """While a reader is active, a checkpoint copies only a part of the log, so the file mixes pages of two moments."""

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            for n in range(5):
                grown = await grow(broker, path)
                with closing(sqlite3.connect(path, isolation_level=None)) as reader:
                    reader.execute("BEGIN")
                    reader.execute("SELECT count(*) FROM onward_log").fetchone()
                    await broker.publish([event(n)])
                    assert checkpoint(path) == "partial"
                    assert path.stat().st_size < grown, "the last page is still only in the log"
                    await broker.publish([event(n)])
                    assert len(await broker.topics()) == 1

    async def grow(broker: Broker, path: Path) -> int:
        """Publish until the newest record batch has its own page at the end of the file. Returns the new size."""
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            (before,) = (after,) = db.execute("PRAGMA page_count").fetchone()
            while after == before:
                await broker.publish([Event(new_id(), "orders", "k", bytes(500))])
                (after,) = db.execute("PRAGMA page_count").fetchone()
            return int(after) * int(db.execute("PRAGMA page_size").fetchone()[0])

    asyncio.run(scenario())


def test_reading_the_file_does_not_drop_its_locks_or_leak_descriptors(tmp_path: Path) -> None:
    def held() -> list[str]:
        mine = [line.split(None, 1)[1] for line in Path("/proc/locks").read_text().splitlines()]
        return sorted(line for line in mine if f" {os.getpid()} " in line and line.startswith("POSIX"))

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            for n in range(3):
                await broker.publish([event(n)])
            checkpoint(path)
            await broker.publish([event(3)])
            before, descriptors = held(), len(os.listdir("/proc/self/fd"))
            assert before
            for n in range(20):
                os.utime(path)  # as after a checkpoint, so that the next commit reads the file
                await broker.publish([event(n)])
            assert held() == before
            assert len(os.listdir("/proc/self/fd")) == descriptors

    if not Path("/proc/locks").exists():
        pytest.skip("needs Linux")
    asyncio.run(scenario())


PUBLISHER = """
import sys
from onward import Onward
Onward(f"sqlite:///{sys.argv[1]}", partitions=2).publish_sync("orders", 1)
"""

# A checkpoint like SQLite's, which writes the pages in their order. This one is killed after some of them.
KILLED_CHECKPOINT = """
import struct, sys
path, share = sys.argv[1], float(sys.argv[2])
log = open(path + "-wal", "rb").read()
size = struct.unpack(">I", log[8:12])[0]
salts, pages, waiting = log[16:24], {}, {}
for at in range(32, len(log) - size - 23, size + 24):
    number, commits = struct.unpack(">II", log[at : at + 8])
    if log[at + 8 : at + 16] != salts:
        break
    waiting[number] = log[at + 24 : at + 24 + size]
    if commits:
        pages.update(waiting)
        waiting.clear()
with open(path, "r+b") as file:
    for number in sorted(pages)[: int(share * len(pages))]:
        file.seek((number - 1) * size)
        file.write(pages[number])
print(len(pages))
"""


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
def test_a_killed_checkpoint_is_not_taken_for_a_loss(tmp_path: Path, share: float) -> None:
    """Until the next checkpoint the file alone is damaged, but together with its log it is intact."""

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        await publish_some(path, range(3))
        async with opened(path, lease_s=600.0) as broker:
            member = await join(broker)
            await take(member, 3)
            for topic in range(40):
                await broker.publish([event(n, f"topic-{topic:03}-{'x' * 150}") for n in range(20)])
            kill = [sys.executable, "-c", KILLED_CHECKPOINT, str(path), str(share)]
            pages = await asyncio.to_thread(subprocess.check_output, kill)
            assert int(pages) > 50
            await broker.publish([event(3)])
            await take(member, 1)
            checkpoint(path)
            await broker.publish([event(4)])
            await take(member, 1)

    asyncio.run(scenario())


PAGE = Path(__file__).parents[2] / "docs" / "sqlite.md"
BACKUPS, RESTORE = re.findall(
    r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8").partition("## Backup")[2], re.M | re.S
)


def run(commands: str, folder: Path) -> None:
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(commands, shell=True, check=True, cwd=folder, env=os.environ | {"PATH": search})


@pytest.mark.parametrize("command", BACKUPS.splitlines()[1:])
def test_the_backup_and_restore_commands_of_the_docs_work(tmp_path: Path, command: str) -> None:
    if shutil.which(command.split()[0]) is None and not command.startswith("python"):
        pytest.skip(f"{command.split()[0]} is not installed")

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            for n in range(5):
                await broker.publish([event(n)])
            run(f"{BACKUPS.splitlines()[0]}\n{command}", tmp_path)
            assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600
            (tmp_path / "copy.db").chmod(0o644)  # like a backup that was made without the umask
            await broker.publish([event(5)])
        path.unlink()  # a restore must also work if the file is missing
        run(RESTORE, tmp_path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with opened(path) as broker:
            await broker.publish([event(6)])
            found = await take(await join(broker), 6)
            assert sorted(each.event.value or b"" for each in found) == [b"0", b"1", b"2", b"3", b"4", b"6"]

    asyncio.run(scenario())
