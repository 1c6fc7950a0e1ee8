"""`onward demo --check`: a number of orders, one worker killed half-way, and a verdict."""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from onward import Onward, brokers
from onward.demo import effects
from onward.demo.fleet import Fleet
from onward.demo.judge import Balance, Effect, Judge
from onward.demo.shop import Shop, Work, dead_letters, open_app, open_shop
from onward.demo.sweep import reach

KEYS = 1_000
STALL_S = 30.0  # the run has failed if nothing is accepted and nothing is handled for this time
MOST_DEATHS = 6  # the run has failed if its workers end by themselves this often
_LOOK_EVERY_S = 0.02


class Verdict(msgspec.Struct, frozen=True):
    balance: Balance
    why: str  # empty when all is well
    durability: str
    killed_pid: int | None
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.why

    def line(self) -> str:
        return f"verdict: {'OK' if self.ok else 'FAILED'} {summary(self.balance)}"

    def json(self) -> str:
        balance = {name: value for name, value in self.balance._asdict().items() if name != "in_flight"}
        rest = {"durability": self.durability, "killed_pid": self.killed_pid, "seconds": round(self.seconds, 3)}
        word = "OK" if self.ok else "FAILED"
        return msgspec.json.encode({"verdict": word, **balance, **rest, "why": self.why}).decode()


class CheckScreen:
    """Shows the progress of a run. This one shows nothing; the command line has one for terminals."""

    def say(self, text: str) -> None: ...

    def done(self, orders: int) -> None: ...


class Check:
    """One run in a folder of its own."""

    def __init__(
        self, folder: Path, *, events: int, workers: int, reader: CheckScreen, work: Work | None = None
    ) -> None:
        self._folder = folder
        self._events = events
        self._workers = workers
        self._reader = reader
        self._work = work or Work()
        self._killed_pid: int | None = None
        self._deaths = 0

    async def run(self) -> Verdict:
        started = time.monotonic()
        if task := asyncio.current_task():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        effects.create(self._folder)
        async with open_app(self._folder) as app:
            durability = app.broker.features.durability
            where = brokers.label(app.settings)
            await reach(app.broker, self._folder)
            keys = min(KEYS, self._events)
            self._reader.say(
                f"{self._events:,} orders of {keys:,} customers, {self._workers} workers, {where} with {durability}"
            )
            async with open_shop(self._folder, app) as shop:
                why = await self._flow(app, shop)
            dead = await dead_letters(app, self._folder)
        balance, reasons = judged(self._folder, dead)
        if why:
            reasons.insert(0, why)
        return Verdict(balance, "; ".join(reasons), durability, self._killed_pid, time.monotonic() - started)

    async def _flow(self, app: Onward, shop: Shop) -> str:
        """Place the orders, run the workers, kill one, stop all of them. Returns why it gave up; "" if it did not."""
        fleet = Fleet(self._folder, self._workers, self._work, self._report)
        placing = asyncio.create_task(shop.place(customers(self._events)))
        try:
            why = await self._watch(app, placing, fleet)
            await fleet.stop()  # running orders finish and are in the effects before the verdict
            return why
        finally:
            fleet.end_now()
            placing.cancel()
            await asyncio.wait([placing])

    async def _watch(self, app: Onward, placing: asyncio.Task[object], fleet: Fleet) -> str:
        judge = Judge(self._folder)
        moved = time.monotonic()
        with contextlib.closing(judge):
            while judge.balance().handled + judge.balance().dead < self._events:
                if placing.done():
                    placing.result()  # raises if the shop has failed
                news = judge.read()
                self._kill_half_way(judge.balance(), news.effects, fleet)
                fleet.tend()
                if news.published or news.effects or judge.bury(await dead_letters(app, self._folder)):
                    moved = time.monotonic()
                if time.monotonic() - moved > STALL_S:
                    return f"nothing moved for {STALL_S:.0f} s"
                if self._deaths >= MOST_DEATHS:
                    return "the workers keep ending by themselves"
                await asyncio.sleep(_LOOK_EVERY_S)
        return ""

    def _kill_half_way(self, balance: Balance, recent: Sequence[Effect], fleet: Fleet) -> None:
        self._reader.done(balance.handled)
        if self._killed_pid is not None or balance.handled * 2 < self._events:
            return
        busiest = Counter(effect.worker for effect in recent).most_common(1)
        slot = busiest[0][0] if busiest else 1
        self._killed_pid = fleet.kill(slot)
        self._reader.say(f"killed worker {slot} (pid {self._killed_pid}) with SIGKILL after {balance.handled:,} orders")

    def _report(self, kind: str, text: str) -> None:
        if kind == "bad":
            self._deaths += 1
            self._reader.say(text)


def judged(folder: Path, dead: Iterable[int]) -> tuple[Balance, list[str]]:
    """The verdict of a new judge that reads only the results, and the faults that it found."""
    with contextlib.closing(Judge(folder)) as judge:
        judge.read()
        judge.bury(dead)
        balance = judge.verdict()
        return balance, list(_reasons(judge, balance))


def _reasons(judge: Judge, balance: Balance) -> Iterator[str]:
    if balance.lost:
        yield f"{balance.lost} orders were promised and never handled: {_some(judge.missing())}"
    if unknown := judge.unknown():
        yield f"{len(unknown)} orders were handled that the shop never committed: {_some(unknown)}"
    if balance.inverted:
        yield f"{balance.inverted} orders were handled after a later one of their customer"
    if wrongly := judge.wrongly_dead():
        yield f"{len(wrongly)} orders were given up though nothing was wrong with them: {_some(wrongly)}"


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers[:10]) + (", …" if len(numbers) > 10 else "")


def summary(balance: Balance) -> str:
    names = ("published", "handled", "dead", "lost", "inverted", "duplicates")
    return " ".join(f"{name}={getattr(balance, name)}" for name in names)


def customers(events: int) -> Sequence[str]:
    """The customer of each order. Every customer appears equally often, in a shuffled but repeatable order."""
    names = [f"c-{i % KEYS:04d}" for i in range(events)]
    random.Random(8400).shuffle(names)
    return names
