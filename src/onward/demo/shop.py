"""The application of the demo: a shop that places orders, and billing that handles them in each customer's order."""

import asyncio
import contextlib
import random
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

import msgspec

from onward import Onward, Retry, brokers
from onward.brokers.base import AsideRecord, Ordering
from onward.brokers.core.partitioner import partition_of
from onward.demo.effects import Effects, Subject
from onward.errors import PublishError, RetryLater
from onward.event import Event
from onward.outbox import Outbox, schema

TOPIC, GROUP = "orders", "billing"
PARTITIONS = 8
LEASE_S = 2.0  # or the least that the broker allows
ATTEMPTS = 3
STUMBLE_EVERY = 200  # one order in 200 fails once: retries must keep the order, too
STUMBLE_WAIT_S = 0.3
PARK_AFTER_S = 1.0  # a poison order waits longer than this, so it is stored with the orders behind it
BATCH = 500
URL_FILE = "url"
AGAIN_S = 0.2  # the pause before a transaction that was refused is tried again

_SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS orders (
    number INTEGER PRIMARY KEY,
    customer TEXT NOT NULL,
    n INTEGER NOT NULL,
    amount INTEGER NOT NULL,
    poison INTEGER NOT NULL,
    placed REAL NOT NULL,
    UNIQUE (customer, n)
);
"""


class OrderPlaced(msgspec.Struct, frozen=True):
    """`n` counts the orders of this customer, so that the order in which they were handled can be judged."""

    number: int
    customer: str
    n: int
    amount: int
    placed: float
    poison: bool = False


class CardDeclined(Exception):
    pass


class Work(msgspec.Struct, frozen=True):
    """How the workers work. Handlers take uneven times, so that a path without key order mixes up orders at once."""

    ordering: Ordering = "key"
    concurrency: int = 100
    longest_s: float = 0.005
    first_wait_s: float = 0.3  # before the second attempt; twice that before the third

    @property
    def retry(self) -> Retry:
        """Without jitter, so that the page can count down to the next attempt."""
        return Retry(attempts=ATTEMPTS, first_delay_s=self.first_wait_s, jitter=0.0)


def use_broker(folder: Path, url: str) -> None:
    """Run the demo in this folder on the broker at `url` instead of on a file in the folder."""
    (folder / URL_FILE).touch(mode=0o600)  # the URL may contain a password
    (folder / URL_FILE).write_text(url)


def topic_of(folder: Path) -> str:
    """Each run has its own topic on a broker that other applications may use."""
    return f"{TOPIC}-{folder.name}" if (folder / URL_FILE).exists() else TOPIC


def group_of(folder: Path) -> str:
    """Each run has its own group there, too: another application may use the name."""
    return f"{GROUP}-{folder.name}" if (folder / URL_FILE).exists() else GROUP


def shop_file(folder: Path) -> Path:
    """The database of the shop. If the demo has its own broker, it is the broker's file. Otherwise it has an outbox."""
    return folder / ("orders.db" if (folder / URL_FILE).exists() else "events.db")


def open_app(folder: Path) -> Onward:
    other = folder / URL_FILE
    url = other.read_text() if other.exists() else brokers.embedded(shop_file(folder))
    return Onward(
        url,
        partitions=PARTITIONS,
        lease_s=max(LEASE_S, brokers.scheme_of(url).least_lease_s),
        takeover_grace_s=0.5,
        park_after_s=PARK_AFTER_S,
        drain_timeout_s=5.0,
        max_in_flight=200,
    )


def billing(app: Onward, folder: Path, effects: Effects, work: Work) -> None:
    """Declare the handler. It bills an order and records the outcome in the effects."""
    topic, group, retry = topic_of(folder), group_of(folder), work.retry

    @app.handler(topic, group=group, ordering=work.ordering, concurrency=work.concurrency, timeout_s=30, retry=retry)
    async def bill(order: OrderPlaced) -> None:
        await asyncio.sleep(random.random() * work.longest_s)
        subject = Subject(order.number, order.customer, order.n, order.placed)
        stumbles = order.number % STUMBLE_EVERY == 0
        attempt = effects.attempt(order.number) if order.poison or stumbles else 1
        if order.poison and attempt <= ATTEMPTS:  # a replay is attempt 4: by then the card works again
            await effects.failed(subject, attempt)
            raise CardDeclined(f"order {order.number} of {order.customer}: the card was declined")
        if stumbles and attempt == 1:
            await effects.failed(subject, attempt)
            raise RetryLater(STUMBLE_WAIT_S, f"order {order.number} of {order.customer}: the bank did not answer")
        await effects.done(subject, attempt)


