"""`onward demo`: the shop places orders until you stop it, and a page shows what happens to them."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from onward import Onward, brokers
from onward.brokers.base import AsideRecord
from onward.demo import effects
from onward.demo.check import KEYS
from onward.demo.fleet import Fleet
from onward.demo.follow import FollowedOrders
from onward.demo.judge import Balance, Judge
from onward.demo.page import DemoPage, Server
from onward.demo.shop import (
    ATTEMPTS,
    PARTITIONS,
    CardDeclined,
    Shop,
    Work,
    dead_letters,
    group_of,
    open_app,
    open_shop,
    partition_index,
)
from onward.demo.sweep import reach
from onward.demo.view import TICK_S, PartitionView, View
from onward.errors import BrokerError
from onward.signals import STOP_SIGNALS

# Slow enough to watch. A burst lasts some seconds, so you can kill a worker in the middle of it. The three attempts of
# a poison order take 2 + 4 seconds, so you can watch its customer wait.
LIVE = Work(concurrency=20, longest_s=0.05, first_wait_s=2.0)
ORDERS_PER_S = 20
REGULARS = 24  # customers that order again and again, so that the page shows their sequences grow
BEHIND_POISON = 3  # orders of the same customer that are placed right after a poison order
MOST_IN_FLIGHT = 50_000  # with more orders in flight the shop refuses another burst
MOST_AT_ONCE = 5  # bursts and poison orders that the shop places at the same time
_LOOK_FOR_DEAD_S = 1.0
_REPLAY_WAIT_S = 8.0
_STOP_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)

Answer = tuple[HTTPStatus, str]
T = TypeVar("T")


async def run(folder: Path, server: Server, *, workers: int, burst: int, say: Callable[[str], None]) -> Balance:
    """Run until SIGINT, SIGTERM or SIGHUP. Returns the balance at that time."""
    loop = asyncio.get_running_loop()
    stop = stop_on_signals(loop)
    effects.create(folder)
    async with open_app(folder) as app:
        await reach(app.broker, folder)
        async with open_shop(folder, app) as shop:
            live = Live(folder, app, shop, workers=workers, burst=burst)
            page = DemoPage(server, live.door(loop))
            say(f"The demo is running: {server.url}  (Ctrl-C ends it)")
            try:
                await live.run(page, stop)
            finally:
                try:
                    await live.close(page)
                finally:
                    page.close()
            say("The demo has ended, and so have its workers.")
    return live.balance


def stop_on_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """The event that the first signal sets. A second signal has the system's default effect: it ends the process."""
    stop = asyncio.Event()

    def first() -> None:
        stop.set()
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, first)
    return stop


class DeadOrders:
    """The dead letters of the shop, by order number, as they were last read."""

    def __init__(self, app: Onward, folder: Path) -> None:
        self._app = app
        self._folder = folder
        self._read_at = 0.0  # the next time to read them, if nothing suggests a change earlier
        self.records: Mapping[int, AsideRecord] = {}

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._read_at

    async def read(self) -> Mapping[int, AsideRecord]:
        self._read_at = time.monotonic() + _LOOK_FOR_DEAD_S
        self.records = await dead_letters(self._app, self._folder)
        return self.records

    async def show(self, number: int) -> str | None:
        """The whole letter as JSON, as `onward dead show --json` prints it; None if there is no such letter."""
        if number not in self.records:
            return None
        letters = self._app.dead.export(group=group_of(self._folder), ids=self.records[number].id)
        async for line in letters:
            return line.decode()
        return None

    async def replay(self, numbers: Collection[int]) -> tuple[Mapping[int, AsideRecord], int]:
        """Replay those that are still dead. Returns them, and how many were replayed."""
        chosen = {number: self.records[number] for number in numbers if number in self.records}
        ids = [record.id for record in chosen.values()]
        if not ids:
            return {}, 0
        answer = await self._app.dead.replay(group=group_of(self._folder), ids=ids)
        self.records = {number: record for number, record in self.records.items() if number not in chosen}
        return chosen, answer.replayed


