"""The application and the SQLite file of a folder, used without the command line."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import msgspec

from onward.app import Onward
from onward.event import Event


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'shop.db'}"


def publish(folder: Path, *ids: int | str, topic: str = "orders") -> None:
    async def run() -> None:
        async with Onward(url(folder)) as app:
            await app.publish_many(topic, [(f"c-{number}", {"id": number}) for number in ids])

    asyncio.run(run())


def groups(folder: Path, topic: str = "orders") -> list[str]:
    async def run() -> list[str]:
        async with Onward(url(folder)) as app:
            return [info.group for info in await app.broker.groups(topic)]

    return asyncio.run(run())


def owners(folder: Path, group: str) -> set[str]:
    """The members that own a partition, as stored in the table, with the suffix that differs by process."""
    with contextlib.closing(sqlite3.connect(folder / "shop.db")) as db:
        rows = db.execute("SELECT DISTINCT owner FROM onward_group WHERE grp = ? AND owner IS NOT NULL", (group,))
        return {owner for (owner,) in rows}


def set_times(folder: Path, times: dict[str, float]) -> None:
    """Set the times of events, by key, as another program could have written them."""
    with contextlib.closing(sqlite3.connect(folder / "shop.db")) as db, db:
        for seq, data in db.execute("SELECT seq, data FROM onward_log").fetchall():
            events = msgspec.msgpack.decode(data, type=list[Event])
            foreign = [msgspec.structs.replace(each, time=times.get(each.key or "", each.time)) for each in events]
            db.execute("UPDATE onward_log SET data = ? WHERE seq = ?", (msgspec.msgpack.encode(foreign), seq))
