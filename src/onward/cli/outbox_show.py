"""The state of an outbox on the screen."""

import sys
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onward.brokers.base import Finding
from onward.cli.show import harmless
from onward.clock import moment
from onward.outbox.status import OutboxStatus, ParkedLane, RelayStatus

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
_PIPE_WIDTH = 1_000
_MOST_CHARS = 200  # of a reason in the table


def print_status(status: OutboxStatus, findings: Sequence[Finding]) -> None:
    for name, fact in _facts(status).items():
        typer.echo(f"{typer.style(f'{name:<12}', dim=True)} {fact}")
    for table in _tables(status):
        typer.echo()
        Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
    typer.echo()
    for finding in findings:
        typer.echo(f"{typer.style(f'{finding.level:<8}', fg=_COLOURS[finding.level])} {finding.what}")
        if finding.cure:
            typer.echo(f"{'':<8} {finding.cure}")


def _facts(status: OutboxStatus) -> dict[str, str]:
    oldest = "" if status.oldest_s is None else f", the oldest event is {status.oldest_s:.1f} s old"
    facts = {
        "outbox": f"{status.table} at {status.database}",
        "id": status.outbox_id,
        "schema": f"version {status.version}, mode {status.mode}, shards {len(status.shards)}",
        "waiting": f"{status.waiting:,}{oldest}",
        "parked": f"{status.parked_rows:,}, of these refused {status.refused_rows:,}",
    }
    if (upkeep := status.upkeep) is not None:
        vacuum = upkeep.last_autovacuum or "never"
        facts["table"] = f"{upkeep.dead_rows:,} dead rows, last autovacuum: {vacuum}"
        facts["sequence"] = f"CACHE {upkeep.sequence_cache}"
    return facts


def _tables(status: OutboxStatus) -> list[Table]:
    """One for each list that is not empty."""
    relays = [_relay(status, each) for each in status.relays]
    shards = [[str(each.shard), each.owner or "-", str(each.fence)] for each in status.shards]
    lanes = [_lane(each) for each in status.parked]
    transactions = [
        [str(each.pid or "-"), f"{each.age_s:.0f} s", each.query_start or "-", harmless(each.who)]
        for each in status.transactions or ()
    ]
    every = [
        _table(["relay", "shards", "lease", "alive"], relays),
        _table(["shard", "owner", "fence"], shards),
        _table(["parked topic", "key", "events", "state", "since", "first event: why"], lanes),
        _table(["open transaction", "age", "query started", "program"], transactions),
    ]
    return [table for table in every if table.row_count]


def _relay(status: OutboxStatus, relay: RelayStatus) -> list[str]:
    owned = sum(shard.owner == relay.name for shard in status.shards)
    alive = {None: "not checked", True: "yes", False: "no sign of life"}[relay.alive]
    return [harmless(relay.name), str(owned), f"{relay.lease_s:g} s", alive]


def _lane(lane: ParkedLane) -> list[str]:
    why = harmless(f"{lane.event_id}: {lane.why}")
    return [
        lane.topic,
        "-" if lane.key is None else harmless(lane.key),
        str(lane.rows),
        "refused" if lane.refused else "waits",
        "-" if (at := moment(lane.since)) is None else f"{at:%Y-%m-%d %H:%M:%S}",
        why if len(why) <= _MOST_CHARS else f"{why[: _MOST_CHARS - 1]}…",
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a plain str could contain markup
    return table