class Shop:
    """Writes each order together with its event, in one transaction. A committed order is a promise."""

    def __init__(self, folder: Path, app: Onward) -> None:
        path = shop_file(folder)
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._db.executescript(_SCHEMA)
        self._topic = topic_of(folder)
        self._outbox = Outbox(app, None if path.name == "events.db" else _with_outbox(path))
        self._placing = asyncio.Lock()  # orders are committed in the order of their numbers
        (self._number,) = self._db.execute("SELECT coalesce(max(number), 0) FROM orders").fetchone()
        self._counts = Counter(dict(self._db.execute("SELECT customer, max(n) FROM orders GROUP BY customer")))

    def close(self) -> None:
        self._db.close()

    async def place(self, customers: Sequence[str], *, poison: bool = False) -> Sequence[OrderPlaced]:
        """Place one order for each name, in this order. Returns when all are committed."""
        placed: list[OrderPlaced] = []
        for start in range(0, len(customers), BATCH):
            async with self._placing:
                orders = [self._order(customer, poison) for customer in customers[start : start + BATCH]]
                await self._commit(orders)
            placed += orders
        return placed

    def _order(self, customer: str, poison: bool) -> OrderPlaced:
        self._number += 1
        self._counts[customer] += 1
        amount = random.randrange(100, 20_000)
        return OrderPlaced(self._number, customer, self._counts[customer], amount, time.time(), poison)

    async def _commit(self, orders: Sequence[OrderPlaced]) -> None:
        """In a thread, because SQLite has one writer at a time and may let us wait."""
        while True:
            writing = asyncio.ensure_future(asyncio.to_thread(self._write, orders))
            try:
                return await asyncio.shield(writing)
            except PublishError:  # such as a full backlog: nothing was committed
                await asyncio.sleep(AGAIN_S)
            except asyncio.CancelledError:
                await asyncio.wait([writing])
                raise

    def _write(self, orders: Sequence[OrderPlaced]) -> None:
        rows = [(order.number, order.customer, order.n, order.amount, order.poison, order.placed) for order in orders]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)", rows)
            for order in orders:
                headers = {"channel": "web", "request-id": f"request-{order.number}"} if len(orders) == 1 else None
                self._outbox.add(self._db, self._topic, order, key=order.customer, headers=headers)
        self._outbox.ring()


def _with_outbox(path: Path) -> str:
    """Create the tables of the outbox. Returns the URL of the database."""
    url = unquote(brokers.embedded(path))
    schema.init(url)
    return url


@contextlib.asynccontextmanager
async def open_shop(folder: Path, app: Onward) -> AsyncIterator[Shop]:
    """The shop. If its database is not the broker's file, a relay beside it publishes the events."""
    with contextlib.closing(Shop(folder, app)) as shop:
        if shop_file(folder).name == "events.db":
            yield shop
        else:
            async with app.relaying():
                yield shop


async def dead_letters(app: Onward, folder: Path) -> Mapping[int, AsideRecord]:
    """The dead letters of billing, by order number."""
    found: dict[int, AsideRecord] = {}
    after: str | None = None
    while True:
        page = await app.dead.list(group=group_of(folder), topic=topic_of(folder), after=after, limit=1000)
        found.update((number_of(letter.event), letter) for letter in page.letters)
        if page.after is None:
            return found
        after = page.after


def number_of(event: Event) -> int:
    return msgspec.json.decode(event.value or b"", type=OrderPlaced).number


def partition_index(customer: str) -> int:
    """The partition of this customer's orders."""
    return partition_of(customer, PARTITIONS)
