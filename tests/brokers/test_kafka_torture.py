"""Members of a group killed with kill -9, one after another, under load. ONWARD_TORTURE_S=120 makes it two minutes."""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter

import pytest

from onward.testing.harness import Kit, effects, event, first_times
from tests.brokers.kafka import KafkaHarness, harness

__all__ = ["harness"]

SECONDS = float(os.environ.get("ONWARD_TORTURE_S", "8"))
KEYS = 50
BATCH = 100


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_members_killed_every_few_seconds_lose_and_invert_nothing(harness: KafkaHarness) -> None:
    kit = Kit(harness, {"partitions": 8, "publish_timeout_s": 60.0})

    async def scene() -> None:
        broker, sent = await kit.broker(), 0
        children = [kit.child("work") for _ in range(3)]
        end, kill_at = time.monotonic() + SECONDS, time.monotonic() + 2
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

    async def run() -> None:
        try:
            await scene()
        finally:
            await kit.close()

    asyncio.run(run())


@pytest.mark.slow
def test_the_demo_gives_its_verdict_on_kafka(harness: KafkaHarness) -> None:
    command = [sys.executable, "-m", "onward", "demo", "--check", "--events", "3000", "--url", harness.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("verdict: OK published=3000 handled=3000 dead=0 lost=0 inverted=0"), done.stdout
