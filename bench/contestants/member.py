"""A process that is one member of a group. It handles the events of its partitions until SIGTERM."""

import asyncio

from bench.workload import TOPIC, Order, application

GROUP = "members"


def run(path: str) -> None:
    app = application(path)

    @app.handler(TOPIC, group=GROUP)
    async def handle(order: Order) -> None:
        pass

    asyncio.run(app.run())
