"""huey on SQLite with fsync. It deletes a task when it takes it, before the handler runs: less than is asked here.

With one worker a key's order is kept; with more it is not.
"""

import logging
import threading
from pathlib import Path

import msgspec
from huey import SqliteHuey

from bench.kit import Ran, Stopwatch, peak_kb
from bench.witness import Witness
from bench.workload import Order, items

STUCK_S = 60.0


def fill(path: Path, events: int) -> None:
    # fsync only matters for filling time here; who consumes opens the file with it.
    huey = SqliteHuey("bench", filename=str(path), fsync=False, results=False)
    work = huey.task(name="work")(_nothing)
    for _, value in items(events):
        work(value)
    huey.storage.close()


def run(path: str, events: int, workers: int) -> Ran:
    logging.disable(logging.CRITICAL)
    huey = SqliteHuey("bench", filename=path, fsync=True, results=False)
    witness, lock, done = Witness(events), threading.Lock(), threading.Event()
    decode = msgspec.json.Decoder(Order).decode

    def handle(value: bytes) -> None:
        order = decode(value)
        with lock:
            if witness.saw(order.customer, order.number):
                done.set()

    huey.task(name="work")(handle)
    watch = Stopwatch()
    consumer = huey.create_consumer(workers=workers, worker_type="thread", periodic=False)
    consumer.start()
    done.wait(STUCK_S)
    wall_s, cpu_s = watch.read()  # before stop, which waits for its sleeping scheduler
    consumer.stop(graceful=True)
    return Ran(wall_s=wall_s, cpu_s=cpu_s, peak_kb=peak_kb(), verdict=witness.verdict())


def _nothing(value: bytes) -> None:
    """Stands for the task while its calls are queued; the consuming process has the real one."""
