"""Effects once, in PostgreSQL: the same transactions with an inbox and without one. They take turns.

Both write the same effects through the same database engine, and every commit is on disk. Only the inbox is measured,
so the deliveries are made here, without a broker.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, text
from tests.servers.needs import missing
from tests.servers.postgres import PostgresServer

from bench.kit import Bench, Figure, Pace, median, ratios
from onward.engines.base import Call, Work
from onward.event import Delivery, Event, Partition, new_ids
from onward.inbox import SqlInbox
from onward.inbox.base import Asked

BATCH = 100
ONE_BY_ONE = text("INSERT INTO effect (id, amount) VALUES (:id, 1)")
AT_ONCE = text("INSERT INTO effect (id, amount) SELECT unnest(CAST(:ids AS BIGINT[])), 1")

Effect = Callable[[Any, Connection], None]


def run(bench: Bench) -> None:
    rounds = bench.sized(7, 3)
    if lacking := missing(PostgresServer.name):
        bench.say(f"inbox: skipped, it needs {lacking[0]}")
        return
    with _database() as engine:
        single, batched = bench.sized((2_000, 40_000), (300, 6_000))
        for what, events, effect, target in (
            ("cursor inbox, 100 events per transaction", batched, _each, 0.6),
            ("cursor inbox, 100 events in one statement", batched, _at_once, 0.6),
            ("row inbox, one event per transaction", single, _each, 0.5),
        ):
            size = BATCH if events == batched else 1
            rounds_of = _rounds(bench, engine, what, [_work(n * events, events, size) for n in range(rounds)], effect)
            _report(bench, what, *rounds_of, target=target)


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


def _rounds(
    bench: Bench, engine: Engine, what: str, rounds: Sequence[Sequence[Work]], effect: Effect
) -> tuple[Pace, Pace]:
    """Run both in turn, each on an empty table of effects. Then deliver some events to the inbox a second time."""
    with_inbox, without = Pace(), Pace()
    batch = isinstance(rounds[0][0], tuple)
    call, plain = _with_inbox(engine, effect, batch=batch), _without(engine, effect)
    for number, works in enumerate(rounds):
        bench.say(f"inbox: {what}, round {number + 1} of {len(rounds)}")
        events = sum(len(work) if isinstance(work, tuple) else 1 for work in works)
        for pace, contestant in ((without, plain), (with_inbox, call)):
            _empty(engine)
            with pace.timed(events):
                for work in works:
                    contestant(work)
            _check(bench, engine, what, events)
        for work in works[: max(1, len(works) // 10)]:
            call(work)
        _check(bench, engine, f"{what}, delivered twice", events)
    return with_inbox, without


def _report(bench: Bench, what: str, with_inbox: Pace, without: Pace, *, target: float) -> None:
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


def _work(first: int, events: int, size: int) -> list[Work]:
    partition = Partition("orders", 0)
    deliveries = [
        Delivery(Event(id_, "orders", "k", b""), partition, first + n, 1, 1, 1, "log")
        for n, id_ in enumerate(new_ids(events))
    ]
    if size == 1:
        return list(deliveries)
    return [tuple(deliveries[start : start + size]) for start in range(0, events, size)]


def _each(work: Any, connection: Connection) -> None:
    taken = work if isinstance(work, tuple) else (work,)
    connection.execute(ONE_BY_ONE, [{"id": each.position} for each in taken])


def _at_once(work: Any, connection: Connection) -> None:
    connection.execute(AT_ONCE, {"ids": [each.position for each in work]})


def _with_inbox(engine: Engine, effect: Effect, *, batch: bool) -> Call:
    inbox = SqlInbox(engine)
    inbox.create()
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE onward_inbox, onward_inbox_cursor"))
    asked = Asked(name="bench", group="g", engine="threads", is_async=False, batch=batch, gives=Connection)
    return inbox.around(effect, asked)


def _without(engine: Engine, effect: Effect) -> Callable[[Any], None]:
    def call(work: Any) -> None:
        with engine.begin() as connection:
            effect(work, connection)

    return call


def _empty(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS effect"))
        connection.execute(text("CREATE TABLE effect (id BIGINT NOT NULL, amount INTEGER NOT NULL)"))


def _check(bench: Bench, engine: Engine, what: str, events: int) -> None:
    with engine.begin() as connection:
        rows, distinct = connection.execute(text("SELECT count(*), count(DISTINCT id) FROM effect")).one()
    bench.check(what, rows == distinct == events, f"{rows:,} effects of {distinct:,} events, expected {events:,}")
