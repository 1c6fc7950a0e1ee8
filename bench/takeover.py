"""How long the keys of a killed worker wait: `python -m bench.takeover [--url URL] [--rounds N]`.

Each round starts `onward run --workers 2` with the default settings and kills the worker that handled a key with
SIGKILL. It publishes the key's next event at once, and waits until that event is handled.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from bench.kit import child_environment, folder, spread
from onward import Onward

KEYS = 16
PATIENCE_S = 120.0
APPLICATION = """
import os, time
from onward import Onward

app = Onward({url!r})


@app.handler({topic!r}, group="bench")
async def note(number: int) -> None:
    os.write(1, b"%d %d %f\\n" % (os.getpid(), number, time.monotonic()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.takeover", description=__doc__)
    parser.add_argument("--url", help="the broker; by default an SQLite file in a new folder")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with folder() as path:
        url = options.url or f"sqlite:///{path}/takeover.db"
        took_s = []
        for number in range(1, options.rounds + 1):
            took_s.append(asyncio.run(measure(url, path)))
            print(f"round {number}: {took_s[-1]:.2f} s", flush=True)
    print(f"kill -9 to the next event of the same key: {spread(took_s, '.2f')} s")


async def measure(url: str, path: Path) -> float:
    topic = f"takeover-{uuid4().hex[:8]}"
    (path / "takeover_app.py").write_text(APPLICATION.format(url=url, topic=topic))
    async with Onward(url) as app, _running(path) as handled, asyncio.timeout(PATIENCE_S):
        await _owners(app, topic, handled)
        await asyncio.sleep(random.uniform(2, 7))  # all partitions are shared out, and the leases have a random age
        key, pid = next(iter((await _owners(app, topic, handled)).items()))
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await app.publish(topic, KEYS, key=key)
        while True:
            _, number, at = await anext(handled)
            if number == KEYS:
                return at - killed_at


async def _owners(app: Onward, topic: str, handled: "AsyncIterator[tuple[int, int, float]]") -> dict[str, int]:
    """Which process handles each key, once both processes have some."""
    while True:
        await app.publish_many(topic, [(f"key-{number}", number) for number in range(KEYS)])
        pids: dict[str, int] = {}
        while len(pids) < KEYS:
            pid, number, _ = await anext(handled)
            pids[f"key-{number}"] = pid
        if len(set(pids.values())) == 2:
            return pids
        await asyncio.sleep(0.2)


@asynccontextmanager
async def _running(path: Path) -> AsyncIterator["AsyncIterator[tuple[int, int, float]]"]:
    """Run two supervised workers. Yields the lines that their handlers print: process, number and time."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "onward", "run", "takeover_app:app", "--workers", "2"),
        cwd=path,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )

    async def lines() -> AsyncIterator[tuple[int, int, float]]:
        assert process.stdout is not None
        async for line in process.stdout:
            pid, number, at = line.split()
            yield int(pid), int(number), float(at)

    try:
        yield lines()
    finally:
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    main()
