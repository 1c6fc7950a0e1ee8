"""Members whose wall clock is set back while they work: no event is lost, out of order or late."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onward.testing.scenario import event, first_times, whole_lines
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import Stage, play, staged, until
from tests.brokers.wall_clock import WallClock

__all__ = ["harness"]

SESSION_S = 6.0
KEYS = 12


class Effects:
    """What the members have done, up to the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: list[tuple[str, int]] = []  # keys and numbers
        self.ownerships: set[tuple[str, str]] = set()  # partitions and their fences
        self.longest_s = 0.0  # between two events of a partition
        self._moved: dict[str, float] = {}

    def look(self) -> int:
        """Read the new lines, and return how many events were handled."""
        now = time.monotonic()
        for line in whole_lines(self.path)[len(self.done) :]:
            key, number, partition, fence = line.split()
            self.done.append((key, int(number)))
            self.ownerships.add((partition, fence))
            self.longest_s = max(self.longest_s, now - self._moved.get(partition, now))
            self._moved[partition] = now
        return len(set(self.done))


def member(stage: Stage, effects: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    task = {"url": stage.harness.url, "settings": stage.options, "topic": stage.topic, "group": stage.group}
    program = Path(__file__).with_name("kafka_member.py")
    return subprocess.Popen(
        [sys.executable, str(program), json.dumps(task | {"effects": str(effects)})],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | environment,
    )


@pytest.mark.more
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("busy", [True, False])
def test_a_clock_set_back_by_a_minute_and_by_three_hours_stops_no_member(
    harness: KafkaHarness, tmp_path: Path, *, busy: bool
) -> None:
    """The clock is set back while the member works or is idle, and while another member joins. librdkafka waits on the
    wall clock: without our own waits, a member would stop for as long as the clock was set back."""

    async def scene() -> None:
        clock, effects, members, sent = WallClock(tmp_path), Effects(tmp_path / "effects"), [], 0
        async with staged(harness, partitions=4, lease_s=SESSION_S) as stage:
            broker = await stage.broker()

            async def publish_for(seconds: float) -> None:
                nonlocal sent
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    await broker.publish([event(stage.topic, f"key-{n}", sent) for n in range(KEYS)])
                    sent += 1
                    await asyncio.sleep(0.1)
                    effects.look()

            async def all_is_handled(within_s: float) -> None:
                await until(lambda: effects.look() == sent * KEYS, within_s)

            try:
                members.append(member(stage, effects.path, clock.environment))
                await publish_for(1.0)
                await all_is_handled(45.0)
                effects.longest_s, alone = 0.0, len(effects.ownerships)
                for back_s in (60, 3 * 3600 + 60):
                    clock.step(-back_s)
                    await (publish_for if busy else asyncio.sleep)(2 * SESSION_S)
                    if busy:
                        assert effects.longest_s < SESSION_S
                    await publish_for(0.1)
                    await all_is_handled(SESSION_S)
                assert len(effects.ownerships) == alone, "the member was taken for dead"
                members.append(member(stage, effects.path, clock.environment))
                clock.step(-4 * 3600)
                await publish_for(2 * SESSION_S)
                await all_is_handled(SESSION_S)
                assert len(effects.ownerships) > alone, "the second member took no partition"
            finally:
                for each in members:
                    each.kill()
                    each.communicate()
        assert all(numbers == sorted(numbers) for numbers in first_times(effects.done).values())

    play(scene())
