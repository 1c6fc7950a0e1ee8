"""RedisInbox: an event is free, claimed or done. The usual recipe loses events where RedisInbox does not."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from onward import Event, Onward, Retry
from onward.errors import BadHandler, BadSetting, BrokerError, Busy, InDoubt, Superseded, Unreachable
from onward.inbox import Claim, RedisInbox
from onward.inbox import redis as inbox_redis
from tests.inbox import naive
from tests.inbox.place import PATIENCE_S, delivery, ground
from tests.inbox.redis_calls import asked, handle, handle_in_thread, started
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.servers
ROOT = Path(__file__).parent.parent.parent


def fail() -> None:
    raise ValueError("the thread fails")


async def bill_all(orders: list[dict[str, int]]) -> None: ...


@pytest.fixture
def url(redis_server: RedisServer) -> Iterator[str]:
    with Redis.from_url(redis_server.url) as client:
        client.flushall()
        yield redis_server.url


class Runs:
    """A handler that counts its completed runs. It may wait until it is let go, and it may fail."""

    def __init__(self) -> None:
        self.completed = 0
        self.standing, self.go = asyncio.Event(), asyncio.Event()

    async def at_once(self) -> None:
        self.completed += 1

    async def stands(self) -> None:
        self.standing.set()
        await asyncio.wait_for(self.go.wait(), PATIENCE_S)
        self.completed += 1

    async def fails(self) -> None:
        self.standing.set()
        await asyncio.wait_for(self.go.wait(), PATIENCE_S)
        raise ValueError("the handler fails")


def test_the_effect_happens_once_for_async_and_plain_handlers(url: str) -> None:
    async def scenario() -> None:
        async with started(url) as inbox:
            runs = Runs()
            plain: list[int] = []
            for _ in range(3):
                await handle(inbox, delivery("a"), runs.at_once)
                await handle_in_thread(inbox, delivery("b"), lambda: plain.append(1))
            assert (runs.completed, plain) == (1, [1])

    asyncio.run(scenario())


def test_a_redis_that_is_down_is_unreachable_and_not_a_failure(url: str, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        runs = Runs()
        with redis_server.proxy() as proxy:
            async with started(url.replace(f":{redis_server.port}", f":{proxy.port}")) as inbox:
                proxy.cut()
                with pytest.raises(Unreachable, match="cannot be used"):
                    await handle(inbox, delivery("a"), runs.at_once)
                with pytest.raises(Unreachable, match="cannot be used"):
                    await handle_in_thread(inbox, delivery("a"), fail)
                proxy.mend()
                with pytest.raises(InDoubt, match="stored the mark"):
                    await handle_in_thread(inbox, delivery("a"), proxy.cut)
                assert runs.completed == 0

    asyncio.run(scenario())


def test_a_run_that_fails_gives_its_claim_back(url: str) -> None:
    async def scenario() -> None:
        async with started(url) as inbox:
            runs = Runs()
            runs.go.set()
            with pytest.raises(ValueError, match="the handler fails"):
                await handle(inbox, delivery("a"), runs.fails)
            with pytest.raises(ValueError, match="the thread fails"):
                await handle_in_thread(inbox, delivery("a"), fail)
            await handle(inbox, delivery("a"), runs.at_once)
            assert runs.completed == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("first_fails", [False, True])
def test_a_duplicate_waits_for_the_first(url: str, first_fails: bool) -> None:
    async def scenario() -> None:
        async with started(url) as inbox:
            first, second = Runs(), Runs()
            one = asyncio.create_task(handle(inbox, delivery("a"), first.fails if first_fails else first.stands))
            await asyncio.wait_for(first.standing.wait(), PATIENCE_S)
            two = asyncio.create_task(handle(inbox, delivery("a"), second.at_once))
            done, _ = await asyncio.wait([two], timeout=0.3)
            assert not done
            first.go.set()
            await asyncio.gather(one, return_exceptions=True)
            await two
            assert first.completed + second.completed == 1

    asyncio.run(scenario())


def test_a_duplicate_that_waits_too_long_is_busy_and_never_done(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_redis, "_WAIT_S", 0.2)

    async def scenario() -> None:
        async with started(url) as inbox:
            first, second = Runs(), Runs()
            one = asyncio.create_task(handle(inbox, delivery("a"), first.stands))
            await asyncio.wait_for(first.standing.wait(), PATIENCE_S)
            with pytest.raises(Busy, match="another run has claimed it"):
                await handle(inbox, delivery("a"), second.at_once)
            first.go.set()
            await one
            assert (first.completed, second.completed) == (1, 0)

    asyncio.run(scenario())


def test_a_claim_is_renewed_while_the_handler_runs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_redis, "_WAIT_S", PATIENCE_S)

    async def scenario() -> None:
        async with started(url, lease_s=3.0) as inbox:
            first, second = Runs(), Runs()
            one = asyncio.create_task(handle(inbox, delivery("a"), first.stands))
            await asyncio.wait_for(first.standing.wait(), PATIENCE_S)
            two = asyncio.create_task(handle(inbox, delivery("a"), second.at_once))
            done, _ = await asyncio.wait([two], timeout=7.5)  # two and a half leases
            assert not done
            first.go.set()
            await asyncio.gather(one, two)
            assert (first.completed, second.completed) == (1, 0)

    asyncio.run(scenario())


def test_a_run_that_lost_its_claim_is_cancelled_and_not_done(url: str) -> None:
    async def scenario() -> None:
        async with started(url, lease_s=1.0) as inbox:
            first, second = Runs(), Runs()
            one = asyncio.create_task(handle(inbox, delivery("a"), first.stands))
            await asyncio.wait_for(first.standing.wait(), PATIENCE_S)
            async with AsyncRedis.from_url(url) as client:
                await client.flushall()  # a failover may do this
            with pytest.raises(Superseded):
                await asyncio.wait_for(one, PATIENCE_S)
            await handle(inbox, delivery("a"), second.at_once)
            assert (first.completed, second.completed) == (0, 1)

    asyncio.run(scenario())


def test_a_thread_that_lost_its_claim_is_superseded(url: str) -> None:
    async def scenario() -> None:
        async with started(url) as inbox:

            def forget() -> None:
                with Redis.from_url(url) as client:
                    client.flushall()

            with pytest.raises(Superseded):
                await handle_in_thread(inbox, delivery("a"), forget)

    asyncio.run(scenario())


def test_fences_grow_with_every_run(url: str) -> None:
    async def scenario() -> None:
        async with started(url) as inbox:
            fences = list[int]()

            async def run(_: Any, claim: Claim) -> None:
                fences.append(claim.fence)
                raise ValueError("again")

            for _ in range(3):
                with pytest.raises(ValueError, match="again"):
                    await inbox.around(run, asked())(delivery("a"))
            assert fences == [1, 2, 3]

    asyncio.run(scenario())


# -- what the usual recipe loses ---------------------------------------------------------------------------------


def test_a_cancelled_run_loses_the_event_with_the_usual_recipe_and_not_with_ours(url: str) -> None:
    async def cancelled(run: Any, runs: Runs) -> None:
        task = asyncio.create_task(run)
        await asyncio.wait_for(runs.standing.wait(), PATIENCE_S)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def scenario() -> None:
        async with started(url) as inbox:
            usual, ours = Runs(), Runs()
            async with AsyncRedis.from_url(url) as client:
                await cancelled(naive.handle(client, "a", usual.stands), usual)
                assert not await naive.handle(client, "a", usual.at_once)  # "a duplicate", acknowledged
            await cancelled(handle(inbox, delivery("a"), ours.stands), ours)
            await handle(inbox, delivery("a"), ours.at_once)
            assert (usual.completed, ours.completed) == (0, 1)

    asyncio.run(scenario())


def test_a_killed_process_loses_the_event_with_the_usual_recipe_and_not_with_ours(url: str) -> None:
    for kind in ("naive", "ours"):
        victim = subprocess.Popen(
            [sys.executable, "-m", "tests.inbox.victim", url, kind], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        with victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "running\n"
            victim.kill()

    async def scenario() -> None:
        async with started(url, lease_s=2.0) as inbox:
            usual, ours = Runs(), Runs()
            async with AsyncRedis.from_url(url) as client:
                assert not await naive.handle(client, "a", usual.at_once)
            await handle(inbox, delivery("a"), ours.at_once)  # when the lease of the dead process has ended
            assert (usual.completed, ours.completed) == (0, 1)

    asyncio.run(scenario())


# -- its terms, and through the application ------------------------------------------------------------------------


def test_unsafe_settings_are_refused(url: str) -> None:
    with pytest.raises(BadSetting, match="lease_s"):
        RedisInbox(url, lease_s=0.5)
    with pytest.raises(BadSetting, match="would happen twice"):
        asyncio.run(RedisInbox(url, horizon_s=100).start(ground()))
    with Redis.from_url(url) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(BadSetting, match="noeviction"):
                asyncio.run(RedisInbox(url).start(ground()))
        finally:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "0")
    with pytest.raises(BrokerError, match="cannot be reached"):
        asyncio.run(RedisInbox("redis://127.0.0.1:1/0").start(ground()))


@pytest.mark.parametrize(
    ("options", "why"), [({"batch_size": 2}, "single events"), ({"engine": "processes"}, "worker")]
)
def test_handlers_that_it_does_not_support_are_refused(options: dict[str, Any], why: str) -> None:
    app = Onward("sqlite:///unused.db")
    with pytest.raises(BadHandler, match=why):
        app.handler("orders", inbox=RedisInbox("redis://127.0.0.1:1"), **options)(bill_all)


def test_a_busy_event_stays_open_through_the_application(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process runs the event for longer than we wait: no attempt is charged, and it is not acknowledged."""
    monkeypatch.setattr(inbox_redis, "_WAIT_S", 0.05)
    app = Onward(f"sqlite:///{tmp_path}/events.db", partitions=1)
    handled = threading.Event()

    @app.handler("orders", group="billing", inbox=RedisInbox(url), retry=Retry(attempts=1))
    async def bill(event: Event, claim: Claim) -> None:
        handled.set()

    async def scenario() -> None:
        async with started(url) as other:
            runs = Runs()
            async with app:
                event = await app.publish("orders", {"id": 1}, key="k")
                held = asyncio.create_task(handle(other, delivery(event.id), runs.fails))
                await asyncio.wait_for(runs.standing.wait(), PATIENCE_S)
                running = asyncio.create_task(app.run())
                deadline = time.monotonic() + PATIENCE_S
                while not any(reading.busy for reading in app.readings()):
                    assert time.monotonic() < deadline
                    await asyncio.wait([running], timeout=0.02)
                await asyncio.wait([running], timeout=0.5)  # ten waits without success
                assert not handled.is_set()
                assert await settled(app) == 0
                runs.go.set()
                with pytest.raises(ValueError, match="the handler fails"):
                    await held
                assert await asyncio.to_thread(handled.wait, PATIENCE_S)
                app.stop()
                await running
                assert await settled(app) == 1

    asyncio.run(scenario())


def test_a_started_inbox_is_closed_when_the_start_of_another_is_refused(url: str, tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/events.db", partitions=1)
    first = RedisInbox(url)

    @app.handler("orders", inbox=first)
    async def bill(event: Event) -> None: ...

    @app.handler("orders", inbox=RedisInbox(url, horizon_s=1))
    async def ship(event: Event) -> None: ...

    with pytest.raises(BadSetting, match="too short"):
        asyncio.run(app.run())
    assert first._client is None


async def settled(app: Onward) -> int:
    return sum(sum(each.watermark for each in info.partitions.values()) for info in await app.broker.groups("orders"))
