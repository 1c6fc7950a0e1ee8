"""python -m tests.inbox.victim URL naive|ours: starts to handle event `a`, prints that, and never ends."""

import asyncio
import sys

from redis.asyncio import Redis

from tests.inbox import naive
from tests.inbox.place import delivery
from tests.inbox.redis_calls import handle, started


async def main(url: str, kind: str) -> None:
    async def handler() -> None:
        sys.stdout.write("running\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    if kind == "naive":
        await naive.handle(Redis.from_url(url), "a", handler)
    else:
        async with started(url, lease_s=2.0) as inbox:
            await handle(inbox, delivery("a"), handler)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
