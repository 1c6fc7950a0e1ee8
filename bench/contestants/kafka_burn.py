"""Onward on Kafka with worker processes: the handler computes, and writes each event into a file that all share."""

import asyncio
import os
import resource
import struct
import time
from pathlib import Path

from bench.contestants.lap import looped
from bench.kit import Ran, cpu_s, peak_kb
from bench.witness import Witness
from bench.workload import Order, burn
from onward import Onward

STUCK_S = 40.0
NOTE = struct.Struct("=IId")  # customer, number, time
PATH, LOOPS = "BENCH_BURN_PATH", "BENCH_BURN_LOOPS"  # the workers have our environment


def handle(order: Order) -> None:
    burn(int(os.environ[LOOPS]))
    note = NOTE.pack(int(order.customer[2:]), order.number, time.monotonic())
    file = os.open(os.environ[PATH], os.O_WRONLY | os.O_APPEND)  # appends of one write each do not mix
    os.write(file, note)
    os.close(file)


def run(servers: str, topic: str, group: str, events: int, loops: int, workers: int) -> Ran:
    path = Path(f"{group}.notes").absolute()
    path.touch()
    os.environ |= {PATH: str(path), LOOPS: str(loops)}
    app = Onward(f"kafka://{servers}")
    app.handler(topic, group=group, engine="processes", workers=workers)(handle)
    looped(_run(app, path, events))
    return _judged(path, events)


async def _run(app: Onward, path: Path, events: int) -> None:
    running = asyncio.create_task(app.run())
    end = time.monotonic() + STUCK_S
    while _noted(path) < events and time.monotonic() < end and not running.done():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    app.stop()
    await running


def _noted(path: Path) -> int:
    return path.stat().st_size // NOTE.size


def _judged(path: Path, events: int) -> Ran:
    witness, times = Witness(events), []
    for customer, number, at in NOTE.iter_unpack(path.read_bytes()):
        witness.saw(f"c-{customer}", number)
        times.append(at)
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = cpu_s() + workers.ru_utime + workers.ru_stime  # includes the start of all workers
    return Ran(wall_s=max(times) - min(times), cpu_s=spent_s, peak_kb=peak_kb(), verdict=witness.verdict())
