"""Handlers and an application that worker processes can import. The environment sets the database and the log."""

import os
import time
from pathlib import Path

import msgspec

from onward import Event, Onward, Retry, context

app = Onward(
    f"sqlite:///{os.environ.get('PROGRAM_DB', 'unused.db')}",
    lease_s=2.0,
    takeover_grace_s=0.1,
    drain_timeout_s=float(os.environ.get("PROGRAM_DRAIN_S", "10")),
)


class Order(msgspec.Struct, frozen=True):
    n: int
    seconds: float = 0.0
    deadly: bool = False


class Line(msgspec.Struct, frozen=True):
    n: int
    step: str
    attempt: int
    pid: int


def _write(order: Order, step: str) -> None:
    line = Line(order.n, step, context.current().attempt, os.getpid())
    with open(os.environ["PROGRAM_LOG"], "ab", buffering=0) as log:
        log.write(msgspec.json.encode(line) + b"\n")


def lines(log: Path, step: str) -> list[Line]:
    found = log.read_bytes().splitlines() if log.exists() else []
    return [line for each in found if (line := msgspec.json.decode(each, type=Line)).step == step]


@app.handler(
    "orders",
    group="g",
    engine="processes",
    workers=2,
    concurrency=32,
    retry=Retry(attempts=3, first_delay_s=0.01, jitter=0),
)
def handle(order: Order, event: Event) -> None:
    _write(order, "begin")
    if order.deadly and context.current().attempt == 1:
        os.kill(os.getpid(), 9)
    end = time.monotonic() + order.seconds
    while time.monotonic() < end:  # busy, so that only a signal of the system can end it
        pass
    _write(order, "end")


def never_there(order: Order) -> None: ...
