"""`onward demo`: the shop takes orders until you stop it, and a page shows what becomes of them."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from onward import Onward
from onward.brokers.base import AsideRecord
from onward.demo import effects
from onward.demo.check import KEYS
from onward.demo.fleet import Fleet
from onward.demo.judge import Balance, Judge, News
from onward.demo.page import DemoPage, Server
from onward.demo.shop import ATTEMPTS, PARTITIONS, Shop, Work, dead_letters, group_of, lane_of, open_app
from onward.demo.sweep import reach
from onward.demo.view import TICK_S, LaneView, Log, View
from onward.errors import BrokerError

# Slow enough that a burst lasts some seconds: you can kill a worker in the middle of it.
LIVE = Work(concurrency=20, longest_s=0.05)
ORDERS_PER_S = 20
REGULARS = 24  # customers who order again and again, so that the page shows their sequences grow
BEHIND_POISON = 3  # orders of the same customer that follow a poison one
MOST_IN_FLIGHT = 50_000  # with more than these the shop refuses another burst
MOST_AT_ONCE = 5  # bursts and poison orders that the shop places at the same time
_LOOK_FOR_DEAD_S = 1.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run(folder: Path, server: Server, *, workers: int, burst: int, say: Callable[[str], None]) -> Balance:
    """Run until SIGINT, SIGTERM or SIGHUP. Returns the balance at that time."""
    loop = asyncio.get_running_loop()
    stop = stop_on_signals(loop)
    effects.create(folder)
    async with open_app(folder) as app:
        await reach(app.broker, folder)
        with contextlib.closing(Shop(folder, app)) as shop:
            live = Live(folder, app, shop, workers=workers, burst=burst)
            page = DemoPage(server, live.door(loop))
            say(f"the shop is open: {server.url}  (Ctrl-C ends it)")
            try:
                await live.run(page, stop)
            finally:
                page.close()
                await live.close()
            say("the shop is closed, its workers have ended")
    return live.balance


def stop_on_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """The event that the first signal sets. A second signal ends the process at once, as the system does it."""
    stop = asyncio.Event()

    def first() -> None:
        stop.set()
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, first)
    return stop


class FollowedOrders:
    """Poison orders, replayed orders and bursts that are not finished. The log says what becomes of them."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._poison: set[int] = set()
        self._replayed: set[int] = set()
        self._bursts: list[tuple[float, int, int]] = []  # when, first and last number

    @property
    def poisoned(self) -> bool:
        """Some poison order is not a dead letter yet."""
        return bool(self._poison)

    def add_poison(self, number: int, customer: str) -> None:
        self._poison.add(number)
        self._log.add("shop", f"poison order {number} of {customer} placed, {BEHIND_POISON} more behind it")

    def add_replayed(self, numbers: Collection[int], left: int) -> None:
        self._replayed.update(numbers)
        names = ", ".join(str(number) for number in numbers)
        self._log.add("shop", f"order {names} replayed, at the head of its lane; {left} left")

    def add_burst(self, started: float, first: int, last: int) -> None:
        count, spent_s = last + 1 - first, time.monotonic() - started
        self._log.add("shop", f"burst: {count:,} orders committed in {spent_s:.1f} s")
        self._bursts.append((started, first, last))

    def take(self, news: News, judge: Judge) -> None:
        for effect in news.effects:
            if effect.number in self._replayed and effect.done:
                self._replayed.discard(effect.number)
                self._log.add("good", f"order {effect.number} of {effect.customer} was replayed and handled")
            if effect.number in self._poison and not effect.done:
                text = f"order {effect.number} of {effect.customer} failed, try {effect.attempt} of {ATTEMPTS}"
                self._log.add("bad", text)
        for burst in [*self._bursts]:
            started, first, last = burst
            if all(judge.is_done(number) for number in range(first, last + 1)):
                self._bursts.remove(burst)
                spent_s = time.monotonic() - started
                self._log.add("good", f"burst: all of it handled {spent_s:.1f} s after the click")

    def bury(self, number: int, customer: str) -> None:
        behind = f"; the orders of {customer} behind it went on, in order" if number in self._poison else ""
        self._poison.discard(number)
        self._log.add("bad", f"order {number} was given up after {ATTEMPTS} tries: a dead letter{behind}")


class DeadOrders:
    """The dead letters of the shop, by order number, as they were last read."""

    def __init__(self, app: Onward, folder: Path) -> None:
        self._app = app
        self._folder = folder
        self._read_at = 0.0  # not read before this time, unless something may have changed
        self.records: Mapping[int, AsideRecord] = {}

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._read_at

    async def read(self) -> Mapping[int, AsideRecord]:
        self._read_at = time.monotonic() + _LOOK_FOR_DEAD_S
        self.records = await dead_letters(self._app, self._folder)
        return self.records

    async def replay(self, numbers: Collection[int]) -> tuple[Mapping[int, AsideRecord], int]:
        """Replay those that are still dead. Returns them, and how many dead letters are left."""
        chosen = {number: self.records[number] for number in numbers if number in self.records}
        ids = [record.id for record in chosen.values()]
        answer = await self._app.dead.replay(group=group_of(self._folder), ids=ids)
        self.records = {number: record for number, record in self.records.items() if number not in chosen}
        return chosen, answer.left


