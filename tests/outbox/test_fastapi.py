"""The outbox in FastAPI: a dependency that carries it, and the example under a real uvicorn."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, HTTPException
from fastapi.testclient import TestClient
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from onward.fastapi import AsyncOutboxSession, OutboxSession, outbox_session
from tests.cli.shell import Running
from tests.examples import source
from tests.outbox.shop import Order, Shop, maybe


def application(shop: Shop) -> FastAPI:
    """Orders are committed (`ok`), undone, forgotten, or fail."""

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        yield
        await maybe(shop.engine.dispose())

    api = FastAPI(lifespan=lifespan)
    makers: Any = (async_sessionmaker if shop.is_async else sessionmaker)(shop.engine)  # type: ignore[arg-type]
    dependency = Depends(outbox_session(shop.outbox, makers))

    def order(database: OutboxSession | AsyncOutboxSession, number: int) -> str:
        database.session.add(Order(id=number))
        return database.add("orders", str(number), key="k", headers={"a": "b"}).id

    if shop.is_async:

        @api.post("/{ending}/{number}")
        async def place(
            ending: str, number: int, database: Annotated[AsyncOutboxSession, dependency]
        ) -> dict[str, str]:
            event = order(database, number)
            await {"ok": database.commit, "undone": database.rollback}.get(ending, nothing)()
            if ending == "failed":
                raise HTTPException(409)
            return {"event": event}
    else:

        @api.post("/{ending}/{number}")
        def place_sync(ending: str, number: int, database: Annotated[OutboxSession, dependency]) -> dict[str, str]:
            event = order(database, number)
            {"ok": database.commit, "undone": database.rollback}.get(ending, lambda: None)()
            if ending == "failed":
                raise HTTPException(409)
            return {"event": event}

    return api


async def nothing() -> None:
    """Neither commit nor rollback."""


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


def test_a_request_commits_its_order_and_its_event(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    with TestClient(application(shop)) as client:
        answer = client.post("/ok/1")
        assert answer.status_code == 200
        assert client.post("/ok/2").status_code == 200
    (first, second) = shop.stored()
    assert (first.id, first.value, first.key, first.headers) == (answer.json()["event"], b"1", "k", {"a": "b"})
    assert second.value == b"2"
    assert shop.orders() == [1, 2]
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("ending", "status", "warned"), [("forgotten", 200, 1), ("failed", 409, 0), ("undone", 200, 0)]
)
def test_what_a_request_does_not_commit_is_rolled_back(
    file_shop: Shop, caplog: pytest.LogCaptureFixture, ending: str, status: int, warned: int
) -> None:
    with TestClient(application(file_shop)) as client:
        assert client.post(f"/{ending}/1").status_code == status
        assert client.post("/ok/2").status_code == 200
    assert file_shop.names() == ["2"]
    assert file_shop.orders() == [2]
    found = warnings(caplog)
    assert len(found) == warned
    assert all("a request added 1 events to the outbox and ended without a commit" in each for each in found)


@pytest.fixture
def uvicorn(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "shop.py").write_text(source("outbox_fastapi.py"))
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "shop:api", "--port", "0"], cwd=tmp_path, stdout=stdout, stderr=stderr
        )
    yield Running(process, out, err)
    process.kill()
    process.wait()


def test_the_example_handles_the_events_of_its_requests(uvicorn: Running) -> None:
    uvicorn.saw("Uvicorn running on http://")
    address = uvicorn.err.split("Uvicorn running on ")[1].split()[0]
    for customer in ("ann", "bob"):
        body = json.dumps({"customer": customer}).encode()
        request = urllib.request.Request(f"{address}/orders", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 201
            assert json.load(answer)["event"]
        uvicorn.saw(f"{customer} pays")
    uvicorn.send(signal.SIGTERM)
    uvicorn.ended()
