"""Effects once, in PostgreSQL: the same transactions with an inbox and without one, round by round in turn.

Both write the same effects through the same engine, with a commit that is on disk. What is measured is the inbox, so
the deliveries are made here and no broker is in between.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, text
from tests.servers.needs import missing
from tests.servers.postgres import PostgresServer

from bench.kit import Bench, Figure, Pace, median, ratios, spread
from onward.engines.base import Call, Work
from onward.event import Delivery, Event, Partition, new_ids
from onward.inbox import SqlInbox
from onward.inbox.base import Asked

BATCH = 100
EFFECT = text("INSERT INTO effect (id, amount) VALUES (:id, :amount)")


def run(bench: Bench) -> None:
    rounds = bench.sized(7, 3)
    if lacking := missing(PostgresServer.name):
        bench.say(f"inbox: left out, it needs {lacking[0]}")
        return
    with _database() as engine:
        single, batched = bench.sized((2_000, 40_000), (300, 6_000))
        _compare(bench, engine, "cursor inbox, 100 events per transaction", batched, rounds, batch=True, target=0.6)
        _compare(bench, engine, "row inbox, one event per transaction", single, rounds, batch=False, target=0.5)


@contextmanager
def _database() -> Iterator[Engine]:
    server = PostgresServer()
    try:
        server.start()
        engine = create_engine(server.url.replace("postgresql:", "postgresql+psycopg:"))
        yield engine
        engine.dispose()
    finally:
        server.close()


def _compare(bench: Bench, engine: Engine, what: str, events: int, rounds: int, *, batch: bool, target: float) -> None:
    """Alternate the two, on tables that grow alike; then deliver the inbox's last events once more."""
    with_inbox, without = Pace(), Pace()
    call = _with_inbox(engine, batch=batch)
    plain = _without(engine)
    last: Sequence[Work] = ()
    for number in range(rounds):
        bench.say(f"inbox: {what}, round {number + 1} of {rounds}")
        last = _work(number * events, events, batch=batch)
        for pace, contestant in ((without, plain), (with_inbox, call)):
            _empty(engine)
            with pace.timed(events):
                for work in last:
                    contestant(work)
            _check(bench, engine, what, events)
        for work in last[: max(1, len(last) // 10)]:
            call(work)
        _check(bench, engine, f"{what}, delivered twice", events)
    ratio = ratios(with_inbox.per_wall_s, without.per_wall_s)
    bench.add(
        Figure(
            what=what,
            measured=str(with_inbox),
            value=median(with_inbox.per_wall_s),
            beside=f"without: {without}",
            ratio=ratio,
            target=f"≥ {target} x",
            met=ratio >= target,
            samples={"inbox": with_inbox.per_wall_s, "without": without.per_wall_s},
        )
    )
    cpu = ratios(with_inbox.per_cpu_s, without.per_cpu_s)
    bench.add(
        Figure(
            what=f"{what}, this process's CPU",
            measured=f"{spread(with_inbox.per_cpu_s)} per CPU second",
            value=median(with_inbox.per_cpu_s),
            beside=f"without: {spread(without.per_cpu_s)}",
            ratio=cpu,
        )
    )


def _work(first: int, events: int, *, batch: bool) -> list[Work]:
    partition = Partition("orders", 0)
    deliveries = [
        Delivery(Event(id_, "orders", "k", b""), partition, first + n, 1, 1, 1, "log")
        for n, id_ in enumerate(new_ids(events))
    ]
    if not batch:
        return list(deliveries)
    return [tuple(deliveries[start : start + BATCH]) for start in range(0, events, BATCH)]


def _effect(work: Any, connection: Connection) -> None:
    taken = work if isinstance(work, tuple) else (work,)
    connection.execute(EFFECT, [{"id": each.position, "amount": 1} for each in taken])


def _with_inbox(engine: Engine, *, batch: bool) -> Call:
    inbox = SqlInbox(engine)
    inbox.create()
    asked = Asked(name="bench", group="g", engine="threads", is_async=False, batch=batch, gives=Connection)
    return inbox.around(_effect, asked)


def _without(engine: Engine) -> Callable[[Any], None]:
    def call(work: Any) -> None:
        with engine.begin() as connection:
            _effect(work, connection)

    return call


def _empty(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS effect"))
        connection.execute(text("CREATE TABLE effect (id BIGINT NOT NULL, amount INTEGER NOT NULL)"))


def _check(bench: Bench, engine: Engine, what: str, events: int) -> None:
    with engine.begin() as connection:
        rows, distinct = connection.execute(text("SELECT count(*), count(DISTINCT id) FROM effect")).one()
    bench.check(what, rows == distinct == events, f"{rows:,} effects of {distinct:,} events, expected {events:,}")
