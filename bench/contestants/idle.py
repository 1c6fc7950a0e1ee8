"""A process that owns all partitions of a topic and waits. It measures its own processor time, and the server's."""

import asyncio

import msgspec

from bench.contestants.lap import looped
from bench.kit import Ran, Stopwatch, peak_kb, server_cpu_s
from bench.redis_server import orders
from bench.witness import Witness
from bench.workload import Order
from onward import Onward

GROUP = "idle"
EVENTS = 1_000  # after the wait
STUCK_S = 60.0


def run(url: str, topic: str, partitions: int, idle_s: float, server: int) -> Ran:
    """`server`: its process id."""
    app = Onward(url, partitions=partitions)
    witness = Witness(EVENTS)

    @app.handler(topic, group=GROUP)
    async def handle(order: Order) -> None:
        if witness.saw(order.customer, order.number):
            app.stop()

    ran = looped(_run(app, topic, idle_s, server))
    return msgspec.structs.replace(ran, verdict=witness.verdict())


async def _run(app: Onward, topic: str, idle_s: float, server: int) -> Ran:
    async with asyncio.timeout(idle_s + STUCK_S), app:
        running = asyncio.create_task(app.run())
        while not await _owns_all(app, topic):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(idle_s / 4)  # what it does once is over
        watch, before = Stopwatch(), server_cpu_s(server)
        await asyncio.sleep(idle_s)
        (wall_s, cpu_s), server_s = watch.read(), server_cpu_s(server) - before
        await app.publish_many(topic, orders(EVENTS))
        await running
    return Ran(wall_s=wall_s, cpu_s=cpu_s, peak_kb=peak_kb(), verdict=Witness(0).verdict(), server_s=server_s)


async def _owns_all(app: Onward, topic: str) -> bool:
    found = [info for info in await app.broker.groups(topic) if info.group == GROUP]
    return bool(found) and all(each.owner is not None for each in found[0].partitions.values())
