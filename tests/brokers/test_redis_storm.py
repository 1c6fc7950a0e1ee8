"""Members that are killed, and a server that is killed and loses its last 0.7 s, for ONWARD_STORM_S seconds."""

import asyncio
import json
import random
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onward.errors import PublishError
from onward.event import Event
from onward.testing.scenario import Kit, Process, event
from tests.brokers.redis_harness import Addressed, RedisHarness
from tests.brokers.redis_stage import own_server, play
from tests.servers.redis import RedisServer
from tests.storm import STORM_S, check_fences, read

KEYS = 50
BATCH = 100
PARTITIONS = 4
CUT_S = 0.7


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(STORM_S + 120)
def test_members_killed_every_few_seconds_lose_and_invert_nothing(redis_server: RedisServer, tmp_path: Path) -> None:
    """Every accepted event is stored once and handled, first runs of a key keep the order of its stream, and no run has
    a superseded fence."""

    async def scene(kit: Kit) -> None:
        path, ledger, sent, kills = tmp_path / "storm.effects", Ledger(), 0, 0
        broker = await kit.broker()
        members = [member_of_storm(kit, redis_server, path) for _ in range(3)]
        end, kill_at = time.monotonic() + STORM_S, time.monotonic() + 2
        while time.monotonic() < end:
            sent = await publish(broker, kit.topic, ledger, sent)
            await asyncio.sleep(0.05)
            if time.monotonic() > kill_at:
                members.pop(random.randrange(3)).kill()
                members.append(member_of_storm(kit, redis_server, path))
                kills += 1
                kill_at = time.monotonic() + random.uniform(1, 3)
        await balanced(redis_server, kit.topic, path, ledger)
        assert len(ledger.accepted) == sent
        repeated = len(read(path)) - sent
        print(f"\n{sent} events, {kills} kills, {repeated} repeated")  # noqa: T201

    async def run() -> None:
        options = {"partitions": PARTITIONS, "publish_timeout_s": 60.0, "lease_s": 1.0}
        kit = Kit(RedisHarness(redis_server, tmp_path), options)
        try:
            await scene(kit)
        finally:
            await kit.close()

    play(run())


def member_of_storm(kit: Kit, server: Addressed, path: Path) -> "StormMember":
    member = StormMember(server, kit.topic, path)
    kit.adopt(member)
    return member


class StormMember(Process):
    def __init__(self, server: Addressed, topic: str, path: Path) -> None:
        task = {
            "url": server.url,
            "settings": {"partitions": PARTITIONS, "lease_s": 1.0, "takeover_grace_s": 0.1, "publish_timeout_s": 5.0},
            "topic": topic,
            "group": "group",
            "effects": str(path),
        }
        super().__init__([str(Path(__file__).with_name("redis_member.py")), json.dumps(task)])


class FileSizes:
    """How long the append-only file was at each moment."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._sizes: deque[tuple[float, int]] = deque(maxlen=1_000)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def ago(self, seconds: float) -> int:
        moment = time.monotonic() - seconds
        return max((size for at, size in tuple(self._sizes) if at <= moment), default=0)

    def clear(self) -> None:
        self._sizes.clear()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            try:
                self._sizes.append((time.monotonic(), self._server.appended.stat().st_size))
            except (OSError, ValueError):
                continue  # it is being started


class Ledger:
    """What was published, and when it was accepted."""

    def __init__(self) -> None:
        self.accepted: dict[str, float] = {}  # by event id
        self.unknown: set[str] = set()
        self.lost: set[str] = set()  # accepted in the moments that a crash took

    def crashed(self, cut_s: float) -> None:
        moment = time.monotonic() - cut_s
        self.lost |= {id_ for id_, at in self.accepted.items() if at > moment}


async def publish(broker: Any, topic: str, ledger: Ledger, sent: int) -> int:
    events = [event(topic, f"key-{n % KEYS}", n // KEYS) for n in range(sent, sent + BATCH)]
    try:
        await broker.publish(events)
    except PublishError as error:
        failed = {each.id for each in (*error.refused, *error.unknown)}
        ledger.unknown |= {each.id for each in error.unknown}
    else:
        failed = set()
    now = time.monotonic()
    ledger.accepted |= {each.id: now for each in events if each.id not in failed}
    return sent + BATCH


def stored(server: RedisServer, topic: str) -> dict[str, list[Event]]:
    """What is in the streams at the end, by key, in order."""
    found: dict[str, list[Event]] = {}
    with server.client() as client:
        for index in range(PARTITIONS):
            entries: Any = client.xrange(f"{{{topic}:{index}}}")
            for _, fields in entries:
                each = msgspec.msgpack.decode(fields[b"e"], type=Event)
                found.setdefault(each.key or "", []).append(each)
    return found


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(STORM_S + 150)
def test_a_server_that_loses_its_last_moments_loses_nothing_else(tmp_path: Path) -> None:
    """Every event in the streams is handled, first runs of a key keep the order of its stream, no run has a superseded
    fence, and what is missing was accepted in the moments that a crash took."""

    async def scene(server: RedisServer, sizes: FileSizes) -> None:
        kit = Kit(RedisHarness(server, tmp_path), {"partitions": PARTITIONS, "lease_s": 1.0, "publish_timeout_s": 20.0})
        path, ledger, sent, crashes = tmp_path / "storm.effects", Ledger(), 0, 0
        for _ in range(3):
            member_of_storm(kit, server, path)
        try:
            broker = await kit.broker()
            end, crash_at = time.monotonic() + STORM_S, time.monotonic() + 4
            while time.monotonic() < end:
                sent = await publish(broker, kit.topic, ledger, sent)
                await asyncio.sleep(0.05)
                if time.monotonic() > crash_at:
                    ledger.crashed(CUT_S + 0.2)
                    await asyncio.to_thread(server.forget, sizes.ago(CUT_S))
                    sizes.clear()
                    crashes += 1
                    crash_at = time.monotonic() + random.uniform(2.5, 5.0)
            await balanced(server, kit.topic, path, ledger)
            print(f"\n{sent} events, {crashes} crashes, {len(ledger.lost)} were in their windows")  # noqa: T201
        finally:
            await kit.close()

    with own_server() as server:
        sizes = FileSizes(server)
        try:
            asyncio.run(scene(server, sizes))
        finally:
            sizes.end()


async def balanced(server: RedisServer, topic: str, path: Path, ledger: Ledger) -> None:
    there = stored(server, topic)
    ids = {each.id for events in there.values() for each in events}
    deadline = time.monotonic() + 60
    while missing := ids - {each.id for each in read(path)}:
        assert time.monotonic() < deadline, f"{len(missing)} of {len(ids)} events in the streams were never handled"
        await asyncio.sleep(0.2)
    gone = ledger.accepted.keys() - ids
    assert gone <= ledger.lost, f"{len(gone - ledger.lost)} accepted events are lost outside the windows of the crashes"
    assert len(ids) == sum(len(events) for events in there.values()), "an event was stored twice"
    done = read(path)
    first: dict[str, dict[str, None]] = {}
    for each in done:
        if each.id in ids:
            first.setdefault(each.key, {}).setdefault(each.id)
    for key, events in there.items():
        assert list(first[key]) == [each.id for each in events], f"{key} ran out of order"
    check_fences(done)
