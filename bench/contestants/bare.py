"""The limit: reads Onward's own record rows and calls the handler, without order, owners or acknowledgements."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable

import msgspec

from bench.kit import Ran, Stopwatch, peak_kb
from bench.witness import Witness
from bench.workload import Order
from onward import Event


def run(path: str, events: int) -> Ran:
    witness = Witness(events)

    async def handle(order: Order) -> None:
        witness.saw(order.customer, order.number)

    watch = Stopwatch()
    asyncio.run(_read(path, handle))
    wall_s, cpu_s = watch.read()
    return Ran(wall_s=wall_s, cpu_s=cpu_s, peak_kb=peak_kb(), verdict=witness.verdict())


async def _read(path: str, handle: Callable[[Order], Awaitable[None]]) -> None:
    rows = msgspec.msgpack.Decoder(list[Event])
    orders = msgspec.json.Decoder(Order)
    db = sqlite3.connect(path)
    try:
        for (data,) in db.execute("SELECT data FROM onward_log ORDER BY at"):
            for event in rows.decode(data):
                if event.value is not None:
                    await handle(orders.decode(event.value))
    finally:
        db.close()
