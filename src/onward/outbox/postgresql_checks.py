"""Checks before a relay uses an append-only outbox on PostgreSQL: the server, the tables, the rights, the sequence."""

from onward.errors import BadOutbox
from onward.outbox import schema
from onward.outbox.postgresql import PgConnection

_OLDEST_SERVER = 130000  # the first one with transaction numbers of 64 bits
_RIGHTS = {
    "": ("SELECT", "UPDATE", "DELETE"),
    "_meta": ("SELECT", "UPDATE"),
    "_relay": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "_shard": ("SELECT", "UPDATE"),
    "_parked": ("SELECT", "INSERT", "UPDATE", "DELETE"),
}
_LACKING = """
SELECT given.name, given.of FROM unnest(%s::text[], %s::text[]) AS given (name, of)
WHERE NOT has_table_privilege(given.name, given.of)
"""
_SEQUENCE = """
SELECT seqrelid::regclass::text, seqcache, seqincrement, has_sequence_privilege(seqrelid, 'SELECT')
FROM pg_sequence WHERE seqrelid = pg_get_serial_sequence(%s, 'id')::regclass
"""


def check_outbox(connection: PgConnection, where: str, table: str) -> None:
    """BadOutbox if a relay cannot work here, with the cure."""
    _check_server(connection, where)
    _check_tables(connection, where, table)
    _check_rights(connection, where, table)
    _check_sequence(connection, where, table)
    meta: dict[str, str] = dict(connection.execute(f"SELECT name, value FROM {table}_meta").fetchall())
    if "version" not in meta:
        raise BadOutbox(f"{where}: the outbox {table} was not created completely; run `onward outbox init URL` again")
    schema.check(int(meta["version"]), int(meta["works_from"]))


def _check_server(connection: PgConnection, where: str) -> None:
    if connection.info.server_version < _OLDEST_SERVER:
        raise BadOutbox(f"{where}: an append-only outbox needs PostgreSQL 13; create it with --mode queue")
    ((replica,),) = connection.execute("SELECT pg_is_in_recovery()").fetchall()
    if replica:
        raise BadOutbox(f"{where} is a replica, which refuses writes; connect to the primary server")


def _check_tables(connection: PgConnection, where: str, table: str) -> None:
    names = [f"{table}{suffix}" for suffix in schema.TABLES]
    missing = connection.execute(
        "SELECT name FROM unnest(%s::text[]) AS name WHERE to_regclass(name) IS NULL", (names,)
    ).fetchall()
    if missing:
        raise BadOutbox(f"{where} has no table {missing[0][0]}; run `onward outbox init URL`")


def _check_rights(connection: PgConnection, where: str, table: str) -> None:
    needed = [(f"{table}{suffix}", right) for suffix, rights in _RIGHTS.items() for right in rights]
    names, rights = zip(*needed, strict=True)
    lacking: dict[str, list[str]] = {}
    for name, right in connection.execute(_LACKING, (list(names), list(rights))):
        lacking.setdefault(name, []).append(right)
    if lacking:
        user = connection.info.user
        grants = "; ".join(f'GRANT {", ".join(rights)} ON {name} TO "{user}"' for name, rights in lacking.items())
        raise BadOutbox(f"{where}: the role {user} lacks rights of a relay: {grants}")


def _check_sequence(connection: PgConnection, where: str, table: str) -> None:
    found = connection.execute(_SEQUENCE, (table,)).fetchall()
    if not found:
        raise BadOutbox(
            f"{where}: {table}.id is not an identity column; create the outbox with `onward outbox init URL`"
        )
    name, cache, increment, readable = found[0]
    if cache != 1 or increment < 1:
        raise BadOutbox(
            f"{where}: the sequence {name} has CACHE {cache} and INCREMENT {increment}, so the ids of events do not "
            f"follow the order of their transactions: run ALTER SEQUENCE {name} CACHE 1 INCREMENT 1"
        )
    if not readable:
        user = connection.info.user
        raise BadOutbox(
            f'{where}: the role {user} lacks a right of a relay: GRANT SELECT ON SEQUENCE {name} TO "{user}"'
        )
