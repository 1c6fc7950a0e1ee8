"""Members of a group that are killed with kill -9, or that join and leave, under load, for ONWARD_STORM_S seconds."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from onward.testing.failure_shop import eventually, until
from onward.testing.scenario import Kit, Process, effects, event, first_times, whole_lines
from tests.brokers.kafka import KafkaHarness, harness
from tests.storm import STORM_S

__all__ = ["harness"]

KEYS = 50
BATCH = 100


def play(kit: Kit, scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        try:
            await scene()
        finally:
            await kit.close()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(STORM_S + 120)
def test_no_event_is_lost_or_inverted_when_members_are_killed_every_few_seconds(harness: KafkaHarness) -> None:
    kit = Kit(harness, {"partitions": 8, "publish_timeout_s": 60.0, "lease_s": 1.0})

    async def scene() -> None:
        broker, sent = await kit.broker(), 0
        children = [kit.child("work") for _ in range(3)]
        end, kill_at = time.monotonic() + STORM_S, time.monotonic() + 2
        while time.monotonic() < end:
            await broker.publish([event(kit.topic, f"key-{n % KEYS}", n // KEYS) for n in range(sent, sent + BATCH)])
            sent += BATCH
            await asyncio.sleep(0.05)
            if time.monotonic() > kill_at:
                children.pop(random.randrange(3)).kill()
                children.append(kit.child("work"))
                kill_at = time.monotonic() + random.uniform(1, 3)
        deadline = time.monotonic() + 60
        while len(set(effects(kit))) < sent:
            assert time.monotonic() < deadline, f"{len(set(effects(kit)))} of {sent} were handled"
            await asyncio.sleep(0.2)
        done = effects(kit)
        assert first_times(done) == {f"key-{k}": list(range(sent // KEYS)) for k in range(KEYS)}
        print(f"\n{sent} events, {len(kit._children) - 3} kills, {sum(Counter(done).values()) - sent} repeated")  # noqa: T201

    play(kit, scene)


class Coming(Process):
    """One of the members that join and leave."""

    def __init__(self, kit: Kit, effects: Path) -> None:
        task = {"url": kit.harness.url, "settings": kit.options, "topic": kit.topic, "group": "group"}
        program = Path(__file__).with_name("kafka_member.py")
        super().__init__([str(program), json.dumps(task | {"effects": str(effects)})])
        kit.adopt(self)
        self._up = asyncio.ensure_future(self.line(60.0))

    @property
    def is_up(self) -> bool:
        return self._up.done()

    def leave(self) -> None:
        """Ask the process to stop, as in a deploy."""
        os.kill(self.pid, signal.SIGTERM)

    def left(self, within_s: float) -> int:
        return self._process.wait(within_s)


class Done(NamedTuple):
    key: str
    n: int
    partition: int
    fence: int


def read(effects: Path) -> list[Done]:
    lines = map(str.split, whole_lines(effects))
    return [Done(key, int(n), int(partition), int(fence)) for key, n, partition, fence in lines]


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(STORM_S + 200)
def test_ten_members_that_join_and_leave_lose_and_invert_nothing(harness: KafkaHarness) -> None:
    """Clean joins and stops only: a member finishes and settles its running events before it gives up a partition. On a
    busy machine that may take longer than the group waits; then events are repeated."""
    kit = Kit(harness, {"partitions": 20, "publish_timeout_s": 60.0, "lease_s": 10.0})
    path, rng = harness.folder / "effects", random.Random()

    async def scene() -> None:
        broker, sent, changes = await kit.broker(), 0, 0
        members = [Coming(kit, path) for _ in range(5)]
        gone: list[Coming] = []
        end, change_at = time.monotonic() + STORM_S, time.monotonic() + 3
        while time.monotonic() < end:
            await broker.publish([event(kit.topic, f"key-{n % KEYS}", n // KEYS) for n in range(sent, sent + BATCH)])
            sent += BATCH
            await asyncio.sleep(0.1)
            if time.monotonic() > change_at:
                up = [member for member in members if member.is_up]
                if up and (len(members) == 10 or (len(members) > 3 and rng.random() < 0.5)):
                    gone.append(rng.choice(up))
                    members.remove(gone[-1])
                    gone[-1].leave()
                elif len(members) < 10:
                    members.append(Coming(kit, path))
                changes += 1
                change_at = time.monotonic() + rng.uniform(0.3, 1.5)
        await eventually(lambda: _handled(path, sent), f"all {sent} events are handled", 60.0)
        await until(lambda: all(member.is_up for member in members), "all members are up")
        for member in members:
            member.leave()
        codes = [await asyncio.to_thread(member.left, 60.0) for member in (*gone, *members)]
        assert not any(codes), f"a stop was not clean: {codes}"
        done = read(path)
        assert first_times((each.key, each.n) for each in done) == {
            f"key-{k}": list(range(sent // KEYS)) for k in range(KEYS)
        }
        owners = len({(each.partition, each.fence) for each in done})
        repeated = len(done) - sent
        print(  # noqa: T201
            f"\n{sent} events, {changes} joins and stops, partitions had {owners} owners that worked, "
            f"{repeated} repeated: {repeated / max(1, changes):.2f} for each rebalance"
        )
        assert repeated <= sent // 10, f"{repeated} repeated"  # few are, even if a member lost its session

    play(kit, scene)


async def _handled(effects: Path, count: int) -> bool:
    return len({(each.key, each.n) for each in read(effects)}) == count


@pytest.mark.slow
def test_the_demo_gives_its_verdict_on_kafka(harness: KafkaHarness) -> None:
    command = [sys.executable, "-m", "onward", "demo", "--check", "--events", "3000", "--url", harness.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("verdict: OK published=3000 handled=3000 dead=0 lost=0 inverted=0"), done.stdout
