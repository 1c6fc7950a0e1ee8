"""Members whose broker is unreachable: a stop ends in time, and a member starts no event that another may own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from onward import settings
from onward.brokers import open_broker
from onward.brokers.kafka.group_consumer import GroupConsumer
from onward.clock import now
from onward.testing.scenario import Process
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import Stage, play, staged, until
from tests.servers.kafka import KafkaServer

__all__ = ["harness"]

DRAIN_S = 3.0
STOP_S = 60.0  # the drain, 15 s to leave the group, and extra time for a busy machine


class Program:
    """An application in its own process that handles the stage's topic."""

    def __init__(self, stage: Stage, folder: Path, url: str, **options: Any) -> None:
        self.effects, self.log = folder / "effects", folder / "log"
        task = {"url": url, "settings": stage.options | options, "topic": stage.topic, "group": stage.group}
        program = Path(__file__).with_name("kafka_member.py")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(program), json.dumps(task | {"effects": str(self.effects)})],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def has_handled(self) -> bool:
        return self.effects.exists() and self.effects.stat().st_size > 0

    def stopped(self) -> int:
        """Send SIGTERM, and return the exit code."""
        os.kill(self._process.pid, signal.SIGTERM)
        return self._process.wait(STOP_S)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_stop_ends_while_the_broker_is_dead(harness: KafkaHarness, kafka_server: KafkaServer, tmp_path: Path) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=4, drain_timeout_s=DRAIN_S, lease_s=6.0) as stage:
            await stage.publish(5_000, keys=50)
            program = Program(stage, tmp_path, harness.url)
            try:
                await until(program.has_handled)
                kafka_server.kill()
                await asyncio.sleep(3.0)  # requests that were sent get no answer
                code = await asyncio.to_thread(program.stopped)
            finally:
                program.end()
                await asyncio.to_thread(kafka_server.restart)
            assert code == 0, program.log.read_text()

    play(scene())


SESSION_S = 10.0  # long enough for a busy machine to answer


def set_session(harness: KafkaHarness, group: str) -> None:
    """Set how long the coordinator waits for a silent member. With KIP-848 the group decides this, not the member."""
    change = ConfigEntry(
        "consumer.session.timeout.ms", f"{SESSION_S * 1000:.0f}", incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[change])
    harness.admin.incremental_alter_configs([resource])[resource].result(30)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", ["cut", "stall"])
@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_a_member_that_is_cut_off_is_not_sure_once_another_has_its_partition(
    harness: KafkaHarness, kafka_server: KafkaServer, protocol: str, fault: str
) -> None:
    """Before that it is sure, even if it settles nothing. When the broker is back it can own the partition again."""

    async def scene() -> None:
        options = {"client": {"group.protocol": protocol}, "lease_s": SESSION_S, "takeover_grace_s": 1.0}
        with kafka_server.proxy() as proxy:
            async with staged(harness, **options) as stage:
                set_session(harness, stage.group)
                await stage.publish(3)
                away = await open_broker(settings.load(proxy.url, **stage.options))
                cut_off = await (await stage.member(away)).hold(1)

                def may_start() -> bool:
                    return bool(cut_off.assigned) and cut_off.subscription.sure_until() > now()

                end = now() + SESSION_S + 1
                while now() < end:
                    await cut_off.receive(wait_s=0.1)
                    assert may_start(), "it is not sure although the coordinator answers"
                getattr(proxy, fault)()
                heir = await stage.member()
                while not heir.assigned:
                    await asyncio.gather(cut_off.receive(wait_s=0.1), heir.receive(wait_s=0.1))
                    assert not heir.assigned or not may_start()
                proxy.mend()
                end = now() + 2.0
                while now() < end:
                    await asyncio.gather(cut_off.receive(wait_s=0.1), heir.receive(wait_s=0.1))
                    assert not may_start(), "it is sure although the partition belongs to another member"
                assert heir.assigned
                await heir.subscription.close()
                await cut_off.hold(1)
                assert may_start()
                await away.close()

    play(scene())


@pytest.mark.slow
def test_while_a_member_is_not_sure_it_receives_no_events(
    harness: KafkaHarness, kafka_server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread stops for a while, as in a suspended process, and the coordinator accepts nothing afterwards. By then
    another member may own the events that were read ahead."""

    async def scene() -> None:
        async with staged(harness, lease_s=SESSION_S) as stage:
            await stage.publish(50)
            member = await stage.member()
            while not member.deliveries:
                await member.receive(limit=1)
            kafka_server.pause()
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(GroupConsumer, "poll", lambda _: time.sleep(SESSION_S / 4))
                    await asyncio.sleep(SESSION_S / 3)
                await until(lambda: member.subscription.sure_until() < now())
                before = len(member.deliveries)
                for _ in range(3):
                    await member.receive(wait_s=0.1)
                assert len(member.deliveries) == before
            finally:
                kafka_server.resume()
            await member.until(lambda: set(member.values) == set(range(50)), within_s=60.0)
            assert list(dict.fromkeys(member.values)) == [*range(50)]

    play(scene())


@pytest.mark.slow
def test_a_suspended_member_of_a_modern_group_is_not_sure_when_it_resumes(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, client={"group.protocol": "consumer"}, lease_s=SESSION_S) as stage:
            set_session(harness, stage.group)
            await stage.publish(3)
            task = {"mode": "watch", "count": 3, "topic": stage.topic, "group": stage.group}
            task |= {"url": harness.url, "settings": stage.options}
            stopped = Process(["-m", "onward.testing.member", json.dumps(task)])
            try:
                await stopped.line()
                stopped.stop()
                await (await stage.member()).take(3)
                stopped.go_on()
                while (report := await stopped.line())["slept_s"] < SESSION_S / 2:
                    pass
                assert not report["sure"]
            finally:
                stopped.end()

    play(scene())
