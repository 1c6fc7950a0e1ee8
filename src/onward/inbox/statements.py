"""The SQL of the inbox, one set of statements per database. Each statement takes its locks before it reads."""

import re
from typing import NamedTuple

from onward.errors import BadSetting

_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,40}(\.[A-Za-z_][A-Za-z0-9_]{0,40})?")


class Statements(NamedTuple):
    create: tuple[str, ...]
    insert: str  # a row; waits while another transaction inserts it. No row counted or a duplicate key: it exists
    lock: str  # a cursor; waits while another transaction has locked it. Returns fence and done
    begin: str  # create a cursor
    write: str
    overwrite: str  # a cursor, if it is as we left it. No row counted: it has changed, or has another owner
    forget: str  # delete one row
    drop_old: str  # delete a page of rows that are older than the horizon
    probe: tuple[str, ...]


_KEY = "grp = :grp AND topic = :topic AND part = :part AND log_id = :log_id"
_INSERT = "INSERT INTO {t} (grp, topic, event_id, done_at) VALUES (:grp, :topic, :event_id, :now)"
_BEGIN = (
    "INSERT INTO {t}_cursor (grp, topic, part, log_id, fence, done) VALUES (:grp, :topic, :part, :log_id, :fence, '')"
)
_LOCK = f"SELECT fence, done FROM {{t}}_cursor WHERE {_KEY} FOR UPDATE"
_WRITE = f"UPDATE {{t}}_cursor SET fence = :fence, done = :done WHERE {_KEY} AND fence <= :fence"
_OVERWRITE = f"UPDATE {{t}}_cursor SET done = :done WHERE {_KEY} AND fence = :fence AND done = :known"
_FORGET = "DELETE FROM {t} WHERE grp = :grp AND topic = :topic AND event_id = :event_id"
_PROBE = (
    "SELECT grp, topic, event_id, done_at FROM {t} WHERE 1 = 0",
    "SELECT grp, topic, part, log_id, fence, done FROM {t}_cursor WHERE 1 = 0",
)

POSTGRESQL = Statements(
    create=(
        """\
CREATE TABLE IF NOT EXISTS {t} (
    grp VARCHAR(200) COLLATE "C" NOT NULL,
    topic VARCHAR(200) COLLATE "C" NOT NULL,
    event_id VARCHAR(200) COLLATE "C" NOT NULL,
    done_at BIGINT NOT NULL,  -- Unix time
    PRIMARY KEY (grp, topic, event_id)
)""",
        "CREATE INDEX IF NOT EXISTS {name}_age ON {t} (done_at)",
        """\
CREATE TABLE IF NOT EXISTS {t}_cursor (
    grp VARCHAR(200) COLLATE "C" NOT NULL,
    topic VARCHAR(200) COLLATE "C" NOT NULL,
    part INTEGER NOT NULL,
    log_id VARCHAR(200) COLLATE "C" NOT NULL,
    fence BIGINT NOT NULL,
    done TEXT NOT NULL,  -- positions, as ascending intervals [a, b)
    PRIMARY KEY (grp, topic, part, log_id)
)""",
    ),
    insert=_INSERT + " ON CONFLICT DO NOTHING",
    lock=_LOCK,
    begin=_BEGIN + " ON CONFLICT DO NOTHING",
    write=_WRITE,
    overwrite=_OVERWRITE,
    forget=_FORGET,
    drop_old="DELETE FROM {t} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {t} WHERE done_at < :before "
    "ORDER BY done_at LIMIT :page FOR UPDATE SKIP LOCKED))",
    probe=_PROBE,
)

MARIADB = Statements(
    create=(
        """\
CREATE TABLE IF NOT EXISTS {t} (
    grp VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    topic VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    event_id VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    done_at BIGINT NOT NULL,
    PRIMARY KEY (grp, topic, event_id),
    KEY {name}_age (done_at)
) ENGINE=InnoDB""",
        """\
CREATE TABLE IF NOT EXISTS {t}_cursor (
    grp VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    topic VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    part INTEGER NOT NULL,
    log_id VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    fence BIGINT NOT NULL,
    done MEDIUMTEXT CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    PRIMARY KEY (grp, topic, part, log_id)
) ENGINE=InnoDB""",
    ),
    insert=_INSERT,  # not INSERT IGNORE, which would also ignore other errors
    lock=_LOCK,
    begin=_BEGIN,
    write=_WRITE,
    overwrite=_OVERWRITE,
    forget=_FORGET,
    drop_old="DELETE FROM {t} WHERE done_at < :before ORDER BY done_at LIMIT :page",
    probe=_PROBE,
)

SQLITE = Statements(
    create=(
        """\
CREATE TABLE IF NOT EXISTS {t} (
    grp TEXT NOT NULL,
    topic TEXT NOT NULL,
    event_id TEXT NOT NULL,
    done_at INTEGER NOT NULL,
    PRIMARY KEY (grp, topic, event_id)
) WITHOUT ROWID""",
        "CREATE INDEX IF NOT EXISTS {name}_age ON {t} (done_at)",
        """\
CREATE TABLE IF NOT EXISTS {t}_cursor (
    grp TEXT NOT NULL,
    topic TEXT NOT NULL,
    part INTEGER NOT NULL,
    log_id TEXT NOT NULL,
    fence INTEGER NOT NULL,
    done TEXT NOT NULL,
    PRIMARY KEY (grp, topic, part, log_id)
) WITHOUT ROWID""",
    ),
    insert=_INSERT + " ON CONFLICT DO NOTHING",
    # A write, so that it waits for the write lock. After a SELECT, SQLite could refuse the lock.
    lock=f"UPDATE {{t}}_cursor SET fence = fence WHERE {_KEY} RETURNING fence, done",
    begin=_BEGIN + " ON CONFLICT DO NOTHING",
    write=_WRITE,
    overwrite=_OVERWRITE,
    forget=_FORGET,
    drop_old="DELETE FROM {t} WHERE (grp, topic, event_id) IN "
    "(SELECT grp, topic, event_id FROM {t} WHERE done_at < :before ORDER BY done_at LIMIT :page)",
    probe=_PROBE,
)

_BY_DIALECT = {"postgresql": POSTGRESQL, "mysql": MARIADB, "mariadb": MARIADB, "sqlite": SQLITE}


def statements(dialect: str, table: str) -> Statements:
    """The statements for a database, with the table's name in them."""
    if dialect not in _BY_DIALECT:
        raise BadSetting(f"SqlInbox supports PostgreSQL, MariaDB, MySQL and SQLite, not {dialect!r}")
    if not _TABLE.fullmatch(table):
        raise BadSetting(f"SqlInbox(table={table!r}): use at most 41 letters, digits and _, with or without `schema.`")
    name = table.rpartition(".")[2]

    def named(text: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(text, tuple):
            return tuple(each.format(t=table, name=name) for each in text)
        return text.format(t=table, name=name)

    return Statements(*(named(each) for each in _BY_DIALECT[dialect]))  # type: ignore[arg-type]
