"""Connections of the queue store to MariaDB and MySQL, by PyMySQL, whatever driver the URL names."""

import logging
from typing import Any

import pymysql
from pymysql.constants import CLIENT
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from onward.errors import BadOutbox, BadSetting, MissingExtra, OutboxError, OutboxUnreachable
from onward.outbox.queue_connections import LONGEST_LOCK_S, QueueConnection
from onward.outbox.schema import TABLES, relay_grants
from onward.settings import redacted

log = logging.getLogger("onward")

_TIMEOUT_S = 10

# The numbers of errors
_DENIED = {1044, 1142, 1143, 1227, 1370}
_LOGIN = {1045, 1698}
_READ_ONLY = {1290, 1792, 1836}
_MISSING = {1046, 1049, 1054, 1146}
_LOCK_TIMEOUT = 1205
_WRONG = (pymysql.ProgrammingError, pymysql.IntegrityError, pymysql.DataError, pymysql.NotSupportedError)
_OPTIONS = {"unix_socket", "ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_cert", "ssl_verify_identity"}


class MariaDBConnection(QueueConnection):
    faults = (pymysql.MySQLError, OSError)

    def __init__(self, url: str, table: str) -> None:
        super().__init__(url, table)
        self._lease_s = 0.0
        try:
            self._raw = pymysql.connect(**_options(url))
        except self.faults as error:
            raise self._ours(error) from error
        except RuntimeError as error:  # MySQL's passwords, without TLS
            raise MissingExtra(f"{self.where}: {error}: pip install 'PyMySQL[rsa]', or connect with TLS") from error
        # Delete by primary key, whatever the statistics say: a scan would wait for the uncommitted rows of writers, and
        # the optimizer prefers one if most rows of a small table are to be deleted.
        self.run("SET SESSION sql_safe_updates = 1")

    def limit_pauses(self, lease_s: float) -> None:
        if lease_s == self._lease_s:
            return
        pause_s = max(1, round(lease_s / 3))
        self.run(f"SET SESSION innodb_lock_wait_timeout = {min(pause_s + 1, LONGEST_LOCK_S)}")
        if self.rows("SHOW VARIABLES LIKE 'idle_transaction_timeout'"):  # MySQL has no such limit
            self.run(f"SET SESSION idle_transaction_timeout = {pause_s}")
        self._lease_s = lease_s

    def check_server(self) -> None:
        home, names = self._home(), [f"{self.table.rpartition('.')[2]}{suffix}" for suffix in TABLES]
        engines = self.rows(
            "SELECT table_name, engine FROM information_schema.tables WHERE table_schema = %s AND engine <> 'InnoDB'",
            home,
        )
        for name, engine in engines:
            if name in names:
                raise BadOutbox(
                    f"{self.where}: {name} has the engine {engine}, without transactions, so events would be lost: run "
                    f"ALTER TABLE {name} ENGINE=InnoDB"
                )
        ((binary_log, log_format, step),) = self.rows("SELECT @@log_bin, @@binlog_format, @@auto_increment_increment")
        if binary_log and log_format == "STATEMENT":
            raise BadOutbox(
                f"{self.where}: binlog_format is STATEMENT, with which a relay cannot work: set it to MIXED"
            )
        if step > 1:
            log.warning(
                "%s: auto_increment_increment is %d, as with several primary servers. The events of a key keep their "
                "order only if all writers of this outbox use the same server",
                *(self.where, step),
            )

    def identity(self) -> str:
        """A Galera cluster is one database, whichever node we are connected to."""
        ((host, port, folder),) = self.rows("SELECT @@hostname, @@port, @@datadir")
        cluster = self.rows("SHOW GLOBAL STATUS LIKE 'wsrep_cluster_state_uuid'")
        place = f"cluster {cluster[0][1]}" if cluster and cluster[0][1] else f"{host}:{port} {folder}"
        return f"database {self._home()} on {place}"[:255]

    def _home(self) -> str:
        """The database with our tables."""
        named: str = self.table.rpartition(".")[0]
        return named or self.rows("SELECT DATABASE()")[0][0]

    def _ours(self, error: Exception) -> OutboxError:
        code, text = error.args[0] if error.args else 0, " ".join(str(error.args[-1] if error.args else error).split())
        if code in _MISSING:
            return self._missing(text)
        if code in _DENIED:
            return BadOutbox(f"{self.where}: {text}; a relay needs these rights: {relay_grants('mariadb', self.table)}")
        if code in _READ_ONLY:
            return self._read_only(text)
        if code in _LOGIN or isinstance(error, _WRONG):
            return BadOutbox(f"{self.where}: {text}")
        if code == _LOCK_TIMEOUT:
            return OutboxUnreachable(f"{self.where}: {text}; another relay, or a command, holds a lock on {self.table}")
        return self._unreachable(text or type(error).__name__)


def _options(url: str) -> dict[str, Any]:
    try:
        address = make_url(url)
    except (ArgumentError, ValueError):  # without its cause: that text contains the password
        raise BadSetting(
            f"the outbox's database {redacted(url)}: not a URL; write mysql://user:password@host:3306/database"
        ) from None
    return {name: value for name, value in address.query.items() if name in _OPTIONS} | {
        "host": address.host or "localhost",
        "port": address.port or 3306,
        "user": address.username or "",
        "password": address.password or "",
        "database": address.database,
        "charset": "utf8mb4",
        "autocommit": True,
        "client_flag": CLIENT.FOUND_ROWS,
        "sql_mode": "STRICT_ALL_TABLES",
        # In a transaction of the level SERIALIZABLE, each read would lock its rows.
        "init_command": "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "connect_timeout": _TIMEOUT_S,
        "read_timeout": _TIMEOUT_S,
        "write_timeout": _TIMEOUT_S,
        "program_name": "onward relay",
    }
