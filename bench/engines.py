"""The three engines: what an event costs, compared with a bare asyncio program, one process and multiprocessing.Pool.

"CPU" is the processor time of all processes together. On a busy machine it is more reliable than wall time.
"""

import asyncio
import hashlib
import math
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bench.kit import Bench, Figure, median, ratios, spread
from onward import Event, Onward
from onward.brokers.base import Assigned, Message
from onward.engines.base import Ended
from onward.engines.processes import ProcessEngine
from onward.engines.target import target_of
from onward.engines.tasks import TaskEngine
from onward.event import Delivery, Partition
from onward.failure.retry import Retry
from onward.flow.consumer import Consumer
from onward.handler import Handler, bind
from onward.settings import Settings

KEYS = 1_000
SLEEP_S = 0.005
PARTS = [Partition("orders", index) for index in range(4)]
WORKERS = 2
IN_FLIGHT = 400
PUBLISHED = 2_000
CHUNKS = (1, 4, 16, 64, 256)


class Order(msgspec.Struct):
    n: int
    loops: int = 0
    note: str = ""


class Cost(msgspec.Struct, frozen=True):
    """The cost of one event, in one round."""

    wall_us: float
    cpu_us: float

    @property
    def per_s(self) -> float:
        return 1e6 / self.wall_us


# -- handlers ------------------------------------------------------------------------------------------------------


seen: list[int] = []


async def nothing(order: Order) -> None:
    seen.append(order.n)


async def sleeping(order: Order) -> None:
    seen.append(order.n)
    await asyncio.sleep(SLEEP_S)


async def sleep_5ms(order: Order) -> None:
    await asyncio.sleep(0.005)


def sleep_5ms_plain(order: Order) -> None:
    time.sleep(0.005)


def hash_500(order: Order) -> None:
    digest = str(order.n).encode()
    for _ in range(500):
        digest = hashlib.sha256(digest).digest()


def burn(order: Order) -> int:
    total = 0
    for number in range(order.loops):
        total += number * number
    return total


def burn_delivery(delivery: Delivery) -> None:
    _burn(delivery)


_burn = bind(burn)


# -- the plane and the task engine, without a broker ---------------------------------------------------------------


class Feed:
    """A broker whose deliveries are all in memory."""

    def __init__(self, count: int) -> None:
        self._messages: list[list[Message]] = [[Assigned(part, 1, 1, "log", None, False) for part in PARTS]]
        positions = [0] * len(PARTS)
        for start in range(0, count, KEYS):
            batch: list[Message] = []
            for n in sorted(range(start, min(start + KEYS, count)), key=lambda n: n % len(PARTS)):
                part = n % KEYS % len(PARTS)
                batch.append(_delivery(n, Order(n, note="x" * 250), part, positions[part]))
                positions[part] += 1
            self._messages.append(batch)
        self._messages.reverse()
        self._room = asyncio.Event()
        self._paused: set[Partition] = set()

    async def subscribe(self, *_: object, **__: object) -> "Feed":
        return self

    async def owners(self, *_: object) -> Sequence[Any]:
        return []

    def aside(self, group: str) -> "Feed":
        return self

    async def load(self, *_: object, **__: object) -> list[Any]:
        return []

    async def receive(self, limit: int, max_bytes: int, wait_s: float) -> Sequence[Message]:
        while self._paused:
            self._room.clear()
            await self._room.wait()
        await asyncio.sleep(0 if self._messages else wait_s)
        return self._messages.pop() if self._messages else []

    async def settle(self, *_: object, **__: object) -> list[Partition]:
        return []

    async def release(self, *_: object, **__: object) -> None: ...

    async def lag(self) -> dict[Partition, Any]:
        return {}

    def troubles(self) -> Sequence[str]:
        return ()

    def sure_until(self) -> float:
        return math.inf

    async def pause(self, partitions: Sequence[Partition]) -> None:
        self._paused |= set(partitions)

    async def resume(self, partitions: Sequence[Partition]) -> None:
        self._paused -= set(partitions)
        self._room.set()

    async def close(self) -> None: ...


async def stack(function: Callable[[Order], Coroutine[Any, Any, None]], count: int) -> Cost:
    """Consumer, plane and task engine, with 1,000 events at once."""
    seen.clear()
    feed: Any = Feed(count)
    handler = _handler(function)
    engine = TaskEngine(handler.call, concurrency=KEYS, timeout_s=30.0)
    consumer = Consumer(feed, engine, handler, Settings(), member="bench")
    with _measured(count) as cost:
        running = asyncio.create_task(consumer.run())
        while consumer.plane.counts.done < count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    consumer.stop()
    await running
    return cost[0]


