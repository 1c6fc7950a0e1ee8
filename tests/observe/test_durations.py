"""The durations of handler calls, on every engine."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from onward import Onward, Retry
from tests.observe import naps
from tests.observe.test_metrics import parsed
from tests.test_app import until

LABELS = "[('group', 'billing'), ('topic', 'orders')]"


def count(values: dict[str, float], bound: str) -> float:
    return values[
        f"onward_handler_duration_seconds_bucket[('group', 'billing'), ('le', '{bound}'), ('topic', 'orders')]"
    ]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (naps.suspending, {}),
        (naps.plain, {}),
        (naps.plain, {"engine": "processes", "workers": 1}),
    ],
)
def test_runs_are_counted_by_their_duration(tmp_path: Path, function: Any, options: dict[str, Any]) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=5.0)
    app.handler("orders", group="billing", ordering="partition", retry=Retry(attempts=1), **options)(function)

    async def main() -> dict[str, float]:
        async with app:
            orders = [{"takes_s": 0.0}] * 5 + [{"takes_s": 0.3}, {"takes_s": 0.3, "fails": 1.0}]
            for (
                order
            ) in orders:  # one after the other: worker processes report the mean of what ended since the last look
                await app.publish("orders", order, key="k")
            async with app.running():
                await until(lambda: app.readings()[0].done + app.readings()[0].dead == len(orders))
                return parsed(app.metrics())

    values = asyncio.run(main())
    total = values[f"onward_handler_duration_seconds_sum{LABELS}"]
    assert 0.6 <= total < 5
    assert values[f"onward_handler_duration_seconds_count{LABELS}"] == 7
    assert count(values, "+Inf") == 7
    assert count(values, "0.1") <= 5
    if options.get("engine") != "processes":
        assert count(values, "0.25") == 5


def test_handlers_that_never_suspend_are_timed_one_by_one(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=5.0, partitions=1)

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, float]) -> None:
        naps.plain(order)  # blocks the loop, but not for long

    async def main() -> dict[str, float]:
        async with app:
            await app.publish_many("orders", [(f"k-{n}", {"takes_s": 0.03 if n == 50 else 0.0}) for n in range(100)])
            async with app.running():
                await until(lambda: app.readings()[0].done == 100)
                return parsed(app.metrics())

    values = asyncio.run(main())
    assert count(values, "+Inf") == 100
    assert count(values, "+Inf") - count(values, "0.025") >= 1, "the slow run is not hidden in the mean of the others"
    assert count(values, "0.025") >= 90
