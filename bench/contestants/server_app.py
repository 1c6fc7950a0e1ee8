"""The whole of Onward on a server: a typed handler, from a group's first event to its last."""

import asyncio
import contextlib
from typing import TypedDict

from bench.contestants.app import stop_when_stuck
from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.witness import Witness
from bench.workload import Order
from onward import Onward
from onward.brokers.base import Ordering

STUCK_S = 15.0


class Late(TypedDict):
    """Each order of the first `keys` customers takes `seconds`, or until the orders of all others are done."""

    keys: int
    seconds: float
    max_in_flight: int  # per partition; late events stay open


NONE = Late(keys=0, seconds=0, max_in_flight=1_000)


def run(
    url: str,
    topic: str,
    group: str,
    *,
    events: int,
    concurrency: int = 256,
    wait_ms: float = 0,
    late: Late = NONE,
    ordering: Ordering = "key",
) -> Ran:
    """`events` are those that are not late."""
    app = Onward(url, max_in_flight=late["max_in_flight"])
    lap, rest, over = Lap(events), Witness(0), asyncio.Event()
    wait_s, behind = wait_ms / 1e3, {f"c-{number}" for number in range(late["keys"])}

    async def handle(order: Order) -> None:
        if order.customer in behind:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), late["seconds"])
            rest.saw(order.customer, order.number)
            return
        if wait_s:
            await asyncio.sleep(wait_s)
        if lap.saw(order.customer, order.number):
            over.set()
            app.stop()

    app.handler(topic, group=group, ordering=ordering, concurrency=concurrency + late["keys"])(handle)
    looped(_run(app, lap))
    return lap.ran(inverted=rest.verdict().inverted)


async def _run(app: Onward, lap: Lap) -> None:
    guard = asyncio.create_task(stop_when_stuck(app, lap.witness, STUCK_S))
    await app.run()
    guard.cancel()
