"""What a running application says of itself: a log line and metrics."""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from onward import Onward
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
)


def test_the_line() -> None:
    assert line(READING) == (
        "billing: tasks 100 workers, 12 busy, 0 restarted, oldest 0.4 s; 12,345 done, 3 retried, 0 dead"
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
    assert exposition([], prefix="shop").count("# TYPE shop_") == 11


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
            async with asyncio.timeout(20):
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