class Live:
    """The running demo: a shop, a fleet and a judge, and what the page's buttons do to them."""

    def __init__(self, folder: Path, app: Onward, shop: Shop, *, workers: int, burst: int) -> None:
        self._lease_s = app.settings.lease_s
        # By `run` an open page notices that another demo has taken the place of this one.
        facts = {
            "run": f"{os.getpid()}-{time.time():.0f}",
            "burst": burst,
            "attempts": ATTEMPTS,
            "lease_s": self._lease_s,
        }
        self._view = View(LaneView(PARTITIONS, lane_of), facts)
        self._fleet = Fleet(folder, workers, LIVE, self._view.log.add)
        self._judge = Judge(folder)
        self._shop = shop
        self._burst = burst
        self._dead = DeadOrders(app, folder)
        self._followed = FollowedOrders(self._view.log)
        self._tasks: set[asyncio.Task[None]] = set()
        self.balance = self._judge.balance()

    async def run(self, page: DemoPage, stop: asyncio.Event) -> None:
        self._begin(self._keep_ordering())
        while not stop.is_set():
            page.show(await self._tick())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), TICK_S)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._fleet.stop()
        finally:
            self._fleet.end_now()
        self._judge.read()
        self._judge.bury(await self._dead.read())
        self.balance = self._judge.balance()
        self._judge.close()

    # -- what goes on by itself -------------------------------------------------------------------------------------

    async def _tick(self) -> Mapping[str, Any]:
        self._fleet.tend()
        news = self._judge.read()
        self._followed.take(news, self._judge)
        # Read after the effects: an order that they show as overtaken should be in the dead letters by now.
        if self._followed.poisoned or self._judge.overtaken or self._dead.due:
            try:
                self._bury(await self._dead.read())
            except BrokerError as error:
                self._view.log.add("bad", f"the dead letters cannot be read just now: {error}")
        self.balance = self._judge.balance()
        self._view.take(news, self.balance)
        return self._view.snapshot(self.balance, news, self._fleet.workers, self._dead.records)

    async def _keep_ordering(self) -> None:
        while True:
            try:
                await self._shop.place([f"c-{random.randrange(REGULARS):04d}"])
            except BrokerError as error:
                self._view.log.add("bad", f"an order was placed, but not published: {error}")
            await asyncio.sleep(random.expovariate(ORDERS_PER_S))

    def _bury(self, dead: Mapping[int, AsideRecord]) -> None:
        for number in self._judge.bury(dead):
            customer = dead[number].event.key or ""
            self._view.lanes.bury(customer)
            self._followed.bury(number, customer)

    # -- what the buttons do ----------------------------------------------------------------------------------------

    def door(self, loop: asyncio.AbstractEventLoop) -> Callable[[str, Mapping[str, str]], tuple[HTTPStatus, str]]:
        """The way from the page's threads into the event loop."""
        actions = {"kill": self._kill, "poison": self._send_poison, "burst": self._send_burst, "replay": self._replay}

        async def act(action: str, arguments: Mapping[str, str]) -> tuple[HTTPStatus, str]:
            return actions[action](arguments)

        return lambda action, arguments: asyncio.run_coroutine_threadsafe(act(action, arguments), loop).result(10)

    def _kill(self, arguments: Mapping[str, str]) -> tuple[HTTPStatus, str]:
        alive = [worker.slot for worker in self._fleet.workers if worker.alive]
        slot = arguments.get("worker", "")
        if not slot and alive:
            slot = str(max(alive, key=self._view.rate_of))
        if slot not in map(str, alive):
            return HTTPStatus.CONFLICT, "no worker is alive there"
        pid = self._fleet.kill(int(slot))
        text = f"worker {slot} (pid {pid}) killed with SIGKILL; its lease passes in {self._lease_s:.0f} s"
        self._view.log.add("bad", text)
        return HTTPStatus.ACCEPTED, text

    def _send_poison(self, _: Mapping[str, str]) -> tuple[HTTPStatus, str]:
        if len(self._tasks) > MOST_AT_ONCE:
            return HTTPStatus.CONFLICT, "one thing after the other: the shop is still placing orders"
        self._begin(self._poisoned())
        return HTTPStatus.ACCEPTED, "a poison order is on its way"

    async def _poisoned(self) -> None:
        customer = f"c-{random.randrange(REGULARS):04d}"
        (order,) = await self._shop.place([customer], poison=True)
        self._followed.add_poison(order.number, customer)
        await self._shop.place([customer] * BEHIND_POISON)

    def _replay(self, arguments: Mapping[str, str]) -> tuple[HTTPStatus, str]:
        """One dead order by its number, or all of them."""
        number = arguments.get("order", "")
        chosen = [each for each in self._dead.records if number in ("", str(each))]
        if not chosen:
            return HTTPStatus.CONFLICT, "no such dead letter: it is on its way back, or was handled"
        self._begin(self._replaying(chosen))
        return HTTPStatus.ACCEPTED, f"{len(chosen)} to be replayed"

    async def _replaying(self, numbers: Collection[int]) -> None:
        letters, left = await self._dead.replay(numbers)
        for letter in letters.values():
            self._view.lanes.revive(letter.event.key or "")
        self._followed.add_replayed(letters, left)

    def _send_burst(self, _: Mapping[str, str]) -> tuple[HTTPStatus, str]:
        if len(self._tasks) > MOST_AT_ONCE or self.balance.in_flight > MOST_IN_FLIGHT:
            return HTTPStatus.CONFLICT, f"{self.balance.in_flight:,} orders are still in flight; let them land first"
        self._begin(self._bursting())
        return HTTPStatus.ACCEPTED, f"{self._burst:,} orders are on their way"

    async def _bursting(self) -> None:
        started = time.monotonic()
        orders = await self._shop.place([f"c-{random.randrange(KEYS):04d}" for _ in range(self._burst)])
        self._followed.add_burst(started, orders[0].number, orders[-1].number)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._view.log.add("bad", f"the shop stumbled: {error}")
