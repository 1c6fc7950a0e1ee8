"""Django: an outbox in a database of the project, written within `transaction.atomic`."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack
from urllib.parse import quote, urlencode

from django.core import mail
from django.db import connections, router, transaction
from django.db.migrations.operations.base import Operation

from onward.errors import BadSetting
from onward.event import Event
from onward.outbox import Outbox
from onward.outbox.connections import check_rows, refusals
from onward.outbox.inserts import Dialect, OutboxEntry, steps
from onward.outbox.outbox import AddOptions
from onward.outbox.schema import TABLE, statements

if TYPE_CHECKING:
    from onward.app import Onward

__all__ = ["CreateOutbox", "DjangoOutbox"]

_DIALECTS: Mapping[str, Dialect] = {"postgresql": "postgresql", "mysql": "mariadb", "sqlite": "sqlite"}
_OPTIONS = {  # of Django's OPTIONS, those that the relay's drivers have too
    "postgresql": ("sslmode", "sslcert", "sslkey", "sslrootcert", "options", "target_session_attrs"),
    "mariadb": ("unix_socket",),
    "sqlite": (),
}


class DjangoOutbox:
    """Adds events to the transaction of a database in `settings.DATABASES`.

    A relay finds the database by the same settings. In Django's TestCase the events are rolled back with the test.
    """

    def __init__(self, app: "Onward", using: str = "default", *, table: str = TABLE) -> None:
        self.using = using
        self._outbox = Outbox(app, lambda: url_of(using), table=table)

    @property
    def url(self) -> str | None:
        return self._outbox.url

    @property
    def table(self) -> str:
        return self._outbox.table

    def add(self, topic: str, value: Any, **options: Unpack[AddOptions]) -> Event:
        """Write the event now, in the transaction that is open. First write what the event is about: this keeps the
        order of the key. Otherwise as `Outbox.add`."""
        entry = self._outbox.entry(topic, value, **options)
        if not connections[self.using].in_atomic_block:
            raise BadSetting(
                f"an event for topic {topic!r} outside of a transaction of database {self.using!r}, so it would be "
                "committed alone: add it within `with transaction.atomic():`"
            )
        transaction.on_commit(self._write(entry), using=self.using, robust=True)
        return entry.event

    def ring(self) -> None:
        """Wake the relay. Each commit does this. In tests, only relays of this process are woken: the connection of the
        bell would keep Django from dropping the test database."""
        self._outbox.ring(only_here=hasattr(mail, "outbox"))  # Django's test runner sets mail.outbox

    def clear(self) -> None:
        """Delete all events that are in the table. For TransactionTestCase, which empties only the tables of models."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(f"DELETE FROM {self.table}")

    def _write(self, entry: OutboxEntry) -> Callable[[], None]:
        """Returns a function to call after the commit."""
        connection, table = connections[self.using], self._outbox.table
        dialect = _dialect(connection)
        if dialect == "sqlite":
            ring = self._outbox.app.append_in(connection.connection, [entry.event])
            if ring is not None:
                return ring
        with connection.cursor() as cursor:
            for step in steps(dialect, "%s", table, [entry]):
                with refusals(dialect, table):
                    cursor.execute(step.sql, step.values)
                if step.rows is not None:
                    check_rows(step, cursor.fetchall(), table)
        return self.ring


class CreateOutbox(Operation):
    """A migration that creates the tables of an outbox. It cannot be reversed: that would drop events."""

    reversible = False
    reduces_to_sql = True

    def __init__(self, table: str = TABLE, *, shards: int | None = None, mode: str | None = None) -> None:
        self.table = table
        self.shards = shards
        self.mode = mode

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The tables are no models."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        connection = schema_editor.connection
        if router.allow_migrate(connection.alias, app_label):
            for each in statements(_dialect(connection), table=self.table, shards=self.shards, mode=self.mode):
                schema_editor.execute(each, params=None)

    def describe(self) -> str:
        return f"Create the outbox {self.table}"


def url_of(using: str) -> str | None:
    """The URL of a database of the project, for the relay. None: it is in memory."""
    connection = connections[using]
    dialect, settings = _dialect(connection), connection.settings_dict
    if dialect == "sqlite":
        return None if connection.is_in_memory_db() else f"{dialect}:///{settings['NAME']}"
    host, socket = str(settings["HOST"]), {"postgresql": "host", "mariadb": "unix_socket"}[dialect]
    options = {name: str(settings["OPTIONS"][name]) for name in _OPTIONS[dialect] if name in settings["OPTIONS"]}
    if host.startswith("/"):
        host, options[socket] = "", host
    user = ":".join(quote(str(settings[name]), safe="") for name in ("USER", "PASSWORD") if settings[name])
    port = f":{settings['PORT']}" if settings["PORT"] else ""
    place = f"{f'{user}@' if user else ''}{host}{port}/{quote(str(settings['NAME']), safe='')}"
    return f"{dialect}://{place}{f'?{urlencode(options)}' if options else ''}"


def _dialect(connection: Any) -> Dialect:
    if connection.vendor not in _DIALECTS:
        raise BadSetting(
            f"database {connection.alias!r} is {connection.vendor}: an outbox works on PostgreSQL, MariaDB, MySQL and "
            "SQLite"
        )
    return _DIALECTS[connection.vendor]
