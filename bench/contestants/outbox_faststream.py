"""faststream-outbox with the settings that its page on performance recommends for throughput.

asyncpg, large fetches, one DELETE for a hundred rows, its autovacuum settings, no dependency injection, no log lines.
Its handler is called for each row, so the handler is the null broker. It does not keep order among several workers, so
it has one.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import msgspec
from faststream_outbox import OutboxBroker, make_outbox_table
from faststream_outbox.autovacuum import outbox_autovacuum_ddl
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.workload import Item, Order, batches

QUEUE = "orders"
STUCK_S = 100.0
SETTINGS: dict[str, Any] = {
    "max_workers": 1,
    "fetch_batch_size": 1_000,
    "terminal_flush_batch_size": 500,
    "min_fetch_interval": 0.01,
    "max_fetch_interval": 0.1,
}
METADATA = MetaData()
TABLE = make_outbox_table(METADATA, table_name="faststream_outbox")


def fill(database: str, events: Iterable[Item]) -> None:
    asyncio.run(_fill(_engine(database), events))


async def _fill(engine: AsyncEngine, events: Iterable[Item]) -> None:
    broker = OutboxBroker(engine, outbox_table=TABLE)
    async with engine.begin() as connection:
        await connection.run_sync(METADATA.create_all)
        await connection.execute(text(outbox_autovacuum_ddl(TABLE.name)))
    for batch in batches(events, 1_000):
        async with engine.begin() as connection:
            await broker.publish_batch(*[data for _, data in batch], queue=QUEUE, session=connection)
    await engine.dispose()


def run(database: str, events: int) -> Ran:
    return looped(_run(database, Lap(events)))


async def _run(database: str, lap: Lap) -> Ran:
    logging.disable(logging.CRITICAL)
    engine = _engine(database)
    broker: Any = OutboxBroker(engine, outbox_table=TABLE, apply_types=False, logger=None)
    decode, over = msgspec.json.Decoder(Order).decode, asyncio.Event()

    @broker.subscriber(QUEUE, decoder=_undecoded, **SETTINGS)  # type: ignore[untyped-decorator]
    async def handle(value: bytes) -> None:
        order = decode(value)
        if lap.saw(order.customer, order.number):
            over.set()

    await broker.start()
    try:
        await asyncio.wait_for(over.wait(), STUCK_S)
    finally:
        await broker.stop()
        await engine.dispose()
    return lap.ran()


async def _undecoded(message: Any) -> Any:
    """Return the raw value. FastStream's own decoder would decode the JSON, and the handler would decode it again."""
    return message.body


def _engine(database: str) -> AsyncEngine:
    return create_async_engine(database.replace("postgresql:", "postgresql+asyncpg:"))
