"""A member in a process of its own, which outlives restarts of the server: `python redis_member.py TASK`.

It writes each event that it handled to the effects file, with its partition, position, fence and process, and ends
when its stdin closes.
"""

import asyncio
import json
import os
import sys
import threading

from onward import Event, Onward
from onward.context import current


async def main() -> None:
    task = json.loads(sys.argv[1])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    effects = os.open(task["effects"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    app = Onward(task["url"], **task["settings"])

    @app.handler(task["topic"], group=task["group"], concurrency=20)
    async def handle(event: Event) -> None:
        run = current()
        place = f"{run.partition.index} {run.position} {run.fence} {os.getpid()}"
        os.write(effects, f"{event.key} {int(event.value or b'')} {place} {event.id}\n".encode())

    await app.run()


if __name__ == "__main__":
    asyncio.run(main())
