"""The transactions of an application, with an event in the outbox and without: how much slower the event makes them.

A transaction locks a customer, updates it and inserts an order, by SQLAlchemy on PostgreSQL. Each commit is on disk.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from bench.kit import Bench, Figure, Pace, child, median, ratios
from bench.outbox_database import KEYS, VALUE_BYTES, Meter, PostgresDatabase, ServerCost
from bench.workload import TOPIC, value
from onward import Onward
from onward.outbox import Outbox

CONNECTIONS = (1, 8)
LEAST = 0.7


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    orders: Mapped[int]


class PlacedOrder(Base):
    __tablename__ = "placed_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]
    number: Mapped[int]
    note: Mapped[str]


Transaction = Callable[[Session, int], None]


def run(bench: Bench, database: PostgresDatabase) -> None:
    transactions, rounds = bench.sized((4_000, 5), (200, 2))
    database.renew()
    with _engine(database) as engine:
        outbox = Outbox(Onward(f"sqlite:///{bench.path('unused.db')}"), engine)
        for connections in CONNECTIONS:
            shop = Shop(engine, connections, transactions)
            plain, with_event = Pace(), Pace()
            costs: tuple[list[ServerCost], list[ServerCost]] = ([], [])
            for number in range(rounds):
                bench.say(f"outbox: transactions on {connections} connections, round {number + 1} of {rounds}")
                costs[0].append(shop.timed(database, plain, _order))
                costs[1].append(shop.timed(database, with_event, _order_with_event(outbox)))
            _report(bench, connections, plain, with_event, costs)
    _check(bench, database, transactions * rounds * len(CONNECTIONS))


class Shop:
    """Runs transactions on some connections at once. Each has customers of its own, so none waits for another."""

    def __init__(self, engine: Engine, connections: int, transactions: int) -> None:
        self._engine = engine
        self._connections = connections
        self._transactions = transactions

    def timed(self, database: PostgresDatabase, pace: Pace, transaction: Transaction) -> ServerCost:
        meter = Meter(database)
        with pace.timed(self._transactions), ThreadPoolExecutor(self._connections) as pool:
            for running in [pool.submit(self._run, transaction, each) for each in range(self._connections)]:
                running.result()
        return meter.read(self._transactions)

    def _run(self, transaction: Transaction, first: int) -> None:
        for number in range(self._transactions // self._connections):
            customer = (first + number * self._connections) % KEYS
            with Session(self._engine) as session, session.begin():
                transaction(session, customer)


def _order(session: Session, id_: int) -> None:
    _placed(session, id_)


def _order_with_event(outbox: Outbox) -> Transaction:
    def transaction(session: Session, id_: int) -> None:
        placed = _placed(session, -1 - id_)
        key = f"c-{id_}"
        outbox.add(session, TOPIC, value(key, placed, VALUE_BYTES), key=key)

    return transaction


def _placed(session: Session, id_: int) -> int:
    """Place the next order of a customer. Returns its number, from 0."""
    customer = session.get_one(Customer, id_, with_for_update=True)
    number = customer.orders
    customer.orders += 1
    session.add(PlacedOrder(customer=id_, number=number, note="x" * VALUE_BYTES))
    return number


@contextmanager
def _engine(database: PostgresDatabase) -> Iterator[Engine]:
    """Customers below 0 are those whose orders have events."""
    engine = create_engine(database.url.replace("postgresql:", "postgresql+psycopg:"), pool_size=max(CONNECTIONS))
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all([Customer(id=number, orders=0) for number in range(-KEYS, KEYS)])
    try:
        yield engine
    finally:
        engine.dispose()


def _check(bench: Bench, database: PostgresDatabase, events: int) -> None:
    """Every transaction has left its event, and the relay finds them in the order of the orders."""
    ran = child("bench.contestants.outbox_relay", bench.folder, database=database.url, events=events)
    bench.judge("outbox, events of the transactions", ran.verdict)


def _report(
    bench: Bench, connections: int, plain: Pace, with_event: Pace, costs: tuple[list[ServerCost], list[ServerCost]]
) -> None:
    ratio = ratios(with_event.per_wall_s, plain.per_wall_s)
    wal, cpu = (median([getattr(each, name) for each in costs[1]]) for name in ("wal_bytes", "cpu_us"))
    plain_wal, plain_cpu = (median([getattr(each, name) for each in costs[0]]) for name in ("wal_bytes", "cpu_us"))
    bench.add(
        Figure(
            what=f"transactions with an event, SQLAlchemy, {connections} connection{'s' * (connections > 1)}",
            measured=str(with_event),
            value=median(with_event.per_wall_s),
            beside=f"without: {plain}; the event costs the server {wal - plain_wal:,.0f} bytes of WAL and "
            f"{cpu - plain_cpu:,.0f} µs CPU",
            ratio=ratio,
            target=f"≥ {LEAST}x",
            met=ratio >= LEAST,
            samples={
                "with_event": with_event.per_wall_s,
                "without": plain.per_wall_s,
                "wal_bytes": [each.wal_bytes for each in costs[1]],
                "wal_bytes_without": [each.wal_bytes for each in costs[0]],
                "cpu_us": [each.cpu_us for each in costs[1]],
                "cpu_us_without": [each.cpu_us for each in costs[0]],
            },
        )
    )
