"""The tables and SQL functions of an outbox: their versions, and how they are created.

The SQL is in the folder schema: DIALECT_VERSION.sql, and DIALECT_VERSION_MODE.sql where the modes differ. A blank line
ends a statement.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files

from onward.errors import BadOutbox, BadSetting, OutboxUnreachable
from onward.outbox.databases import OutboxConnection, check_table, connected, dialect_of, lacks_column

VERSION = 2
"""The newest schema version, which the relay needs. Version 1 has the tables, which are enough for writers. Version 2
adds the SQL functions."""

TABLE = "onward_outbox"
TABLES = ("", "_meta", "_relay", "_shard", "_parked")  # their names end so
_COLUMNS = {  # to tell an outbox from tables of another program
    "": "id, event_id, topic, event_key, event_type, event_time, headers, payload, shard",
    "_meta": "name, value",
    "_relay": "name, beat, lease_s",
    "_shard": "shard, owner, fence",
    "_parked": "id, shard, event_id, refused, why, since",
}
_MODES = {"postgresql": ("log", "queue"), "mariadb": ("queue",), "sqlite": ("queue",)}  # the default first
_SHARDS = {"postgresql": 8, "mariadb": 8, "sqlite": 1}
_MOST_SHARDS = 256
_WAIT_S = 60  # for another process that creates the same tables
_RIGHTS = "use a role that may create tables and functions, or let its owner run the SQL that --print shows"


def init(url: str, *, table: str = TABLE, shards: int | None = None, mode: str | None = None) -> list[str]:
    """Create the tables and functions that are missing. Returns what it created."""
    fresh = _options(dialect_of(url), table, shards, mode)
    with connected(url, create=True, rights=_RIGHTS) as connection, _alone(connection, table):
        meta = read_meta(connection, table)
        if "version" not in meta:
            _refuse_foreign(connection, table)
            return _apply(connection, {**fresh, **_begun(meta)}, 0)
        _refuse_change(table, meta, shards, mode)
        return _upgraded(connection, table, meta)


def upgrade(url: str, *, table: str = TABLE) -> list[str]:
    """Bring an outbox to the newest version. Returns what it created."""
    check_table(table)
    with connected(url, rights=_RIGHTS) as connection, _alone(connection, table):
        return _upgraded(connection, table, existing_meta(connection, table))


def missing(url: str, *, table: str = TABLE) -> str:
    """The SQL that `upgrade` would run, as `script` returns it."""
    check_table(table)
    with connected(url, rights=_RIGHTS) as connection:
        meta = existing_meta(connection, table)
    shards, version = int(meta["shards"]), int(meta["version"])
    return script(dialect_of(url), table=table, shards=shards, mode=meta["mode"], since=version)


def statements(
    dialect: str, *, table: str = TABLE, shards: int | None = None, mode: str | None = None, since: int = 0
) -> list[str]:
    """The SQL that creates all versions above `since`, for migrations: each text is one statement."""
    options = _options(dialect, table, shards, mode)
    return [each for version in range(since + 1, VERSION + 1) for each in _statements(dialect, version, options)]


def script(
    dialect: str, *, table: str = TABLE, shards: int | None = None, mode: str | None = None, since: int = 0
) -> str:
    """`statements` as one text, for the database's own client."""
    every = statements(dialect, table=table, shards=shards, mode=mode, since=since)
    return "\n".join(_for_client(each) for each in every)


def check(version: int, works_from: int) -> None:
    """BadOutbox if a relay of this Onward cannot work with the schema."""
    if version < VERSION:
        raise BadOutbox(
            f"the outbox has schema version {version}, and the relay needs {VERSION}: run `onward outbox upgrade URL`"
        )
    if works_from > VERSION:
        raise BadOutbox(
            f"the outbox has schema version {version}, which needs an Onward that knows version {works_from}; this one "
            f"knows {VERSION}: upgrade Onward"
        )


