"""Three processes are killed at random, and every event still has exactly one row of effects."""

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text

from onward import Onward
from onward.inbox import SqlInbox
from tests.inbox.member import TOPIC, broker
from tests.servers.postgres import PostgresServer
from tests.storm import STORM_S

CATCH_UP_S = 90.0
MEMBERS = 3
KEYS = 50
CALL = 6  # events published at once, ten times a second
ROOT = Path(__file__).parent.parent.parent


class Fleet:
    """Members that are killed and replaced."""

    def __init__(self, path: Path, database: str) -> None:
        self._command = [sys.executable, "-m", "tests.inbox.member", str(path), database]
        self._log = (path.parent / "members.log").open("wb")
        self._members = [self._start() for _ in range(MEMBERS)]
        self.killed = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, cwd=ROOT, stdout=self._log, stderr=self._log)

    def kill_one(self) -> None:
        index = random.randrange(MEMBERS)
        member = self._members[index]
        assert member.poll() is None, f"a member ended by itself: {self._tail()}"
        member.kill()
        member.wait()
        self.killed += 1
        self._members[index] = self._start()

    def close(self) -> None:
        for member in self._members:
            member.kill()
            member.wait()
        self._log.close()

    def _tail(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-2_000:]


@contextmanager
def effects(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE IF EXISTS onward_inbox, onward_inbox_cursor, effect_row, effect_batch"))
            for kind in ("row", "batch"):
                connection.execute(text(f"CREATE TABLE effect_{kind} (id INTEGER NOT NULL, run BIGINT NOT NULL)"))
                connection.execute(text(f"DROP SEQUENCE IF EXISTS runs_{kind}"))
                connection.execute(text(f"CREATE SEQUENCE runs_{kind}"))
        SqlInbox(engine).create()
        yield engine
    finally:
        engine.dispose()


async def publish(app: Onward, until: float) -> int:
    """Publish until then, in small calls. Returns how many events."""
    count = 0
    while time.monotonic() < until:
        await app.publish_many(TOPIC, [(f"k-{n % KEYS}", {"id": n}) for n in range(count, count + CALL)])
        count += CALL
        await asyncio.sleep(0.1)
    return count


async def kill(fleet: Fleet, until: float) -> None:
    while time.monotonic() < until:
        await asyncio.sleep(random.uniform(0.3, 2.5))
        await asyncio.to_thread(fleet.kill_one)


def made(engine: Engine, kind: str) -> tuple[Counter[int], int]:
    """How many effects of each event are stored, and how many runs of it were started."""
    with engine.begin() as connection:
        ids = Counter(row[0] for row in connection.execute(text(f"SELECT id FROM effect_{kind}")))
        runs: int = connection.execute(text(f"SELECT last_value FROM runs_{kind}")).scalar_one()
    return ids, runs


@pytest.mark.slow
@pytest.mark.storm
@pytest.mark.timeout(STORM_S + 180)
def test_every_effect_happens_once_while_processes_are_killed(postgres_server: PostgresServer, tmp_path: Path) -> None:
    database = postgres_server.url.replace("postgresql:", "postgresql+psycopg:")

    async def scenario(engine: Engine) -> tuple[int, int]:
        async with broker(str(tmp_path / "events.db")) as app:
            fleet = Fleet(tmp_path / "events.db", database)
            try:
                until = time.monotonic() + STORM_S
                count, _ = await asyncio.gather(publish(app, until), kill(fleet, until))
                deadline = time.monotonic() + CATCH_UP_S
                while time.monotonic() < deadline:
                    if all(len(made(engine, kind)[0]) == count for kind in ("row", "batch")):
                        break
                    await asyncio.sleep(0.2)
            finally:
                await asyncio.to_thread(fleet.close)
        return count, fleet.killed

    with effects(database) as engine:
        count, killed = asyncio.run(scenario(engine))
        assert killed > STORM_S / 5
        for kind in ("row", "batch"):
            ids, runs = made(engine, kind)
            assert set(ids) == set(range(count)), f"{kind}: lost"
            assert [id_ for id_, times in ids.items() if times != 1] == [], f"{kind}: happened more than once"
            assert runs > count, f"{kind}: no run was interrupted or failed, so the test proves nothing"
