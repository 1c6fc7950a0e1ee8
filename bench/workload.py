"""The events for every contestant: typed orders of 1,000 customers, 300 bytes of JSON each."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from onward import Onward

TOPIC = "orders"
KEYS = 1_000
VALUE_BYTES = 300
PARTITIONS = 8
T = TypeVar("T")

Item = tuple[str, bytes]  # key and value


class Order(msgspec.Struct):
    customer: str
    number: int  # of this customer's orders, from 0
    note: str


def items(count: int, *, keys: int = KEYS, value_bytes: int = VALUE_BYTES) -> Iterator[Item]:
    """Orders of customers in a random sequence that is the same in every run."""
    customers = random.Random(7)
    numbers: Counter[str] = Counter()
    for _ in range(count):
        customer = f"c-{customers.randrange(keys)}"
        yield customer, value(customer, numbers[customer], value_bytes)
        numbers[customer] += 1


def value(customer: str, number: int, value_bytes: int = VALUE_BYTES) -> bytes:
    bare = msgspec.json.encode(Order(customer, number, ""))
    return bare[:-2] + b"x" * (value_bytes - len(bare)) + bare[-2:]


def burn(loops: int) -> int:
    """Compute in pure Python. `loops_for` gives the number of loops for a duration."""
    total = 0
    for number in range(loops):
        total += number * number
    return total


def loops_for(work_us: float) -> int:
    """How many loops take this long, on this machine when it is idle."""
    trial, times = 2_000, []
    for _ in range(20):
        before = time.perf_counter()
        burn(trial)
        times.append((time.perf_counter() - before) * 1e6)
    return int(trial * work_us / min(times))


def batches(source: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(source)
    while batch := list(islice(rest, size)):
        yield batch


def application(path: Path | str) -> Onward:
    """Onward on a SQLite file, as a user would open it. It retains consumed events for the next round."""
    return Onward(f"sqlite:///{path}", partitions=PARTITIONS, durability="fsync", retention_bytes=1 << 30)


def fill(path: Path, count: int, *, batch: int = 100) -> None:
    """Publish this many events, `batch` per call. The size of a call decides how many events share a row of the log."""
    asyncio.run(_fill(path, count, batch))


async def _fill(path: Path, count: int, size: int) -> None:
    async with application(path) as app:
        for batch in batches(items(count), size):
            await app.publish_many(TOPIC, batch)


async def settled(path: Path, group: str) -> int:
    """How many events the group has settled, as the broker stores it."""
    async with application(path) as app:
        groups = {info.group: info for info in await app.broker.groups(TOPIC)}
    return sum(each.watermark for each in groups[group].partitions.values()) if group in groups else 0