def relay_grants(dialect: str, table: str) -> str:
    """The SQL that gives a role the rights of a relay."""
    names, right = [f"{table}{suffix}" for suffix in TABLES], "GRANT SELECT, INSERT, UPDATE, DELETE ON"
    if dialect == "postgresql":
        return f"{right} {', '.join(names)} TO role; GRANT SELECT ON SEQUENCE {table}_id_seq TO role"
    return "; ".join(f"{right} {each} TO role" for each in names)


def read_meta(connection: OutboxConnection, table: str) -> dict[str, str]:
    """What the outbox says about itself; empty if there is none."""
    if not connection.has_table(f"{table}_meta"):
        return {}
    try:
        return dict(connection.rows(f"SELECT {_COLUMNS['_meta']} FROM {table}_meta"))
    except BadOutbox as error:
        if lacks_column(error):
            raise _foreign(connection, f"{table}_meta") from error
        raise


def existing_meta(connection: OutboxConnection, table: str) -> dict[str, str]:
    """What the outbox says about itself. BadOutbox if there is none."""
    meta = read_meta(connection, table)
    if "version" not in meta:
        if connection.dialect == "sqlite" and connection.has_table("onward_topic"):
            raise BadOutbox(
                f"{connection.where} has no outbox {table}. It is a broker of Onward: if it is your application's, an "
                "outbox in it needs no tables and no relay. Otherwise run `onward outbox init URL`"
            )
        raise BadOutbox(f"{connection.where} has no outbox {table}: run `onward outbox init URL`")
    return meta


def _options(dialect: str, table: str, shards: int | None, mode: str | None) -> Mapping[str, str]:
    """The words to fill into the SQL."""
    check_table(table)
    if dialect not in _MODES:
        raise BadSetting(f"an outbox works on {', '.join(_MODES)}, not on {dialect!r}")
    modes = _MODES[dialect]
    if mode is not None and mode not in modes:
        raise BadSetting(f"mode {mode!r}: an outbox on {dialect} has mode {' or '.join(modes)}")
    most = 1 if dialect == "sqlite" else _MOST_SHARDS
    if shards is not None and not 1 <= shards <= most:
        raise BadSetting(f"shards={shards}: an outbox on {dialect} has {'1 shard' if most == 1 else f'1 to {most}'}")
    home, dot, name = table.rpartition(".")
    return {
        "given": table,
        "table": table,
        "name": name,
        "prefix": f"{home}{dot}{name.removesuffix('_outbox')}",
        "shards": str(_SHARDS[dialect] if shards is None else shards),
        "mode": mode or modes[0],
    }


def _begun(meta: Mapping[str, str]) -> Mapping[str, str]:
    """On MariaDB, the choices of an `init` that was interrupted. Its tables already have them."""
    return {name: meta[name] for name in ("shards", "mode") if name in meta}


def _refuse_change(table: str, meta: Mapping[str, str], shards: int | None, mode: str | None) -> None:
    for name, wanted in (("shards", shards), ("mode", mode)):
        if wanted is not None and str(wanted) != meta[name]:
            raise BadSetting(
                f"{name}={wanted}: the outbox {table} exists with {name}={meta[name]}, which cannot change; create "
                "another one with --table, and drop this one when it is empty"
            )


def _refuse_foreign(connection: OutboxConnection, table: str) -> None:
    """BadOutbox if another program has a table with one of our names."""
    for suffix, columns in _COLUMNS.items():
        name = f"{table}{suffix}"
        if connection.has_table(name) and not _is_ours(connection, name, columns):
            raise _foreign(connection, name)


def _foreign(connection: OutboxConnection, name: str) -> BadOutbox:
    return BadOutbox(
        f"{connection.where} has a table {name} that is not part of an outbox; choose another name with --table"
    )


