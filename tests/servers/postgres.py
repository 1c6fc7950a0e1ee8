"""PostgreSQL: the superuser and the database are both called onward; logical decoding is on."""

import signal

import psycopg

from tests.servers.needs import POSTGRES
from tests.servers.server import PROBE_S, Server

SETTINGS = {"listen_addresses": "127.0.0.1", "wal_level": "logical"}


class PostgresServer(Server):
    name = "PostgreSQL"
    address = "postgresql://onward@127.0.0.1:{port}/onward"
    account = "postgres"
    stop_signal = signal.SIGINT  # on SIGTERM it would wait for its clients to disconnect
    farewell = signal.SIGQUIT  # after SIGKILL it would leave its shared memory behind

    def prepare(self) -> None:
        initdb = POSTGRES.path.with_name("initdb")
        self.run(str(initdb), "-D", str(self.folder / "data"), "-A", "trust", "-U", "onward", "-E", "UTF8", "--no-sync")

    def command(self) -> list[str]:
        settings = {**SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        return [
            str(POSTGRES.path),
            *("-D", str(self.folder / "data")),
            *(f"--{name}={value}" for name, value in settings.items()),
        ]

    def probe(self) -> None:
        """Connect, and create the database if it does not exist yet."""
        url = self.url.removesuffix("onward") + "postgres"
        with psycopg.connect(url, autocommit=True, connect_timeout=int(PROBE_S)) as connection:
            if not connection.execute("select 1 from pg_database where datname = 'onward'").fetchone():
                connection.execute("create database onward")
