"""The whole of Onward: a typed handler with key order, and app.run on a file that was filled before."""

import asyncio

from bench.kit import Ran, Stopwatch, peak_kb
from bench.witness import Witness
from bench.workload import TOPIC, Order, application
from onward import Onward

STUCK_S = 10.0  # without a new event for this time the run ends, and its verdict counts what is missing


def run(path: str, events: int, group: str, stuck_s: float = STUCK_S) -> Ran:
    app = application(path)
    witness = Witness(events)

    @app.handler(TOPIC, group=group, ordering="key")
    async def handle(order: Order) -> None:
        if witness.saw(order.customer, order.number):
            app.stop()

    watch = Stopwatch()
    asyncio.run(_run(app, witness, stuck_s))
    wall_s, cpu_s = watch.read()
    return Ran(wall_s=wall_s, cpu_s=cpu_s, peak_kb=peak_kb(), verdict=witness.verdict())


async def _run(app: Onward, witness: Witness, stuck_s: float) -> None:
    guard = asyncio.create_task(stop_when_stuck(app, witness, stuck_s))
    await app.run()
    guard.cancel()


async def stop_when_stuck(app: Onward, witness: Witness, stuck_s: float) -> None:
    before = -1
    while witness.handled != before:
        before = witness.handled
        await asyncio.sleep(stuck_s)
    app.stop()
