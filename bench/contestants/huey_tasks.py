"""huey on SQLite with fsync. It deletes a task before its handler runs, so it promises less than Onward.

With one worker the events of a key stay in order; with more they do not.
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
    # Without fsync filling is faster. The consuming process opens the file with fsync.
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
    """A placeholder for the task while its calls are queued. The consuming process defines the real one."""
