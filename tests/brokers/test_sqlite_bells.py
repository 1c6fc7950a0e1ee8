"""Which members a commit on SQLite wakes: the owners of the partitions that it wrote to. And no ring is lost."""

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from onward.brokers.base import Assigned, Broker, Progress, Revoked, Subscription
from onward.brokers.core.partitioner import key_hashes
from onward.brokers.sqlite import open_broker
from onward.brokers.sqlite.doorbell import Doorbell
from onward.brokers.sqlite.gate import Gate, lock_path
from onward.event import Delivery, Event, Partition, new_id
from onward.settings import Settings

PARTITIONS = 4
KEYS = {key_hashes[key] % PARTITIONS: key for key in map(str, range(100))}  # one key for each partition
LONG_AGO = (1.0, 1.0)

MEMBER = """
import asyncio, sys
from onward.brokers.sqlite import open_broker
from onward.settings import Settings

async def main(path):
    broker = open_broker(f"sqlite:///{path}", Settings(partitions=4, lease_s=1.0, takeover_grace_s=0.1))
    member = await broker.subscribe(["orders"], group="billing", member="m", ordering="key", start="earliest")
    while True:
        if await member.receive(1_000, 1 << 24, 1.0):
            print("owner", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def only_the_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members do not look for events by themselves, so a lost ring would stop them."""
    monkeypatch.setattr("onward.brokers.sqlite.subscription._LOOK_S", 60.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


@asynccontextmanager
async def opened(path: Path, lease_s: float = 300.0) -> AsyncIterator[Broker]:
    """A broker whose lease is so long that no renewal makes a member look during the test."""
    broker = open_broker(f"sqlite:///{path}", Settings(partitions=PARTITIONS, lease_s=lease_s, takeover_grace_s=0.1))
    try:
        yield broker
    finally:
        await broker.close()


@contextmanager
def member_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A member in another process that owns partitions, until it is killed."""
    with subprocess.Popen([sys.executable, "-c", MEMBER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "owner\n"
            yield process
        finally:
            process.kill()


async def join(broker: Broker, topic: str = "orders") -> Subscription:
    return await broker.subscribe([topic], group="billing", member="m", ordering="key", start="earliest")


def event(index: int, number: int = 0, topic: str = "orders") -> Event:
    return Event(new_id(), topic, KEYS[index], b"%d" % number)


async def assigned(*members: Subscription, count: int) -> None:
    """Receive until each member has this many partitions. Revoked partitions are released."""
    held: dict[Subscription, set[Partition]] = {member: set() for member in members}
    async with asyncio.timeout(40):
        while any(len(mine) != count for mine in held.values()):
            for member, mine in held.items():
                for message in await member.receive(1_000, 1 << 24, 0.05):
                    if isinstance(message, Assigned):
                        mine.add(message.partition)
                    elif isinstance(message, Revoked):
                        await member.release(message.partitions, drained=True)
                        mine.difference_update(message.partitions)


async def keep_receiving(member: Subscription) -> None:
    while True:
        await member.receive(1_000, 1 << 24, 1.0)


async def following(subscription: Subscription) -> Delivery:
    """The next event. It waits in one receive, so that after a lost ring the event would not arrive in time."""
    async with asyncio.timeout(20):
        while True:
            for message in await subscription.receive(1_000, 1 << 24, 60.0):
                if isinstance(message, Delivery):
                    return message


def bells(path: Path) -> set[Path]:
    folder = path.with_name("shop.db-bells")
    return {*folder.iterdir()} if folder.exists() else set()


def bell_of(path: Path, index: int) -> Path:
    """The bell of the partition's owner."""
    query = "SELECT g.owner FROM onward_group g JOIN onward_partition p ON p.id = g.part WHERE p.idx = ?"
    with closing(sqlite3.connect(path)) as db:
        owner = str(db.execute(query, (index,)).fetchone()[0])
    return path.with_name("shop.db-bells") / owner.rpartition(":")[2]


def append_again(path: Path) -> None:
    """Append the only event a second time, without a ring."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "INSERT INTO onward_log (at, count, time, before, data) SELECT at + 1, 1, time, 0, data FROM onward_log"
        )
        db.execute("UPDATE onward_partition SET next = next + 1 WHERE next > 0")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(40):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


# Which members are woken


def rung(files: Iterable[Path]) -> set[Path]:
    """The files that have rung since their times were set to LONG_AGO. A write sets one time of a file, a ring both."""
    return {file for file in files if file.stat().st_atime != LONG_AGO[0]}


def test_a_commit_rings_for_the_owner_and_for_no_other_member(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as one, opened(path) as two, opened(path) as publisher:
            await assigned(await join(one), await join(two), count=2)
            for index in range(PARTITIONS):
                files = {*bells(path), path.with_name("shop.db-lock")}
                for file in files:
                    os.utime(file, LONG_AGO)
                await publisher.publish([event(index)])
                assert rung(files) == {bell_of(path, index)}

    asyncio.run(scenario())


def test_a_settle_rings_for_no_member(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            member = await join(broker)
            await broker.publish([event(0)])
            done = await following(member)
            files = {*bells(path), path.with_name("shop.db-lock")}
            for file in files:
                os.utime(file, LONG_AGO)
            assert not await member.settle([Progress(done.partition, done.epoch, done.position + 1)])
            assert rung(files) == set()

    asyncio.run(scenario())


def test_a_file_rings_for_its_member_and_the_lock_file_for_all(tmp_path: Path) -> None:
    lock, mine, other = (tmp_path / name for name in ("lock", "mine", "other"))
    for file in (lock, mine, other):
        file.touch()
    doorbell = Doorbell(lock)
    try:
        bells = {file: doorbell.bell(file) for file in (mine, other)}
        assert all(doorbell.watch(file) for file in bells)
        before = [bell.listen() for bell in bells.values()]
        os.utime(mine)
        assert [bell.listen() for bell in bells.values()] == [before[0] + 1, before[1]]
        os.utime(lock)
        assert [bell.listen() for bell in bells.values()] == [before[0] + 2, before[1] + 1]
    finally:
        doorbell.close()


# No ring is lost


def test_an_event_published_just_before_a_member_waits_wakes_it(path: Path, only_the_bell: None) -> None:
    async def scenario() -> None:
        async with opened(path) as broker, opened(path) as publisher:
            member = await join(broker)
            await assigned(member, count=PARTITIONS)
            for n in range(600):
                publishing = asyncio.create_task(publisher.publish([event(n % PARTITIONS, n)]))
                begin = time.perf_counter() + n % 100 * 2e-5
                while time.perf_counter() < begin:  # noqa: ASYNC110 - commit before, during and after the member's look
                    await asyncio.sleep(0)
                assert (await following(member)).event.value == b"%d" % n
                await publishing

    asyncio.run(scenario())


def test_an_event_wakes_the_new_owner_after_ownership_has_moved(path: Path, only_the_bell: None) -> None:
    async def scenario() -> None:
        async with opened(path) as one, opened(path) as two, opened(path) as publisher:
            old = await join(one)
            await publisher.publish([event(index) for index in range(PARTITIONS)])
            new = await join(two)
            await assigned(old, new, count=2)
            for member in (old, new):
                while await member.receive(1_000, 1 << 24, 0.0):
                    pass
            for index in range(PARTITIONS):
                receiving = [asyncio.create_task(following(member)) for member in (old, new)]
                await asyncio.sleep(0.05)  # so that both wait
                await publisher.publish([event(index, 1)])
                done, others = await asyncio.wait(receiving, return_when=asyncio.FIRST_COMPLETED)
                assert [task.result().event.value for task in done] == [b"1"]
                await ended(*others)

    asyncio.run(scenario())


def test_every_event_wakes_an_owner_while_ownership_moves(path: Path, only_the_bell: None) -> None:
    async def receive_all(member: Subscription, found: set[int]) -> None:
        while True:
            for message in await member.receive(1_000, 1 << 24, 60.0):
                if isinstance(message, Delivery):
                    found.add(int(message.event.value or b""))
                    await member.settle([Progress(message.partition, message.epoch, message.position + 1)])
                elif isinstance(message, Revoked):
                    await member.release(message.partitions, drained=True)

    async def publish_all(publisher: Broker, sent: list[int]) -> None:
        while True:
            await publisher.publish([event(len(sent) % PARTITIONS, len(sent))])
            sent.append(len(sent))

    async def move(publisher: Broker, sent: list[int], found: set[int]) -> None:
        """Another member takes partitions while events are published. Then wait until every event was received."""
        async with opened(path) as other:
            taken: set[int] = set()
            receiving = asyncio.create_task(receive_all(await join(other), taken))
            publishing = asyncio.create_task(publish_all(publisher, sent))
            await until(lambda: len(taken) > 10)
            await ended(publishing)
            await until(lambda: found | taken >= {*sent})
            await ended(receiving)
            found |= taken

    async def scenario() -> None:
        async with opened(path) as broker, opened(path) as publisher:
            sent: list[int] = []
            found: set[int] = set()
            receiving = asyncio.create_task(receive_all(await join(broker), found))
            for _ in range(10):
                await move(publisher, sent, found)
            await ended(receiving)

    asyncio.run(scenario())


def test_a_member_without_a_bell_is_woken_by_the_lock_file(path: Path, only_the_bell: None) -> None:
    """A member of an older release watches only the lock file."""

    async def scenario() -> None:
        async with opened(path) as broker, opened(path) as publisher:
            member = await join(broker)
            await assigned(member, count=PARTITIONS)
            for bell in bells(path):
                bell.unlink()
            for n in range(5):
                receiving = asyncio.create_task(following(member))
                await asyncio.sleep(0.05)  # so that it waits
                await publisher.publish([event(0, n)])
                assert (await receiving).event.value == b"%d" % n

    asyncio.run(scenario())


def test_a_publisher_that_rings_with_the_lock_file_wakes_a_member(path: Path, only_the_bell: None) -> None:
    """A publisher of an older release does not ring bells."""

    async def scenario() -> None:
        async with opened(path) as broker:
            member = await join(broker)
            await broker.publish([event(0)])
            first = await following(member)
            receiving = asyncio.create_task(following(member))
            await asyncio.sleep(0.05)  # so that it waits
            append_again(path)
            os.utime(path.with_name("shop.db-lock"))
            assert (await receiving).position == first.position + 1

    asyncio.run(scenario())


def test_a_member_finds_an_event_by_itself_after_a_lost_ring(path: Path) -> None:
    """For example if the publisher was killed between its commit and its ring."""

    async def scenario() -> None:
        async with opened(path) as broker:
            member = await join(broker)
            await broker.publish([event(0)])
            first = await following(member)
            append_again(path)
            assert (await following(member)).position == first.position + 1

    asyncio.run(scenario())


# The files


def test_a_member_creates_its_bell_and_removes_it_when_it_leaves(path: Path) -> None:
    async def scenario() -> None:
        async with opened(path) as broker:
            await broker.publish([event(0)])
            assert not bells(path)
            one, two = await join(broker), await join(broker)
            assert [stat.S_IMODE(bell.stat().st_mode) for bell in bells(path)] == [0o600, 0o600]
            assert stat.S_IMODE(path.with_name("shop.db-bells").stat().st_mode) == 0o700
            await one.close()
            assert len(bells(path)) == 1
            await two.close()
            assert not path.with_name("shop.db-bells").exists()

    asyncio.run(scenario())


def test_the_bell_of_a_killed_member_is_removed_with_its_membership(path: Path) -> None:
    async def scenario() -> None:
        with member_process(path) as process:
            theirs = bells(path)
            async with opened(path, lease_s=1.0) as broker:
                receiving = asyncio.create_task(keep_receiving(await join(broker)))
                assert theirs < bells(path)
                foreign = path.with_name("shop.db-bells") / "notes.txt"
                foreign.touch()
                process.kill()
                await until(lambda: not theirs & bells(path))
                assert len(bells(path) - {foreign}) == 1
                assert foreign.exists()
                await ended(receiving)

    asyncio.run(scenario())


def test_a_member_whose_bell_was_removed_while_it_was_suspended_creates_it_again(path: Path) -> None:
    async def scenario() -> None:
        with member_process(path) as process:
            theirs = bells(path)
            async with opened(path, lease_s=1.0) as broker:
                receiving = asyncio.create_task(keep_receiving(await join(broker)))
                with Gate(lock_path(path)).held():  # so that it is not suspended while it holds the lock
                    process.send_signal(signal.SIGSTOP)
                    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # noqa: ASYNC222
                await until(lambda: not theirs & bells(path))
                process.send_signal(signal.SIGCONT)
                await until(lambda: theirs < bells(path))
                await ended(receiving)

    asyncio.run(scenario())


def test_a_member_whose_bell_cannot_be_created_is_still_woken(path: Path, only_the_bell: None) -> None:
    async def scenario() -> None:
        async with opened(path) as broker, opened(path) as publisher:
            path.with_name("shop.db-bells").touch()  # not a folder
            member = await join(broker)
            await assigned(member, count=PARTITIONS)
            receiving = asyncio.create_task(following(member))
            await asyncio.sleep(0.05)  # so that it waits
            await publisher.publish([event(0)])
            await receiving

    asyncio.run(scenario())
