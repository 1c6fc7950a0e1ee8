"""The lock file of the SQLite broker: its mode, the process that is named as its holder, and what a deletion does."""

import asyncio
import fcntl
import os
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from onward import Onward, clock
from onward.brokers.base import Broker, Finding
from onward.brokers.sqlite import lock_holder, open_broker
from onward.brokers.sqlite.lock_holders import flock_pid, line
from onward.errors import BrokerError, PublishError
from onward.event import Event, new_id
from onward.settings import Settings

linux = pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux's list of locks")

FOREIGN = """
import fcntl, sys
file = open(sys.argv[1], "rb")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
OURS = """
import sys
from pathlib import Path
from onward.brokers.sqlite.gate import Gate
with Gate(Path(sys.argv[1])).held():
    print("locked", flush=True)
    sys.stdin.read()
"""


def event() -> Event:
    return Event(new_id(), "orders", "k", b"1")


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[Broker]:
    broker = open_broker(f"sqlite:///{path}", Settings(**options))
    try:
        yield broker
    finally:
        await broker.close()


@contextmanager
def locked(path: Path, program: str = FOREIGN) -> Iterator[int]:
    """Another process holds the lock. Yields its process id."""
    arguments = [sys.executable, "-c", program, f"{path}-lock"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process.pid
        finally:
            process.kill()


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(path: Path) -> set[int]:
    return {stat.S_IMODE(Path(f"{path}{suffix}").stat().st_mode) for suffix in ("", "-wal", "-shm", "-lock")}


def written(path: Path) -> str:
    """The content of the lock file."""
    return Path(f"{path}-lock").read_text()


async def refusal(path: Path) -> str:
    """The error of a publish that has waited too long."""
    async with opened(path, publish_timeout_s=0.3) as broker:
        with pytest.raises(PublishError) as caught:
            await broker.publish([event()])
        return str(caught.value)


@pytest.mark.parametrize(("options", "mode"), [({}, 0o600), ({"file_mode": "umask"}, 0o664)])
def test_files_are_private_unless_file_mode_is_umask(tmp_path: Path, options: dict[str, str], mode: int) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path, **options) as broker:
            await broker.publish([event()])
            assert modes(path) == {mode}

    with umask(0o002):
        asyncio.run(scenario())


@pytest.mark.parametrize(("options", "mode"), [({}, 0o600), ({"file_mode": "umask"}, 0o666)])
def test_an_existing_lock_that_all_users_can_read_is_made_private(
    tmp_path: Path, options: dict[str, str], mode: int
) -> None:
    async def scenario() -> None:
        lock = tmp_path / "shop.db-lock"
        lock.touch()
        lock.chmod(0o666)
        async with opened(tmp_path / "shop.db", **options):
            assert stat.S_IMODE(lock.stat().st_mode) == mode

    asyncio.run(scenario())


@linux
def test_a_foreign_program_that_holds_the_lock_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path):
            with locked(path) as pid:
                why = await refusal(path)
                assert f"{path}-lock is held by process {pid} (python" in why
                assert "does not belong to Onward" in why
                assert "disk" not in why

    asyncio.run(scenario())


@linux
def test_the_line_of_a_killed_process_is_not_believed(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path):
            with locked(path, OURS) as killed:
                pass
            assert written(path).startswith(f"{killed} "), "it left its line behind"
            with locked(path) as pid:
                why = await refusal(path)
                assert f"held by process {pid} (" in why
                assert str(killed) not in why.replace(str(path), "")
                assert lock_holder(path) is None, "a supervisor must not take it for its own worker"

    asyncio.run(scenario())


def test_a_process_of_ours_that_holds_the_lock_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path):
            with locked(path, OURS) as pid:
                why = await refusal(path)
                assert f"{path}-lock is held by process {pid} (-c), which has held it for" in why
                assert "continue or end that process" in why

    asyncio.run(scenario())


@linux
def test_a_checkup_names_a_foreign_program_that_holds_the_lock(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as broker:
            with locked(path) as pid:
                (found,) = [finding for finding in await broker.diagnose() if finding.level == "error"]
            assert f"process {pid} (" in found.what

    asyncio.run(scenario())


@linux
def test_an_application_whose_leases_cannot_be_renewed_names_the_holder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "shop.db"
    app = Onward(f"sqlite:///{path}", partitions=1, lease_s=1.5, takeover_grace_s=0.0, drain_timeout_s=1.0)

    @app.handler("orders")
    async def bill(order: int) -> None: ...

    async def scenario() -> None:
        async with app.running():
            await app.publish("orders", 1, key="k")
            await until(lambda: sum(each.done for each in app.readings()) == 1)
            assert app.health().ready
            with locked(path) as pid:
                held = f"leases cannot be renewed: the lock {path}-lock is held by process {pid} (python"
                await until(lambda: any(held in trouble for trouble in app.health().troubles))
                for seconds in (4, 5, 6):
                    await until(lambda n=seconds: f"certain for {n} s" in str(app.health().troubles))  # type: ignore[misc]
                lines = [each.getMessage() for each in caplog.records if "not ready: " in each.getMessage()]
                assert len([line for line in lines if held in line]) == 1
                assert len([line for line in lines if "ownership has been uncertain" in line]) == 1
            await until(lambda: app.health().ready)
            await until(lambda: [each.getMessage() for each in caplog.records].count("ready again") == 1)

    caplog.set_level("INFO", "onward")

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(40):
            while not condition():
                await asyncio.to_thread(time.sleep, 0.05)

    asyncio.run(scenario())


@pytest.mark.parametrize(("options", "warns"), [({}, True), ({"file_mode": "umask"}, False)])
def test_a_checkup_warns_of_files_that_other_users_can_use(
    tmp_path: Path, options: dict[str, str], warns: bool
) -> None:
    path = tmp_path / "shop.db"

    def open_to_others() -> None:
        for suffix in ("", "-wal"):
            Path(f"{path}{suffix}").chmod(0o644)

    async def warnings(broker: Broker) -> list[Finding]:
        return [each for each in await broker.diagnose() if "other users" in each.what]

    async def scenario() -> None:
        async with opened(path, **options) as broker:
            await broker.publish([event()])
            assert not await warnings(broker)
            open_to_others()
            found = await warnings(broker)
        assert [each.level for each in found] == ["warning"] * warns
        assert [each for each in found if f"read or write {path}, {path}-wal;" in each.what] == found
        assert [each for each in found if each.cure.startswith(f"chmod 600 {path} {path}-wal; or, ")] == found

    with umask(0o077):
        asyncio.run(scenario())


def test_a_deleted_lock_is_created_again_and_all_processes_share_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        path, lock = tmp_path / "shop.db", tmp_path / "shop.db-lock"
        async with opened(path, publish_timeout_s=0.5) as one, opened(path, publish_timeout_s=0.5) as two:
            await one.publish([event()])
            await two.publish([event()])
            lock.unlink()
            await asyncio.sleep(0.15)  # it is checked every 0.1 s
            await one.publish([event()])
            await two.publish([event()])
            assert len([each for each in caplog.records if f"{lock} was deleted or replaced" in each.message]) == 2
            with locked(path):
                for broker in (one, two):
                    with pytest.raises(PublishError, match="is held by"):
                        await broker.publish([event()])
            await one.publish([event()])
            await two.publish([event()])

    asyncio.run(scenario())


def test_a_lock_that_cannot_be_opened_again_stops_writers_until_it_can(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, lock = tmp_path / "shop.db", tmp_path / "shop.db-lock"
        async with opened(path) as broker:
            await broker.publish([event()])
            lock.unlink()
            lock.mkdir()
            await asyncio.sleep(0.15)  # it is checked every 0.1 s
            with pytest.raises(BrokerError, match=f"the lock {lock} was deleted or replaced .* cannot be opened"):
                await broker.publish([event()])
            lock.rmdir()
            await broker.publish([event()])

    asyncio.run(scenario())


def test_a_lock_is_found_in_the_list_by_device_and_inode(tmp_path: Path) -> None:
    found = tmp_path.stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    others = (
        f"1: POSIX  ADVISORY  WRITE 7 {place}:{found.st_ino} 0 EOF\n2: FLOCK  ADVISORY  WRITE 8 {place}:99999 0 EOF\n"
    )
    waits = f"3: -> FLOCK  ADVISORY  WRITE 9 {place}:{found.st_ino} 0 EOF\n"
    elsewhere = f"4: FLOCK  ADVISORY  WRITE 10 ff:ff:{found.st_ino} 0 EOF\n"
    ours = f"5: FLOCK  ADVISORY  READ  11 {place}:{found.st_ino} 0 EOF\n"
    assert flock_pid(found, others + waits) is None
    assert flock_pid(found, others + waits + elsewhere + ours) == 11
    assert flock_pid(found, elsewhere) == 10, "some file systems list a different device"


def test_a_line_that_onward_did_not_write_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "shop.db-lock"
    for text in (b"not a line of Onward\n", b"", line(0, clock.now(), "x")):
        path.write_bytes(text)
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert lock_holder(tmp_path / "shop.db") is None
