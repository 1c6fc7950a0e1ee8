"""What a running application says of itself: a log line and metrics."""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from onward import GiveUp, Onward, Retry
from onward.observe.health import line, tell
from onward.observe.metrics import Reading, exposition

READING = Reading(
    topic="orders",
    group="billing",
    engine="tasks",
    workers=100,
    busy=12,
    restarted=0,
    oldest_running_s=0.42,
    delivered=12_400,
    skipped=0,
    stale=0,
    done=12_345,
    retried=3,
    dead=0,
    declined=0,
    undelivered=None,
    undelivered_oldest_s=None,
    open=30,
    oldest_open_s=1.5,
    blocked_s=0.25,
    gap=7,
    delayed=2,
    parked=5,
    parked_keys=4,
    dead_letters=None,
    dead_oldest_s=None,
)


def test_the_line() -> None:
    assert line(READING) == (
        "orders for billing: tasks 100 workers, 12 busy, 0 restarted, oldest 0.4 s; 12,345 done, 3 retried, 0 dead"
    )
    idle = msgspec.structs.replace(READING, busy=0, oldest_running_s=None)
    assert "0 busy, 0 restarted; 12,345 done" in line(idle)


def test_a_line_is_told_when_something_happened(caplog: pytest.LogCaptureFixture) -> None:
    idle = msgspec.structs.replace(READING, busy=0, oldest_running_s=None)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tell(lambda: [idle], every_s=0.01), 0.2)

    with caplog.at_level(logging.INFO, "onward"):
        asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == [line(idle)]


def test_the_metrics() -> None:
    text = exposition([READING])
    labels = '{group="billing",topic="orders"}'
    for name, value in [
        ("onward_engine_workers", "100.0"),
        ("onward_engine_busy", "12.0"),
        ("onward_engine_restarted_total", "0.0"),
        ("onward_engine_oldest_running_seconds", "0.42"),
        ("onward_events_done_total", "12345.0"),
        ("onward_events_dead_total", "0.0"),
    ]:
        assert f"{name}{labels} {value}" in text
    assert exposition([], prefix="shop").count("# TYPE shop_") == 22


def test_a_running_application_shows_each_handler(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db")

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    @app.handler("orders", group="shipping")
    def ship(order: dict[str, int]) -> None: ...

    async def main() -> str:
        async with app:
            await app.publish_many("orders", [("k", {"n": n}) for n in range(5)])
            running = asyncio.create_task(app.run())
            async with asyncio.timeout(60):
                while [reading.done for reading in app.readings()] != [5, 5]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            text = app.metrics()
            app.stop()
            await running
            return text

    text = asyncio.run(main())
    assert 'onward_events_done_total{group="billing",topic="orders"} 5.0' in text
    assert 'onward_events_done_total{group="shipping",topic="orders"} 5.0' in text
    assert app.readings() == []


def test_what_is_unknown_is_not_told_as_nothing() -> None:
    labels = '{group="billing",topic="orders"}'
    text = exposition([READING])
    assert f"onward_lag_open{labels} 30.0" in text
    assert f"onward_lag_oldest_open_seconds{labels} 1.5" in text
    assert f"onward_lag_undelivered{labels}" not in text
    assert f"onward_dead_letters{labels}" not in text
    known = exposition([msgspec.structs.replace(READING, undelivered=0, dead_letters=3, oldest_open_s=None)])
    assert f"onward_lag_undelivered{labels} 0.0" in known
    assert f"onward_dead_letters{labels} 3.0" in known
    assert f"onward_lag_oldest_open_seconds{labels} 0.0" in known


def test_the_metrics_tell_how_far_behind_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.flow.consumer._LAG_EVERY_S", 0.05)
    app = Onward(f"sqlite:///{tmp_path}/shop.db", partitions=1, max_in_flight=10, receive_batch=5, dead_check_s=0.05)
    go = asyncio.Event()

    @app.handler("orders", group="billing", concurrency=4, retry=Retry(attempts=2, first_delay_s=600, max_delay_s=600))
    async def bill(order: dict[str, str]) -> None:
        if order["do"] == "die":
            raise GiveUp("no")
        if order["do"] == "park":
            raise ValueError("later")
        await go.wait()

    async def scenario() -> None:
        orders = [("a", "die"), ("b", "park"), ("b", "held"), ("c", "block"), *[(f"d-{n}", "wait") for n in range(60)]]
        async with app:
            await app.publish_many("orders", [(key, {"do": do}) for key, do in orders])
            running = asyncio.create_task(app.run())
            labels = '{group="billing",topic="orders"}'
            expected = ["dead_letters", "parked_events", "parked_keys"]
            values = {"dead_letters": 1.0, "parked_events": 2.0, "parked_keys": 1.0}
            async with asyncio.timeout(60):
                while not all(f"onward_{name}{labels} {values[name]}" in app.metrics() for name in expected):
                    assert not running.done()
                    await asyncio.wait([running], timeout=0.02)
                while not (app.readings()[0].undelivered or 0) > 0:
                    await asyncio.wait([running], timeout=0.02)
            (reading,) = app.readings()
            assert reading.open > 0
            assert reading.oldest_open_s is not None
            assert reading.oldest_open_s > reading.blocked_s > 0
            assert reading.gap == 0
            go.set()
            async with asyncio.timeout(60):
                while app.readings()[0].undelivered != 0 or app.readings()[0].open:
                    await asyncio.wait([running], timeout=0.02)
            app.stop()
            await running

    asyncio.run(scenario())
