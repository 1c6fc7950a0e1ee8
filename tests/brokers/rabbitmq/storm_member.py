"""A member of both groups of a storm, in a process of its own: `python -m tests.brokers.rabbitmq.storm_member TASK`.

It reports when it is ready, and writes each attempt of an event, each event that it handled and its log to files in the
folder of its task. It ends when its stdin closes.
"""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from onward import Event, GiveUp, Onward
from onward.context import current
from tests.brokers.rabbitmq.fault_shop import KINDS, QUICK, TOPIC, rarely_fail


def opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def add_handler(app: Onward, group: str, folder: Path, options: dict[str, Any]) -> None:
    tried, handled = opened(folder / f"{group}.tried"), opened(folder / f"{group}.handled")

    @app.handler(TOPIC, group=group, retry=QUICK, concurrency=20, **options)
    async def handle(n: int, event: Event) -> None:
        run = current()
        line = f"{event.key} {n} {run.partition.index} {run.position} {run.fence or 0} {os.getpid()} {event.id}\n"
        os.write(tried, line.encode())
        end = rarely_fail(n)
        await asyncio.sleep(0.002)
        if end == "never":
            raise GiveUp("never")
        if end == "later" and run.attempt == 1:
            raise ValueError("later")
        os.write(handled, line.encode())


async def main() -> None:
    task = json.loads(sys.argv[1])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    folder = Path(task["folder"])
    os.dup2(opened(folder / "log"), 2)
    app = Onward(task["url"], **task["settings"])
    for group, options in KINDS.items():
        add_handler(app, group, folder, options)
    running = asyncio.create_task(app.run())
    while not app.health().ready and not running.done():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    print(json.dumps("ready"), flush=True)  # noqa: T201
    await running


if __name__ == "__main__":
    asyncio.run(main())
