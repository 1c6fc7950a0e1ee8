"""The outbox on real PostgreSQL and MariaDB: how fast its relay is, how late events are, and what they cost.

1,000 keys, 300 bytes, 8 shards. Writer, relay and servers share the machine. Every run is checked: no event is missing,
and each key is in order.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
from tests.servers.needs import Missing

from bench import outbox_delay, outbox_takeover, outbox_writes
from bench.cluster import kafka
from bench.contestants import outbox_faststream
from bench.contestants.outbox_relay import READY
from bench.kit import CHILD_TIMEOUT_S, Bench, Figure, Ran, child, median, ratios, spread
from bench.outbox_database import (
    KEYS,
    VALUE_BYTES,
    Database,
    MariaDatabase,
    Meter,
    PostgresDatabase,
    ServerCost,
    await_line,
    background,
    fill,
    mariadb,
    postgres,
    writing,
)
from bench.redis_server import redis
from bench.workload import items
from onward.event import new_id

SUSTAINED_PER_S = 20_000
DRAIN_SHARE = 0.8
MOST_MB = 150
ONWARD, FASTSTREAM, BARE = "Onward", "faststream-outbox", "bare SELECT + DELETE loop"
LEAST = {FASTSTREAM: 5.0, BARE: None}


class Sink(NamedTuple):
    """Where the relay publishes to. `url` None: a broker that accepts everything at once."""

    name: str
    url: str | None


NULL = Sink("a null broker", None)


def run(bench: Bench) -> None:
    with ExitStack() as stack:
        sinks = [NULL, *_brokers(bench, stack)]
        for measure in (_on_postgres, _on_mariadb):
            try:
                measure(bench, sinks)
            except Missing as reason:
                bench.say(f"outbox: skipped: {reason}")


def _brokers(bench: Bench, stack: ExitStack) -> Iterator[Sink]:
    """A broker that is not installed is left out."""
    yield Sink("SQLite", f"sqlite:///{bench.path('broker.db')}")
    for name, server in (("Redis", redis), ("Kafka", kafka)):
        try:
            yield Sink(name, stack.enter_context(server()).url)
        except Missing as reason:
            bench.say(f"outbox: {name} skipped: {reason}")


def _on_postgres(bench: Bench, sinks: Sequence[Sink]) -> None:
    with postgres() as server:
        database = PostgresDatabase(server)
        rate = sustained(bench, database, sinks)
        backlog(bench, database, rate)
        peers(bench, database)
        named = [(sink.name, sink.url) for sink in sinks if sink.url is not None]
        outbox_delay.run(bench, database, bench.sized(named, named[:1]))
        outbox_writes.run(bench, database)
        outbox_takeover.run(bench, database)
        sustained(bench, PostgresDatabase(server, mode="queue"), [NULL])


def _on_mariadb(bench: Bench, sinks: Sequence[Sink]) -> None:
    with mariadb() as server:
        sustained(bench, MariaDatabase(server), sinks[:2])


# -- written and published at the same time ------------------------------------------------------------------------


def sustained(bench: Bench, database: Database, sinks: Sequence[Sink]) -> float:
    """Events per second, from the first to the last, while a writer writes. Returns the median to the first sink."""
    events, rounds = bench.sized((200_000, 3), (10_000, 1))
    writer = [_written(bench, database, events) for _ in range(rounds)]
    medians = []
    for sink in sinks:
        what = f"{database.name} to {sink.name}"
        found = [_published(bench, database, sink, events) for _ in range(rounds)]
        for ran, _ in found:
            bench.judge(f"outbox, {what}", ran.verdict)
        rates = [ran.per_wall_s for ran, _ in found]
        bench.add(
            _rate(what, rates, writer, [cost for _, cost in found], with_target=what == "PostgreSQL to a null broker")
        )
        medians.append(median(rates))
    return medians[0]


def _written(bench: Bench, database: Database, events: int) -> ServerCost:
    """What the writer costs without a relay."""
    database.renew()
    meter = Meter(database)
    with writing(bench.folder, database.url, "unread", events):
        pass
    return meter.read(events)


def _published(bench: Bench, database: Database, sink: Sink, events: int) -> tuple[Ran, ServerCost]:
    """The cost counts from the first row until the relay has removed the last one."""
    database.renew()
    topic, meter = f"outbox-{new_id()}", Meter(database)
    arguments = {"database": database.url, "events": events, "broker": sink.url, "to_the_end": True}
    with background("bench.contestants.outbox_relay", bench.folder, arguments) as relay:
        await_line(relay, READY)
        with writing(bench.folder, database.url, topic, events):
            output, _ = relay.communicate(timeout=CHILD_TIMEOUT_S)
    ran = msgspec.json.decode(output.splitlines()[-1], type=Ran)
    bench.say(f"outbox: {database.name} to {sink.name}: {_facts(ran)}")
    cost = meter.read(events)
    if sink.url is not None:
        read = child("bench.contestants.server_app", bench.folder, url=sink.url, topic=topic, group="b", events=events)
        bench.judge(f"outbox, {database.name} to {sink.name}, read by a handler", read.verdict)
    return ran, cost


def _facts(ran: Ran) -> str:
    cpu_us = ran.cpu_s / ran.verdict.handled * 1e6 if ran.verdict.handled else 0
    return f"{ran.per_wall_s:,.0f} /s, {cpu_us:.1f} µs CPU, {ran.peak_kb / 1024:.0f} MB; load {os.getloadavg()[0]:.1f}"


def _rate(
    what: str, rates: list[float], writer: list[ServerCost], both: list[ServerCost], *, with_target: bool
) -> Figure:
    cpu_us, writer_cpu_us = median([cost.cpu_us for cost in both]), median([cost.cpu_us for cost in writer])
    wal, writer_wal = median([cost.wal_bytes for cost in both]), median([cost.wal_bytes for cost in writer])
    return Figure(
        what=f"outbox, written and published at once, {what}",
        measured=f"{spread(rates)} /s",
        value=median(rates),
        beside=f"the database spends {cpu_us:.0f} µs CPU and {wal:,.0f} bytes of log per event; for the writer alone "
        f"{writer_cpu_us:.0f} µs and {writer_wal:,.0f} bytes",
        target=f"≥ {SUSTAINED_PER_S:,} /s" if with_target else "",
        met=median(rates) >= SUSTAINED_PER_S if with_target else None,
        samples={
            "per_s": rates,
            "server_cpu_us": [cost.cpu_us for cost in both],
            "writer_server_cpu_us": [cost.cpu_us for cost in writer],
            "log_bytes": [cost.wal_bytes for cost in both],
            "writer_log_bytes": [cost.wal_bytes for cost in writer],
        },
    )


# -- a backlog -----------------------------------------------------------------------------------------------------


def backlog(bench: Bench, database: PostgresDatabase, sustained_per_s: float) -> None:
    events = bench.sized(1_000_000, 30_000)
    database.renew()
    bench.say(f"outbox: writing a backlog of {events:,} events")
    fill(bench.folder, database.url, events)
    ran = _drained(bench, ONWARD, "outbox_relay", database, events)
    ratio, peak_mb = ran.per_wall_s / sustained_per_s, ran.peak_kb / 1024
    what = f"outbox, a backlog of {events:,} events"
    bench.add(
        Figure(
            what=what,
            measured=f"{ran.per_wall_s:,.0f} /s",
            value=ran.per_wall_s,
            beside=f"written and published at once: {sustained_per_s:,.0f} /s",
            ratio=ratio,
            target=f"≥ {DRAIN_SHARE}x",
            met=ratio >= DRAIN_SHARE,
            samples={"per_s": [ran.per_wall_s]},
        )
    )
    bench.add(
        Figure(
            what=f"{what}, peak memory of the relay",
            measured=f"{peak_mb:.0f} MB",
            value=peak_mb,
            target=f"≤ {MOST_MB} MB",
            met=peak_mb <= MOST_MB,
            samples={"peak_mb": [peak_mb]},
        )
    )


def peers(bench: Bench, database: PostgresDatabase) -> None:
    """A backlog into a null broker, in turn."""
    events, few, rounds = bench.sized((100_000, 30_000, 3), (10_000, 3_000, 1))
    found: dict[str, list[Ran]] = {ONWARD: [], FASTSTREAM: [], BARE: []}
    for _ in range(rounds):
        for name, module in ((ONWARD, "outbox_relay"), (BARE, "outbox_bare")):
            database.renew()
            fill(bench.folder, database.url, events)
            found[name].append(_drained(bench, name, module, database, events))
        database.renew()
        outbox_faststream.fill(database.url, items(few, keys=KEYS, value_bytes=VALUE_BYTES))
        found[FASTSTREAM].append(_drained(bench, FASTSTREAM, "outbox_faststream", database, few))
    for name, least in LEAST.items():
        bench.add(_against(found[ONWARD], name, found[name], least))


def _drained(bench: Bench, name: str, module: str, database: PostgresDatabase, events: int) -> Ran:
    meter = Meter(database)
    arguments: dict[str, Any] = {"database": database.url, "events": events}
    ran = child(f"bench.contestants.{module}", bench.folder, **arguments)
    cost = meter.read(events)
    bench.say(f"outbox: {name}: {_facts(ran)}; server {cost.cpu_us:.0f} µs CPU, {cost.wal_bytes:,.0f} bytes of WAL")
    bench.judge(f"outbox, drained by {name}", ran.verdict)
    return msgspec.structs.replace(ran, server_s=cost.cpu_us * events / 1e6)


def _against(ours: list[Ran], name: str, theirs: list[Ran], least: float | None) -> Figure:
    mine, other = [ran.per_wall_s for ran in ours], [ran.per_wall_s for ran in theirs]
    ratio = ratios(mine, other)
    return Figure(
        what="outbox, a backlog to a null broker, key order",
        measured=f"{spread(mine)} /s",
        value=median(mine),
        beside=f"{name}: {spread(other)} /s",
        ratio=ratio,
        target="" if least is None else f"≥ {least:g}x",
        met=None if least is None else ratio >= least,
        samples={"onward": mine, name: other},
    )