def _judge(bench: Bench, what: str, count: int) -> None:
    """Check that every event was seen once, and those of each key in order."""
    by_key: dict[int, list[int]] = defaultdict(list)
    for n in seen:
        by_key[n % KEYS].append(n)
    ordered = all(numbers == sorted(set(numbers)) for numbers in by_key.values())
    bench.check(what, ordered and len(seen) == count, f"{len(seen):,} of {count:,} seen, in order: {ordered}")


async def bare_sleepers(count: int) -> Cost:
    left = count

    async def sleeper() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await asyncio.sleep(SLEEP_S)

    with _measured(count) as cost:
        await asyncio.gather(*(sleeper() for _ in range(KEYS)))
    return cost[0]


def _tasks(bench: Bench) -> None:
    count, rounds = bench.sized((50_000, 7), (20_000, 3))
    bench.say("engines: tasks, typed no-op")
    costs = []
    for _ in range(rounds):
        costs.append(asyncio.run(stack(nothing, count)))
        _judge(bench, "tasks, typed no-op", count)
    cpu_us = [cost.cpu_us for cost in costs]
    bench.add(
        Figure(
            what="tasks, typed no-op: plane + engine",
            measured=f"{spread(cpu_us, '.1f')} µs CPU",
            value=median(cpu_us),
            target="≤ 10 µs",
            met=median(cpu_us) <= 10,
            samples={"cpu_us": cpu_us},
        )
    )
    bench.say("engines: tasks, 1,000 sleepers")
    ours: list[Cost] = []
    bare: list[Cost] = []
    for _ in range(rounds):
        ours.append(asyncio.run(stack(sleeping, count)))
        _judge(bench, "tasks, sleeping", count)
        bare.append(asyncio.run(bare_sleepers(count)))
    bench.add(_against("tasks, sleeping 5 ms, 1,000 at once", ours, "bare asyncio", bare, 0.8))


# -- processes -----------------------------------------------------------------------------------------------------


async def _engine_round(deliveries: Sequence[Delivery], workers: int) -> Cost:
    engine = ProcessEngine(target_of(burn), workers=workers, concurrency=IN_FLIGHT, timeout_s=30.0)
    done = asyncio.get_running_loop().create_future()
    left, rest = len(deliveries), iter(deliveries[IN_FLIGHT:])

    def take(results: Sequence[Ended]) -> None:
        nonlocal left
        assert not any(each.error or each.cancelled for each in results)
        left -= len(results)
        engine.submit([each for _, each in zip(results, rest, strict=False)])
        if not left:
            done.set_result(None)

    engine.start(take)
    while engine.health().workers < workers:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with _measured(len(deliveries)) as cost:
        engine.submit(deliveries[:IN_FLIGHT])
        await done
    await engine.close()
    return cost[0]


def _pool_round(items: Sequence[Any], function: Callable[[Any], None], chunk: int) -> Cost:
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        list(pool.imap_unordered(function, items[: 10 * WORKERS]))
        with _measured(len(items)) as cost:
            count = sum(1 for _ in pool.imap_unordered(function, items, chunksize=chunk))
    assert count == len(items)
    return cost[0]


def _alone_round(deliveries: Sequence[Delivery]) -> Cost:
    with _measured(len(deliveries)) as cost:
        for delivery in deliveries:
            _burn(delivery)
    return cost[0]


