"""How long the keys of a member that ends wait: `python -m bench.takeover [--url URL] [--rounds N] [--case CASE]`.

Each round starts two members of a group, and ends the one that handled a key. It publishes further events of that key
at once, and waits until the other member handles one.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from bench.kit import child_environment, folder, spread
from onward import Onward

KEYS = 16
PATIENCE_S = 120.0
EVERY_S = 0.01
LEASE_S = 10.0
APPLICATION = """
import os, time
from onward import Onward

app = Onward({url!r}, lease_s={lease_s})


@app.handler({topic!r}, group="bench")
async def note(number: int) -> None:
    os.write(1, b"%d %d %f\\n" % (os.getpid(), number, time.monotonic()))
"""


class Case(NamedTuple):
    """How the two members run, and the signal that ends one of them."""

    commands: Sequence[Sequence[str]]  # of `onward run`
    signal: signal.Signals


CASES = {
    "worker killed": Case([["--workers", "2"]], signal.SIGKILL),
    "process killed": Case([[], []], signal.SIGKILL),
    "clean leave": Case([[], []], signal.SIGTERM),
}

Handled = AsyncIterator[tuple[int, int, float]]  # process, number and time


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.takeover", description=__doc__)
    parser.add_argument("--url", help="the broker; by default an SQLite file in a new folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=CASES, default="worker killed")
    options = parser.parse_args()
    with folder() as path:
        url = options.url or f"sqlite:///{path}/takeover.db"
        took_s = []
        for number in range(1, options.rounds + 1):
            took_s.append(asyncio.run(measure(url, path, CASES[options.case])))
            print(f"round {number}: {took_s[-1]:.2f} s", flush=True)
    print(f"{options.case}, to the next event of the same key: {spread(took_s, '.2f')} s")


async def measure(url: str, path: Path, case: Case, lease_s: float = LEASE_S) -> float:
    topic = f"takeover-{uuid4().hex[:8]}"
    (path / "takeover_app.py").write_text(APPLICATION.format(url=url, topic=topic, lease_s=lease_s))
    async with Onward(url) as app, _running(path, case.commands) as handled, asyncio.timeout(PATIENCE_S):
        await _owners(app, topic, handled)
        await asyncio.sleep(random.uniform(0.2, 0.7) * lease_s)  # all partitions are shared out; leases of any age
        key, pid = next(iter((await _owners(app, topic, handled)).items()))
        ended_at = time.monotonic()
        os.kill(pid, case.signal)
        publishing = asyncio.create_task(_publish(app, topic, key))
        try:
            while True:
                handler, number, at = await anext(handled)
                if number >= KEYS and handler != pid:
                    return at - ended_at
        finally:
            publishing.cancel()
            with suppress(asyncio.CancelledError):
                await publishing


async def _publish(app: Onward, topic: str, key: str) -> None:
    """A member that leaves may still handle the first ones."""
    number = KEYS
    while True:
        await app.publish(topic, number, key=key)
        number += 1
        await asyncio.sleep(EVERY_S)


async def _owners(app: Onward, topic: str, handled: Handled) -> dict[str, int]:
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
async def _running(path: Path, commands: Sequence[Sequence[str]]) -> AsyncIterator[Handled]:
    """Run the members. Yields the lines that their handlers print to one pipe."""
    reading, writing = os.pipe()
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "onward", "run", "takeover_app:app", *command),
            cwd=path,
            env=child_environment(),
            stdout=writing,
            stderr=subprocess.DEVNULL,
        )
        for command in commands
    ]
    os.close(writing)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb"))

    async def lines() -> Handled:
        async for line in reader:
            pid, number, at = line.split()
            yield int(pid), int(number), float(at)

    try:
        yield lines()
    finally:
        for process in processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()
        for process in processes:
            await process.wait()
        pipe.close()


if __name__ == "__main__":
    main()
