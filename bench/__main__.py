"""python -m bench [NAME ...] [--quick] [--json PATH]

Exits with 1 if an event was lost or out of order. A missed speed target is only shown.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from bench import report
from bench.kit import Bench, folder

NAMES: Mapping[str, str] = {
    "publish": "batches and concurrent single events, compared with a bare sqlite3 loop",
    "consume": "a backlog through a typed handler, compared with a bare loop, huey and persist-queue",
    "memory": "peak memory with a large and a small backlog",
    "startup": "import onward, onward --help",
    "engines": "tasks, threads and processes, compared with bare asyncio, one process and multiprocessing.Pool",
    "micro": "control plane, tracker, Event, in processor time",
    "inbox": "transactions with an inbox, compared with the same without one",
    "wakeup": "time from publish in one process to the handler in another",
    "members": "publishing one event a call on SQLite, while 3 and 25 member processes run",
}

WITH_SERVERS: Mapping[str, str] = {
    "kafka": "Kafka, compared with a bare loop, Confluent's Parallel Consumer, FastStream and pyrallel-consumer",
    "redis": "Redis, compared with bare redis-py, one acknowledgement per event, FastStream and taskiq-redis",
    "rabbitmq": "RabbitMQ, compared with hand-written frames, FastStream, Dramatiq, Celery and taskiq-aio-pika",
    "outbox": "the outbox on PostgreSQL and MariaDB, compared with faststream-outbox and a bare loop",
    "kafka_curves": "Kafka: throughput by events in flight, cost by open events; draws docs/plots",
}  # these run only when they are named

WIDE = 170


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    for name in [name for name in os.environ if name.startswith("ONWARD_")]:
        del os.environ[name]  # the user's own settings would change the measurement
    console = Console()
    if not console.is_terminal:
        console.width = WIDE  # a file or a pipe has no width
    about = report.machine()
    start = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - start:6.1f} s[/dim]  {text}", highlight=False)

    with folder() as path:
        bench = Bench(quick=options.quick, folder=path, say=say)
        for name in options.names or NAMES:
            measure(bench, name)
    took_s = time.monotonic() - start
    report.show(console, bench, about, took_s)
    console.print(f"written to {report.write(bench, about, took_s, options.json)}", highlight=False)
    return 0 if all(check.ok for check in bench.checks) else 1


def measure(bench: Bench, name: str) -> None:
    """Run one benchmark. If it raises an error, that is a failed check, and the other benchmarks still run."""
    try:
        import_module(f"bench.{name}").run(bench)
    except Exception as error:
        bench.say(traceback.format_exc())
        bench.check(f"{name} ran to its end", False, repr(error))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = {**NAMES, **WITH_SERVERS}
    lines = [f"  {name:12} {about}" for name, about in known.items()]
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Compare Onward with a bare client loop and with its peers.\n\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="which benchmarks to run; by default all that need no server"
    )
    parser.add_argument("--quick", action="store_true", help="fewer events and fewer rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures (bench/results/...)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(known)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
