"""persist-queue on SQLite, in WAL with synchronous=FULL, SQLite's own default: one event at a time, in order.

"ack": an acknowledgement per event, as several consumers need it. "batch": a single consumer, which deletes the handled
events once per hundred events.
"""

from pathlib import Path
from typing import Any

import msgspec
from persistqueue import SQLiteAckQueue, SQLiteQueue

from bench.kit import Ran, Stopwatch, peak_kb
from bench.witness import Witness
from bench.workload import Order, items

BATCH = 100


def fill(folder: Path, events: int, mode: str) -> None:
    queue = _open(str(folder), mode)
    for _, value in items(events):
        queue.put(value)
    queue.close()


def run(path: str, events: int, mode: str) -> Ran:
    watch = Stopwatch()
    witness = Witness(events)
    queue = _open(path, mode)
    (_acknowledge_each if mode == "ack" else _acknowledge_batches)(queue, events, witness)
    queue.close()
    wall_s, cpu_s = watch.read()
    return Ran(wall_s=wall_s, cpu_s=cpu_s, peak_kb=peak_kb(), verdict=witness.verdict())


def _open(path: str, mode: str) -> Any:
    return SQLiteAckQueue(path) if mode == "ack" else SQLiteQueue(path, auto_commit=False)


def _acknowledge_each(queue: Any, events: int, witness: Witness) -> None:
    decode = msgspec.json.Decoder(Order).decode
    last = None
    for _ in range(events):
        # Go on from the last id: a plain get() walks over all events that were acknowledged before.
        taken = queue.get(block=False, raw=True, id=last, next_in_order=last is not None)
        last = taken["pqid"]
        order = decode(taken["data"])
        witness.saw(order.customer, order.number)
        queue.ack(id=last)


def _acknowledge_batches(queue: Any, events: int, witness: Witness) -> None:
    decode = msgspec.json.Decoder(Order).decode
    for number in range(1, events + 1):
        order = decode(queue.get(block=False))
        witness.saw(order.customer, order.number)
        if number % BATCH == 0 or number == events:
            queue.task_done()
