"""The databases of the outbox benchmarks: a new outbox for each run, rows in it, and what the server spends."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pymysql
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer

from bench.kit import CHILD_TIMEOUT_S, child_command, child_environment
from bench.workload import TOPIC
from onward.outbox import schema

KEYS = 1_000
VALUE_BYTES = 300
PER_TRANSACTION = 100  # events of a writer that only fills the outbox


class PostgresDatabase:
    """`mode`: of the outbox."""

    def __init__(self, server: PostgresServer, mode: str = "log") -> None:
        self.name = "PostgreSQL" if mode == "log" else "PostgreSQL, mode queue"
        self.url = server.url
        self._server = server
        self._mode = mode

    def renew(self) -> None:
        """Remove everything, and make a new outbox."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        schema.init(self.url, mode=self._mode)

    def cpu_s(self) -> float:
        """The processor time of all its processes, also of those that have ended."""
        postmaster = self._server.pid
        listed = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        return _cpu_s(postmaster, ended_children=True) + sum(_cpu_s(int(pid)) for pid in listed)

    def wal_bytes(self) -> int:
        """Everything that was ever written to the write-ahead log."""
        with psycopg.connect(self.url) as connection:
            (written,) = connection.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone() or (0,)
        return int(written)


class MariaDatabase:
    name = "MariaDB"

    def __init__(self, server: MariaDBServer) -> None:
        self.url = server.url
        self._server = server

    def renew(self) -> None:
        with closing(_connect(self._server)) as connection:
            connection.cursor().execute("DROP DATABASE onward")
            connection.cursor().execute("CREATE DATABASE onward")
        schema.init(self.url)

    def cpu_s(self) -> float:
        return _cpu_s(self._server.pid)

    def wal_bytes(self) -> int:
        """Everything that InnoDB has written to its redo log since the server started."""
        with closing(_connect(self._server)) as connection:
            cursor = connection.cursor()
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_os_log_written'")
            return int(cursor.fetchone()[1])


Database = PostgresDatabase | MariaDatabase


def _connect(server: MariaDBServer) -> Any:
    return pymysql.connect(host=server.host, port=server.port, user="onward", password="onward", database="onward")


def _cpu_s(pid: int, *, ended_children: bool = False) -> float:
    """The processor time of a process; with its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11 : 15 if ended_children else 13]) / os.sysconf("SC_CLK_TCK")


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextmanager
def mariadb() -> Iterator[MariaDBServer]:
    server = MariaDBServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextmanager
def writing(folder: Path, url: str, topic: str, events: int, per_transaction: int = PER_TRANSACTION) -> Iterator[None]:
    """A process that writes events to the outbox during the block, as fast as it can. It has ended afterwards."""
    arguments = {"url": url, "topic": topic, "events": events, "per_transaction": per_transaction}
    with background("bench.contestants.outbox_writer", folder, arguments) as writer:
        yield
        if writer.wait(CHILD_TIMEOUT_S) != 0:
            raise RuntimeError(f"the writer ended with {writer.returncode}")


def fill(folder: Path, url: str, events: int) -> None:
    with writing(folder, url, TOPIC, events, per_transaction=1_000):
        pass


@contextmanager
def background(module: str, folder: Path, arguments: dict[str, Any]) -> Iterator["subprocess.Popen[str]"]:
    """A contestant that runs during the block."""
    with running(child_command(module, arguments), folder) as process:
        yield process


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(command, cwd=folder, env=child_environment(), stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def await_line(process: "subprocess.Popen[str]", wanted: str) -> None:
    """Wait until the process has written this line."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != wanted:
        raise RuntimeError(f"a process did not get ready: {line!r}")


class ServerCost(NamedTuple):
    """What the server of a database has spent for each event."""

    cpu_us: float
    wal_bytes: float


class Meter:
    """Measures what a server spends, from its creation on."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cpu_s, self._wal_bytes = database.cpu_s(), database.wal_bytes()

    def read(self, events: int) -> ServerCost:
        cpu_s, wal_bytes = self._database.cpu_s() - self._cpu_s, self._database.wal_bytes() - self._wal_bytes
        return ServerCost(cpu_s * 1e6 / events, wal_bytes / events)