def _is_ours(connection: OutboxConnection, name: str, columns: str) -> bool:
    """Only MariaDB can have some of our tables without a version, because it commits after each CREATE."""
    if connection.dialect != "mariadb":
        return False
    try:
        connection.rows(f"SELECT {columns} FROM {name} LIMIT 0")
    except BadOutbox as error:
        if lacks_column(error):
            return False
        raise
    return True


def _refuse_foreign_procedures(connection: OutboxConnection, options: Mapping[str, str]) -> None:
    """BadOutbox if MariaDB would replace a procedure that is not ours."""
    if connection.dialect != "mariadb":
        return
    home, _, prefix = options["prefix"].rpartition(".")
    found = connection.value(
        "SELECT routine_name FROM information_schema.routines WHERE routine_schema = COALESCE(NULLIF(%s, ''), "
        "DATABASE()) AND routine_name IN (%s, %s) AND routine_comment <> %s",
        *(home, f"{prefix}_enqueue", f"{prefix}_lock", f"Onward outbox {options['table']}"),
    )
    if found is not None:
        raise BadOutbox(
            f"{connection.where} has a procedure {found} of another outbox or program; choose another name with --table"
        )


def _upgraded(connection: OutboxConnection, table: str, meta: Mapping[str, str]) -> list[str]:
    version = int(meta["version"])
    if version >= VERSION:
        check(version, int(meta["works_from"]))
        return []
    options = _options(connection.dialect, table, int(meta["shards"]), meta["mode"])
    return _apply(connection, {**options, **_home(connection, options)}, version)


def _home(connection: OutboxConnection, options: Mapping[str, str]) -> Mapping[str, str]:
    """On PostgreSQL, the names with the schema where the tables are. It may not be the first one of the search_path."""
    if connection.dialect != "postgresql" or "." in options["table"]:
        return {}
    where = "SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass(%s)"
    home = connection.value(where, options["table"])
    return {name: f"{home}.{options[name]}" for name in ("table", "prefix")}


def _apply(connection: OutboxConnection, options: Mapping[str, str], since: int) -> list[str]:
    done = []
    _refuse_foreign_procedures(connection, options)
    for version in range(since + 1, VERSION + 1):
        for statement in _statements(connection.dialect, version, options):
            connection.run(statement)
        done.append(f"version {version}{_what(connection.dialect, version)}")
    return done


def _what(dialect: str, version: int) -> str:
    if version == 1:
        return ": tables"
    return {"postgresql": ": SQL functions", "mariadb": ": SQL procedures"}.get(dialect, "")


def _statements(dialect: str, version: int, options: Mapping[str, str]) -> list[str]:
    text = "\n\n".join(_file(f"{dialect}_{version}{part}.sql") for part in (f"_{options['mode']}", ""))
    for name, value in options.items():
        text = text.replace(f"{{{name}}}", value)
    return [each.strip().removesuffix(";") for each in text.split("\n\n") if each.strip()]


def _file(name: str) -> str:
    path = files("onward.outbox").joinpath("schema", name)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _for_client(statement: str) -> str:
    """With its end. The clients of MariaDB and MySQL would end a procedure at its first semicolon."""
    if "\nCREATE PROCEDURE" in f"\n{statement}":
        return f"DELIMITER //\n{statement}//\nDELIMITER ;\n"
    return f"{statement};\n"


@contextmanager
def _alone(connection: OutboxConnection, table: str) -> Iterator[None]:
    """One process at a time changes an outbox: in a transaction, except on MariaDB, which has none for tables."""
    lock = f"onward {hashlib.sha256(table.encode()).hexdigest()[:32]}"
    with connection.transaction():
        if connection.dialect == "postgresql":
            connection.run("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", lock)
        if connection.dialect == "mariadb" and connection.value("SELECT GET_LOCK(%s, %s)", lock, _WAIT_S) != 1:
            raise OutboxUnreachable(
                f"{connection.where}: another process has changed {table} for {_WAIT_S} s; try again"
            )
        yield