class Facts(NamedTuple):
    """What stays the same in every snapshot. By `run` an open page notices a new demo on the same port."""

    run: str
    broker: str
    burst: int
    lease_s: float
    attempts: int = ATTEMPTS


class Live:
    """The running demo: a shop, a fleet and a judge, and the actions behind the page's buttons."""

    def __init__(self, folder: Path, app: Onward, shop: Shop, *, workers: int, burst: int) -> None:
        name = f"{os.getpid()}-{time.time():.0f}"
        self._facts = Facts(name, brokers.label(app.settings), burst, app.settings.lease_s)
        self._view = View(PartitionView(PARTITIONS, partition_index), self._facts._asdict())
        self._fleet = Fleet(folder, workers, LIVE, self._view.log.add)
        self._judge = Judge(folder)
        self._shop = shop
        self._dead = DeadOrders(app, folder)
        self._followed = FollowedOrders(self._view.log, wait_after_s)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._state = "live"  # then "ending" and "ended"
        self.balance = self._judge.balance()

    async def run(self, page: DemoPage, stop: asyncio.Event) -> None:
        self._begin(self._keep_ordering())
        while not stop.is_set():
            page.show(await self._tick())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), TICK_S)

    async def close(self, page: DemoPage) -> None:
        """Stop the workers, then show the final balance on the page."""
        self._state = "ending"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            page.show(await self._tick(tend=False))
            await self._fleet.stop()
        finally:
            self._fleet.end_now()
        self._state = "ended"
        await self._dead.read()  # raises where _tick would only write a line into the log
        page.show(await self._tick(tend=False))
        self._judge.close()

    # -- what runs by itself ------------------------------------------------------------------------------------------

    async def _tick(self, *, tend: bool = True) -> Mapping[str, Any]:
        if tend:
            self._fleet.tend()
        news = self._judge.read()
        self._followed.take(news, self._judge)
        # Read after the effects: an order that they show as overtaken should be in the dead letters by now.
        if self._followed.poisoned or self._judge.overtaken or self._dead.due:
            try:
                await self._dead.read()
            except BrokerError as error:
                self._view.log.add("bad", f"cannot read the dead letters now: {error}")
        self._bury(self._dead.records)
        self.balance = self._judge.balance()
        self._view.take(news, self.balance)
        return {
            **self._view.snapshot(self.balance, news, self._fleet.workers, self._dead.records),
            "state": self._state,
            "waiting": self._followed.snapshot(partition_index),
            "watched": self._followed.customers,
        }

    async def _keep_ordering(self) -> None:
        while True:
            try:
                await self._shop.place([f"c-{random.randrange(REGULARS):04d}"])
            except BrokerError as error:
                self._view.log.add("bad", f"an order could not be placed: {error}")
            await asyncio.sleep(random.expovariate(ORDERS_PER_S))

    def _bury(self, dead: Mapping[int, AsideRecord]) -> None:
        for number in self._judge.bury(dead):
            self._view.partitions.bury(dead[number].event.key or "")
            self._followed.bury(number)

    # -- what the buttons do ----------------------------------------------------------------------------------------

    def door(self, loop: asyncio.AbstractEventLoop) -> Callable[[str, Mapping[str, str]], Answer]:
        """The way from the page's threads into the event loop."""
        actions: Mapping[str, Callable[[Mapping[str, str]], Awaitable[Answer]]] = {
            "kill": self._kill,
            "poison": self._send_poison,
            "burst": self._send_burst,
            "replay": self._replay,
            "letter": self._show_letter,
        }

        async def act(action: str, arguments: Mapping[str, str]) -> Answer:
            if self._state != "live":
                return HTTPStatus.CONFLICT, "the demo is ending"
            return await actions[action](arguments)

        return lambda action, arguments: asyncio.run_coroutine_threadsafe(act(action, arguments), loop).result(10)

    async def _kill(self, arguments: Mapping[str, str]) -> Answer:
        alive = [worker.slot for worker in self._fleet.workers if worker.alive]
        slot = arguments.get("worker", "")
        if not slot and alive:
            slot = str(max(alive, key=self._view.rate_of))
        if slot not in map(str, alive):
            return HTTPStatus.CONFLICT, "that worker is not running"
        pid = self._fleet.kill(int(slot))
        text = f"worker {slot} (pid {pid}) killed with SIGKILL; its lease ends within {self._facts.lease_s:.0f} s"
        self._view.log.add("bad", text)
        return HTTPStatus.ACCEPTED, text

    async def _send_poison(self, _: Mapping[str, str]) -> Answer:
        if len(self._tasks) > MOST_AT_ONCE:
            return HTTPStatus.CONFLICT, "the shop is still placing orders; try again in a moment"
        self._begin(self._poisoned())
        return HTTPStatus.ACCEPTED, "the poison order is being placed"

    async def _poisoned(self) -> None:
        regulars = {f"c-{each:04d}" for each in range(REGULARS)}
        customer = random.choice(sorted(regulars - set(self._followed.customers) or regulars))
        (order,) = await self._shop.place([customer], poison=True)
        self._followed.add_poison(order, BEHIND_POISON)
        await self._shop.place([customer] * BEHIND_POISON)

    async def _show_letter(self, arguments: Mapping[str, str]) -> Answer:
        asked = arguments.get("order", "")
        found = [number for number in self._dead.records if str(number) == asked]
        letter = await self._dead.show(found[0]) if found else None
        if letter is None:
            return HTTPStatus.NOT_FOUND, "no such dead letter: it was replayed already"
        return HTTPStatus.OK, letter

    async def _replay(self, arguments: Mapping[str, str]) -> Answer:
        """Replay one dead letter by its order number, or all of them."""
        number = arguments.get("order", "")
        chosen = [each for each in self._dead.records if number in ("", str(each))]
        if not chosen:
            return HTTPStatus.CONFLICT, "no such dead letter: it was replayed already" if number else "no dead letters"
        replaying = self._begin(self._replaying(chosen))
        await asyncio.wait({replaying}, timeout=_REPLAY_WAIT_S)
        if not replaying.done():
            return HTTPStatus.ACCEPTED, f"still replaying {len(chosen)} dead letters"
        if replaying.cancelled() or replaying.exception() is not None:
            return HTTPStatus.SERVICE_UNAVAILABLE, "the replay failed; see the log below"
        count = replaying.result()
        return HTTPStatus.ACCEPTED, f"{count} dead letters replayed" if count != 1 else "1 dead letter replayed"

    async def _replaying(self, numbers: Collection[int]) -> int:
        letters, count = await self._dead.replay(numbers)
        for letter in letters.values():
            self._view.partitions.revive(letter.event.key or "")
        if letters:
            customers = {number: letter.event.key or "" for number, letter in letters.items()}
            self._followed.add_replayed(customers, len(self._dead.records))
        return count

    async def _send_burst(self, _: Mapping[str, str]) -> Answer:
        if len(self._tasks) > MOST_AT_ONCE or self.balance.in_flight > MOST_IN_FLIGHT:
            text = f"{self.balance.in_flight:,} orders are still in flight; try again when there are fewer"
            return HTTPStatus.CONFLICT, text
        self._begin(self._bursting())
        return HTTPStatus.ACCEPTED, f"{self._facts.burst:,} orders are being placed"

    async def _bursting(self) -> None:
        started = time.monotonic()
        orders = await self._shop.place([f"c-{random.randrange(KEYS):04d}" for _ in range(self._facts.burst)])
        self._followed.add_burst(started, orders[0].number, orders[-1].number)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._view.log.add("bad", f"the shop has failed: {error}")


def wait_after_s(attempt: int) -> float:
    """How long a poison order waits after this failed attempt."""
    return LIVE.retry.delay_s(attempt, CardDeclined(), random.random) or 0.0
