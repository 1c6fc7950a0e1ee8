"""A publisher in its own process: `python kafka_publisher.py TASK`.

For each number that it reads from stdin, it publishes one event of every key with this number. It prints the number
when all are accepted.
"""

import asyncio
import json
import sys

from onward import settings
from onward.brokers import open_broker
from onward.event import Event, new_id


async def main() -> None:
    task = json.loads(sys.argv[1])
    broker = await open_broker(settings.load(task["url"], **task["settings"]))
    while line := await asyncio.to_thread(sys.stdin.readline):
        number = int(line)
        await broker.publish([Event(new_id(), task["topic"], key, b"%d" % number) for key in task["keys"]])
        print(number, flush=True)  # noqa: T201
    await broker.close()


if __name__ == "__main__":
    asyncio.run(main())
