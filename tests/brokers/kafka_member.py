"""A member in its own process: `python kafka_member.py TASK`. SIGTERM stops it.

It reports when it is up, and writes each event that it handled to the effects file, with its partition and fence. It
ends on SIGTERM or when its stdin closes. With a `slot` it is supervised; with a `log` its stderr goes there.
"""

import asyncio
import json
import os
import sys
import threading

from onward import Event, Onward
from onward.brokers.base import Supervised
from onward.context import current


async def main() -> None:
    task = json.loads(sys.argv[1])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    if "log" in task:
        os.dup2(os.open(task["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
    effects = os.open(task["effects"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    app = Onward(task["url"], **task["settings"])
    if "slot" in task:
        app.supervised = Supervised(task["slot"], task["member"], frozenset(task["gone"]))

    @app.handler(task["topic"], group=task["group"])
    async def handle(event: Event) -> None:
        await asyncio.sleep(task.get("run_s", 0.005))
        run = current()
        line = f"{event.key} {int(event.value or b'')} {run.partition.index} {run.fence}\n"
        os.write(effects, line.encode())

    running = asyncio.create_task(app.run())
    while not app.readings():  # noqa: ASYNC110 - from then on it handles SIGTERM
        await asyncio.sleep(0.01)
    print(json.dumps("up"), flush=True)  # noqa: T201
    await running


if __name__ == "__main__":
    asyncio.run(main())
