"""Connections of the relay to PostgreSQL, with psycopg, whatever driver the URL names.

Nothing here depends on the state of a session, except the listener: the relay also works through a pooler that gives
each transaction another session.
"""

import contextlib
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from onward.errors import BadOutbox, BadSetting, OutboxUnreachable
from onward.outbox.schema import relay_grants
from onward.settings import redacted

# A server that is gone is noticed after about 10 s. A URL may have its own values.
_DEFAULTS = {
    "application_name": "onward relay",
    "client_encoding": "utf8",
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_OUR_DRIVERS = ("postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2")  # they have libpq's options
_dialect: Any = PGDialect_psycopg  # it has no annotations
_LISTEN_AGAIN_S = 5.0
_SLICE_S = 0.5  # how often a listener looks whether it was closed
_ANSWER_S = 20.0  # a server that is stopped still acknowledges packets, so that only its silence is noticed

T = TypeVar("T")

# States of PostgreSQL's errors. Their first two characters are a class.
_FORBIDDEN = "42501"
_NOTHING_THERE = {"42P01", "42703", "42883", "3F000"}  # no table, column, function or schema
_NOT_TEXT = {"22021", "22P05"}
_WAITED = {"55P03", "57014"}  # for a lock, or for the end of the statement
_BAD_CLASSES = {"0A", "22", "23", "42", "3F"}  # another try would fail too


class PgConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection on which a statement fails when the server says nothing for `answer_s`."""

    answer_s = _ANSWER_S

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        try:
            return super().wait(_limited(gen, self.answer_s), *args, **kwargs)
        except _Silence as error:
            self.pgconn.finish()  # an answer that arrives later would be taken for that of another statement
            raise psycopg.OperationalError(f"the server has not answered for {self.answer_s:g} s") from error

    @contextmanager
    def patience(self, answer_s: float) -> Iterator[None]:
        """Statements in the body may take so long."""
        self.answer_s = answer_s
        try:
            yield
        finally:
            self.answer_s = _ANSWER_S


class _Silence(Exception):
    pass


def _limited(gen: Generator[Any, Any, T], answer_s: float) -> Generator[Any, Any, T]:
    """psycopg waits by such a generator: it sends 0 for each tenth of a second without news."""
    try:
        wanted, since = next(gen), time.monotonic()
        while True:
            ready = yield wanted
            if ready:
                since = time.monotonic()
            elif time.monotonic() - since > answer_s:
                raise _Silence
            wanted = gen.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


def connect(url: str) -> PgConnection:
    """A connection in autocommit mode. BadSetting: not a URL. OutboxUnreachable: no server answers, or it refuses."""
    parameters = {**_DEFAULTS, **_parameters(url)}
    try:
        return PgConnection.connect(**parameters, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        raise OutboxUnreachable(
            f"the outbox's database {redacted(url)} cannot be opened: {_text(error)}; is it running, is the URL right?"
        ) from error


@contextmanager
def translated(url: str, table: str) -> Iterator[None]:
    """Errors of psycopg in the body become OutboxUnreachable, if another try may help, or else BadOutbox."""
    try:
        yield
    except psycopg.Error as error:
        raise _outbox_error(error, url, table) from error


def _outbox_error(error: psycopg.Error, url: str, table: str) -> OutboxUnreachable | BadOutbox:
    where, text, state = redacted(url), _text(error), error.sqlstate or ""
    if state == _FORBIDDEN:
        return BadOutbox(f"{where}: {text}; a relay needs these rights: {relay_grants('postgresql', table)}")
    if state in _NOTHING_THERE:
        return BadOutbox(
            f"{where}: the tables of the outbox {table} are missing or not complete ({text}); run "
            "`onward outbox init URL`, or `onward outbox upgrade URL` if they are of an older version"
        )
    if state in _NOT_TEXT:
        return BadOutbox(
            f"{where}: {text}; a text in {table} or {table}_parked is not UTF-8: correct it, or delete its row"
        )
    if state[:2] in _BAD_CLASSES or isinstance(error, psycopg.DataError | psycopg.ProgrammingError):
        return BadOutbox(f"{where}: {text}; is {table} an outbox of this version of Onward?")
    if state in _WAITED:
        return OutboxUnreachable(f"{where}: {text}; another program has locked tables of {table} for too long")
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return OutboxUnreachable(f"{where}: {text}; is it a replica now, or is default_transaction_read_only on?")
    return OutboxUnreachable(f"{where}: the outbox's database cannot be used: {text}; is it running?")


@contextmanager
def transaction(connection: PgConnection, begin: str) -> Iterator[None]:
    """Commits at the end of the body, and rolls back if it raises. `begin`: BEGIN, and SET LOCAL statements."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(psycopg.Error):
            connection.execute("ROLLBACK")
        raise


def begin(*, isolation: str = "READ COMMITTED", lock_s: float, idle_s: float, statement_s: float = 0.0) -> str:
    """The text that begins a transaction, in which the server does not wait for longer than this. A role may have
    another isolation level as its default. `idle_s`: for us, after which it ends the session. 0: any time."""
    return (
        f"BEGIN ISOLATION LEVEL {isolation}; SET LOCAL lock_timeout = {_ms(lock_s)}; "
        f"SET LOCAL idle_in_transaction_session_timeout = {_ms(idle_s)}; "
        f"SET LOCAL statement_timeout = {_ms(statement_s)}; SET LOCAL jit = off"
    )


class PostgresListener:
    """Waits for the bell: NOTIFY on a channel. One thread waits, and another one may close it.

    It has a connection of its own. Where LISTEN does not work, as through a pooler, waiting is only sleeping."""

    def __init__(self, url: str, channel: str) -> None:
        self._url = url
        self._channel = channel
        self._connection: PgConnection | None = None
        self._using = threading.Lock()
        self._closed = threading.Event()
        self._next_try = 0.0

    def wait(self, timeout_s: float) -> None:
        """Return after a notification, or after the time. Notifications since the last call count, as one."""
        ends = time.monotonic() + timeout_s
        with self._using:
            try:
                if self._listening() and self._heard(ends):
                    return
            except (psycopg.Error, OutboxUnreachable):
                self._next_try = time.monotonic() + _LISTEN_AGAIN_S
                self._disconnect()
            finally:
                if self._closed.is_set():
                    self._disconnect()
        self._closed.wait(max(0.0, ends - time.monotonic()))

    def close(self) -> None:
        """Disconnect. A call of `wait` returns early."""
        self._closed.set()
        if self._using.acquire(timeout=2 * _SLICE_S):  # otherwise it is connecting, and will disconnect by itself
            self._disconnect()
            self._using.release()

    def _listening(self) -> bool:
        if self._connection is None and time.monotonic() >= self._next_try and not self._closed.is_set():
            self._connection = connect(self._url)
            self._connection.execute(f'LISTEN "{self._channel}"')
        return self._connection is not None

    def _heard(self, ends: float) -> bool:
        assert self._connection is not None
        while not self._closed.is_set() and (left_s := ends - time.monotonic()) > 0:
            if list(self._connection.notifies(timeout=min(left_s, _SLICE_S), stop_after=1)):
                list(self._connection.notifies(timeout=0))
                return True
        return False

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _parameters(url: str) -> dict[str, Any]:
    """libpq's connection parameters. Options of another driver that libpq does not know are left out."""
    try:
        address = make_url(url)
        _, given = _dialect().create_connect_args(address)
    except (ArgumentError, ValueError):
        # Without its cause: the text of that error contains the password.
        raise BadSetting(
            f"the outbox's database {redacted(url)}: not a URL; write postgresql://user:password@host:5432/database"
        ) from None
    return _known(address, dict(given))


def _known(address: URL, given: dict[str, Any]) -> dict[str, Any]:
    if "ssl" in given:  # asyncpg's name
        given.setdefault("sslmode", given.pop("ssl"))
    names = {each.keyword.decode() for each in psycopg.pq.Conninfo.get_defaults()}
    unknown = sorted(given.keys() - names)
    if unknown and address.drivername in _OUR_DRIVERS:
        raise BadSetting(
            f"the outbox's database {redacted(str(address))}: PostgreSQL has no connection option {unknown[0]!r}"
        )
    return {name: value for name, value in given.items() if name in names}


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000)) if seconds else 0


def _text(error: psycopg.Error) -> str:
    """In one line, without the statement."""
    return " ".join((error.diag.message_primary or str(error)).split())
