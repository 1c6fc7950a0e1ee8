"""The wall clock of the server is set while it works: no position and no fence goes back, and nothing is lost."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from onward.brokers.base import Fenced
from onward.brokers.redis import trimmer
from onward.testing.scenario import Member
from tests.brokers.redis_stage import now_ms, play, staged
from tests.brokers.wall_clock import WallClock
from tests.servers.redis import RedisServer

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

HOUR_S = 3_600


class ClockedServer(RedisServer):
    def __init__(self, clock: WallClock) -> None:
        super().__init__()
        self._clock = clock

    def environment(self) -> dict[str, str]:
        return super().environment() | self._clock.environment


async def stays(member: Member, clock: WallClock, seconds: int) -> None:
    """Set the clock and receive for longer than a lease."""
    clock.step(seconds)
    await member.quiet(2.0)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((2 * HOUR_S, 0), marks=pytest.mark.more, id="ahead"),
        pytest.param((-2 * HOUR_S, 0), marks=pytest.mark.more, id="back"),
        pytest.param((HOUR_S, -HOUR_S), id="both"),
    ],
)
def test_a_clock_that_is_set_loses_nothing_and_gives_nothing_twice(
    tmp_path: Path, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.2)

    async def scene(server: RedisServer, clock: WallClock) -> None:
        async with staged(server, lease_s=1.5, retention_s=600.0) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            true_ms, sent = now_ms(stage), 0
            for seconds in (0, *steps):
                await stays(member, clock, seconds)
                assert abs(now_ms(stage) - true_ms - 1000 * seconds) < 60_000, "the clock was not set"
                await broker.publish(stage.events(300, start=sent))
                sent += 300
                await member.take(sent)
                assert not await member.settle(member.deliveries[: sent - 100])
            await _is_whole(member, sent)
            (lag,) = (await member.subscription.lag()).values()
            assert lag.undelivered == 0
            await _taken_over(stage, member, sent)

    clock = WallClock(tmp_path)
    server = ClockedServer(clock)
    try:
        server.start()
        play(scene(server, clock))
    finally:
        server.close()


async def _is_whole(member: Member, sent: int) -> None:
    assert member.values == list(range(sent))
    positions = [each.position for each in member.deliveries]
    assert positions == sorted(set(positions))
    assert not any(isinstance(each, Fenced) for each in member.history), "a step of the clock ended a lease"
    assert not member.subscription.troubles()


async def _taken_over(stage: Any, member: Member, sent: int) -> None:
    """What was not settled comes again, under a higher fence, and nothing that was not finished has been trimmed."""
    (before,) = member.assigned.values()
    await member.subscription.close()
    again = await (await stage.member(await stage.broker())).hold(1)
    (after,) = again.assigned.values()
    assert (after.fence or 0) > (before.fence or 0)
    assert after.log_id == before.log_id
    await again.take(100)
    await again.quiet(0.3)
    assert again.values == list(range(sent - 100, sent))


def test_a_publish_reaches_a_waiting_receive_after_the_clock_was_set_back(tmp_path: Path) -> None:
    """The server's blocking commands may wait by its wall clock."""

    async def scene(server: RedisServer, clock: WallClock) -> None:
        async with staged(server) as stage:
            broker = await stage.broker()
            member = await (await stage.member(broker)).hold(1)
            await member.receive(wait_s=0.3)
            clock.step(-HOUR_S)
            for n in range(3):
                waiting = asyncio.ensure_future(member.take(n + 1))
                await asyncio.sleep(0.5)
                await broker.publish(stage.events(1, start=n))
                async with asyncio.timeout(5.0):
                    await waiting

    clock = WallClock(tmp_path)
    server = ClockedServer(clock)
    try:
        server.start()
        play(scene(server, clock))
    finally:
        server.close()