def _processes(bench: Bench) -> None:
    for name, work_us, count in (("1 ms", 1_000, 1_200), ("50 µs", 50, 16_000)):
        bench.say(f"engines: processes, {name} of pure Python")
        count = bench.sized(count, count // 2)
        deliveries = [_delivery(n, Order(n, _loops(work_us), "x" * 200), 0, n) for n in range(count)]
        best = _best_chunk(deliveries)
        ours: list[Cost] = []
        alone: list[Cost] = []
        pool: list[Cost] = []
        for _ in range(bench.sized(5, 3)):
            alone.append(_alone_round(deliveries[: count // 2]))
            ours.append(asyncio.run(_engine_round(deliveries, WORKERS)))
            pool.append(_pool_round(deliveries, burn_delivery, best))
        what, slow = f"processes, {name} of pure Python, {WORKERS} workers", work_us == 1_000
        bench.add(_against(what, ours, "one process", alone, 1.8 if slow else None))
        bench.add(_against(what, ours, f"Pool.imap_unordered, chunks of {best}", pool, 0.95 if slow else 1.0))


def _best_chunk(deliveries: Sequence[Delivery]) -> int:
    return min(CHUNKS, key=lambda chunk: _pool_round(deliveries, burn_delivery, chunk).wall_us)


def _loops(work_us: float) -> int:
    """How many turns of `burn` take this long, on this machine when it is idle."""
    trial = 2_000
    times: list[float] = []
    for _ in range(20):
        before = time.perf_counter()
        burn(Order(0, trial))
        times.append((time.perf_counter() - before) * 1e6)
    return int(trial * work_us / min(times))


# -- the whole stack on SQLite, with the workloads that pyrallel-consumer publishes -------------------------------


async def _application(bench: Bench, path: Path, function: Callable[[Order], Any], **options: Any) -> float:
    """Events per second, from the first event that is done to the last."""
    app = Onward(f"sqlite:///{path}", partitions=4)
    app.handler("orders", group="bench", **options)(function)
    async with app:
        await app.publish_many("orders", [(f"key-{n % 100}", Order(n)) for n in range(PUBLISHED)])
        running = asyncio.create_task(app.run())
        first = first_done = 0.0
        while (done := sum(reading.done for reading in app.readings())) < PUBLISHED:
            assert not running.done(), running.exception()
            if done and not first:
                first, first_done = time.perf_counter(), done
            await asyncio.sleep(0.001)
        last = time.perf_counter()
        (reading,) = app.readings()
        counts = f"done {reading.done}, dead {reading.dead}, retried {reading.retried}"
        bench.check(f"SQLite, {function.__name__}", counts == f"done {PUBLISHED}, dead 0, retried 0", counts)
        app.stop()
        await running
    return (PUBLISHED - first_done) / (last - first)


def _published(bench: Bench) -> None:
    """2,000 events, 4 partitions, 100 keys in order. The peer measured on Kafka and did not state its hardware."""
    workloads: list[tuple[str, Callable[[Order], Any], dict[str, Any], str]] = [
        ("sleep 5 ms, tasks", sleep_5ms, {}, "2,206 /s async"),
        ("sleep 5 ms, threads", sleep_5ms_plain, {}, "910 /s process"),
        ("cpu 500 hashes, processes", hash_500, {"engine": "processes", "workers": WORKERS}, "2,072 /s process"),
    ]
    for name, function, options, theirs in workloads:
        bench.say(f"engines: whole stack on SQLite, {name}")
        rates = [
            asyncio.run(_application(bench, bench.path(f"{function.__name__}-{turn}.db"), function, **options))
            for turn in range(bench.sized(5, 2))
        ]
        bench.add(
            Figure(
                what=f"SQLite, 4 partitions, 100 keys, {name}",
                measured=f"{spread(rates)} /s",
                value=median(rates),
                beside=f"pyrallel-consumer publishes {theirs}, on Kafka and a machine not stated",
                samples={"per_s": rates},
            )
        )


# -- measuring -----------------------------------------------------------------------------------------------------


def _delivery(n: int, order: Order, part: int, position: int) -> Delivery:
    return Delivery(Event(str(n), "orders", f"c-{n % KEYS}", msgspec.json.encode(order)), PARTS[part], position, 1)


def _handler(function: Callable[..., Any]) -> Handler:
    return Handler(
        topic="orders",
        group="bench",
        name="bench",
        function=function,
        call=bind(function),
        ordering="key",
        concurrency=KEYS,
        engine="tasks",
        workers=None,
        max_events_per_worker=None,
        timeout_s=30.0,
        retry=Retry(),
        start="earliest",
        on_dead="pass",
        batch_size=1,
        batch_wait_s=0.0,
    )


@contextmanager
def _measured(events: int) -> Iterator[list[Cost]]:
    """Measure wall time, and the processor time of this process and its children."""
    found: list[Cost] = []
    wall, cpu = time.perf_counter(), _cpu_s()
    yield found
    found.append(Cost((time.perf_counter() - wall) * 1e6 / events, (_cpu_s() - cpu) * 1e6 / events))


def _cpu_s() -> float:
    children = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    # The id that Linux gives to the processor clock of another process.
    return time.process_time() + sum(time.clock_gettime(~int(pid) << 3 | 2) for pid in children)


def _against(what: str, ours: list[Cost], name: str, theirs: list[Cost], least: float | None) -> Figure:
    ratio = ratios([cost.per_s for cost in ours], [cost.per_s for cost in theirs])
    cpu_ratio = ratios([cost.cpu_us for cost in theirs], [cost.cpu_us for cost in ours])
    return Figure(
        what=what,
        measured=_rates(ours),
        value=median([cost.per_s for cost in ours]),
        beside=f"{name}: {_rates(theirs)}; per CPU second {cpu_ratio:.2f}x",
        ratio=ratio,
        target="" if least is None else f"≥ {least:g}x" if least != 1.0 else "ahead",
        met=None if least is None else ratio >= least,
        samples={"ours": [cost.per_s for cost in ours], name: [cost.per_s for cost in theirs]},
    )


def _rates(costs: list[Cost]) -> str:
    return f"{spread([cost.per_s for cost in costs])} /s, {median([cost.cpu_us for cost in costs]):,.1f} µs CPU"


def run(bench: Bench) -> None:
    _tasks(bench)
    _processes(bench)
    _published(bench)
