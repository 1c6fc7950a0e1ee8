"""A connection that breaks during the commit: the outcome is unknown, so the event stays open, and its next run looks
for the mark."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from onward.errors import InDoubt
from tests.inbox.conftest import SERVERS, everywhere, url_of
from tests.inbox.place import Place, delivery
from tests.servers.server import Server


@pytest.mark.parametrize("name", everywhere(SERVERS))
def test_a_connection_that_breaks_during_the_commit_leaves_the_event_open(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = url_of(name, request, tmp_path)
    server: Server = request.getfixturevalue("postgres_server" if "postgres" in name else "mariadb_server")
    make: Callable[[str], Any] = create_async_engine if "async" in name else create_engine

    async def scenario() -> None:
        direct = Place(make(url))
        await direct.prepare()
        with server.proxy() as proxy:
            place = Place(make(url.replace(f":{server.port}", f":{proxy.port}")))

            def plain(_: Any, connection: Connection) -> None:
                connection.execute(text("INSERT INTO effect VALUES ('a')"))
                proxy.cut()

            async def asynchronous(_: Any, connection: AsyncConnection) -> None:
                await connection.execute(text("INSERT INTO effect VALUES ('a')"))
                await asyncio.to_thread(proxy.cut)

            with pytest.raises(InDoubt, match="broke during the commit"):
                await place.run(asynchronous if place.is_async else plain, delivery("a"))
            proxy.mend()
            await place.call(delivery("a"))
            await place.call(delivery("a"))
            assert (await direct.effects(), await direct.marks()) == (["a"], 1)
            await place.close()
        await direct.close()

    asyncio.run(scenario())
