"""An application in its own process, which a scenario can kill: `python -m onward.testing.failure_member TASK`.

TASK is JSON; its `mode` is one of:

- `work` handles events. It kills its own process on the events in `die`, and raises RetryLater on those in `later`.
- `replay` replays the dead letters.

It reports each step as a line of JSON on stdout, and exits when its stdin closes.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from typing import Any

from onward import Event, Onward, Retry, RetryLater


def report(step: str, **more: Any) -> None:
    print(json.dumps({"report": step, **more}), flush=True)  # noqa: T201


async def work(app: Onward, task: dict[str, Any]) -> None:
    declared = {name: task[name] for name in ("ordering", "start", "concurrency") if name in task}

    @app.handler(task["topic"], group=task["group"], retry=Retry(attempts=5, first_delay_s=0.05), **declared)
    async def bill(value: dict[str, int], event: Event) -> None:
        this = [event.key, value["n"]]
        await asyncio.sleep(task.get("pause_s", 0.0))
        if this in task.get("die", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        if this in task.get("later", ()):
            report("later", key=event.key, n=value["n"])
            raise RetryLater(task["after_s"])
        report("done", key=event.key, n=value["n"])

    await app.run()


async def replay(app: Onward, task: dict[str, Any]) -> None:
    async with app:
        replay = app.dead.replaying(group=task["group"], rate=task["rate"])
        await replay.run(lambda replay: report("replaying", replayed=replay.replayed))
    report("replayed", replayed=1_000_000)


async def main() -> None:
    task = json.loads(sys.argv[1])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    app = Onward(task["url"], **task["settings"])
    await {"work": work, "replay": replay}[task["mode"]](app, task)


if __name__ == "__main__":
    asyncio.run(main())
