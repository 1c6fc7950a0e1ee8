"""python -m tests.inbox.member FILE DATABASE: a member that may be killed at any moment.

Two groups on one broker file write to PostgreSQL: one event by event, one in batches. The sequences `runs_*` count what
they began, also in transactions that were rolled back.
"""

import asyncio
import random
import sys

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from onward import Onward, Retry
from onward.inbox import SqlInbox

TOPIC = "orders"
EFFECT = text("INSERT INTO effect_row SELECT :id, nextval('runs_row')")
BATCH_EFFECT = text("INSERT INTO effect_batch SELECT :id, nextval('runs_batch')")


def broker(path: str) -> Onward:
    """The test kills the processes, so no number of crashes makes a dead letter."""
    return Onward(
        f"sqlite:///{path}",
        partitions=6,
        lease_s=1.5,
        takeover_grace_s=0.1,
        crash_limit=1_000_000,
        max_in_flight=40,
        settle_interval_s=0.5,  # long, so that a kill finds many events done and not settled
    )


def application(path: str, database: str) -> Onward:
    app = broker(path)
    rows = SqlInbox(create_async_engine(database, pool_size=20))
    cursors = SqlInbox(create_engine(database, pool_size=20))
    retry = Retry(attempts=1_000, first_delay_s=0.05, max_delay_s=1.0)

    @app.handler(TOPIC, group="single", inbox=rows, retry=retry, concurrency=20)
    async def single(order: dict[str, int], connection: AsyncConnection) -> None:
        await connection.execute(EFFECT, order)
        await asyncio.sleep(random.random() * 0.02)
        if random.random() < 0.01:
            raise ValueError("bad luck")

    @app.handler(TOPIC, group="batch", inbox=cursors, retry=retry, concurrency=20, batch_size=10)
    def batch(orders: list[dict[str, int]], connection: Connection) -> None:
        connection.execute(BATCH_EFFECT, orders)
        connection.execute(text("SELECT pg_sleep(random() * 0.02)"))
        if random.random() < 0.01:
            raise ValueError("bad luck")

    return app


if __name__ == "__main__":
    asyncio.run(application(*sys.argv[1:]).run())
