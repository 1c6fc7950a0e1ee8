"""Handlers inside FastAPI, under a real uvicorn in its own process."""

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward import Onward
from tests.cli.shell import PATIENCE_S, Running, until
from tests.examples import ROOT, source

BARE = "from fastapi import FastAPI\napi = FastAPI()\n"
SLOW = """
import asyncio
from contextlib import asynccontextmanager
from starlette.applications import Starlette
from onward import Onward

events = Onward("sqlite:///shop.db", lease_s=1.0, takeover_grace_s=0.1)


@events.handler("orders", group="billing")
async def bill(order: dict) -> None:
    print("begun", order["n"], flush=True)
    await asyncio.sleep(order["takes_s"])
    print("done", order["n"], flush=True)


@asynccontextmanager
async def lifespan(api):
    async with events.running():
        print("running", flush=True)
        yield
    print("stopped", flush=True)


api = Starlette(lifespan=lifespan)
"""


class Server:
    """Starts uvicorn in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[Running] = []

    def start(self, target: str, *options: str) -> Running:
        command = [sys.executable, "-m", "uvicorn", target, "--port", "0", *options]
        out, err = (self.folder / f"{len(self._started)}.{name}" for name in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(command, cwd=self.folder, stdout=stdout, stderr=stderr)
        self._started.append(Running(process, out, err))
        return self._started[-1]

    def close(self) -> None:
        for running in self._started:
            running.process.kill()
            running.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


def noticed(running: Running, changed: Path) -> bool:
    """Whether uvicorn has noticed the change. Touches the file each time, because uvicorn does not notice a change that
    was made before it first looked at the file."""
    if "detected changes" in running.err:
        return True
    changed.touch()
    time.sleep(0.5)
    return "detected changes" in running.err


def url(running: Running) -> str:
    running.saw("Uvicorn running on http://")
    return running.err.split("Uvicorn running on ")[1].split()[0]


def publish(folder: Path, n: int, takes_s: float = 0.0) -> None:
    async def main() -> None:
        async with Onward(f"sqlite:///{folder}/shop.db") as app:
            await app.publish("orders", {"n": n, "takes_s": takes_s}, key="k")

    asyncio.run(main())


def get(address: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ends_bare(server: Server) -> int:
    """The exit code of uvicorn without Onward after SIGTERM."""
    (server.folder / "bare.py").write_text(BARE)
    bare = server.start("bare:api")
    url(bare)
    bare.send(signal.SIGTERM)
    return bare.ended()


def test_the_first_sigterm_ends_the_server_and_drains_the_handlers(server: Server) -> None:
    (server.folder / "shop.py").write_text(SLOW)
    running = server.start("shop:api")
    url(running)
    publish(server.folder, 1, takes_s=1.0)
    running.saw("begun 1")
    running.send(signal.SIGTERM)
    assert running.ended() == ends_bare(server)
    assert running.out.splitlines() == ["running", "begun 1", "done 1", "stopped"]
    assert "Application shutdown complete" in running.err
    publish(server.folder, 2)
    again = server.start("shop:api")
    again.saw("done 2")
    assert "begun 1" not in again.out, "a finished event was not settled"


@pytest.mark.slow
def test_uvicorn_reloads_after_a_file_changed(server: Server) -> None:
    (server.folder / "shop.py").write_text(SLOW)
    running = server.start("shop:api", "--reload")
    running.saw("running")
    publish(server.folder, 1)
    running.saw("done 1")
    (server.folder / "shop.py").write_text(SLOW.replace('"done"', '"finished"'))
    until(lambda: noticed(running, server.folder / "shop.py"), "uvicorn notices the change")
    running.saw("running", times=3)  # twice ours; uvicorn itself prints it once
    publish(server.folder, 2)
    running.saw("finished 2")
    assert running.out.splitlines()[:4] == ["running", "begun 1", "done 1", "stopped"]
    running.send(signal.SIGTERM)
    running.ended()
    assert running.out.count("stopped") == 2


def test_the_server_ends_when_the_handlers_cannot_start(server: Server) -> None:
    (server.folder / "shop.py").write_text(SLOW)
    (server.folder / "shop.db").write_text("Dear diary, " * 100)
    running = server.start("shop:api")
    assert running.ended() == 3  # uvicorn's STARTUP_FAILURE
    assert "not a SQLite database" in running.err
    assert "Application startup failed. Exiting." in running.err
    assert "Uvicorn running" not in running.err


def test_the_example_accepts_requests_and_handles_their_events(server: Server) -> None:
    (server.folder / "fastapi_app.py").write_text(source("fastapi_app.py"))
    running = server.start("fastapi_app:api")
    address = url(running)
    order = json.dumps({"id": 1, "customer": "ann", "total": 9.5}).encode()
    request = urllib.request.Request(f"{address}/orders", order, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 202
        assert json.load(answer)["event"]
    running.saw("order.placed: ann pays 9.5")
    assert get(f"{address}/health/ready") == (200, b'{"ready":true,"troubles":[]}')
    done = b'onward_events_done_total{group="billing",topic="orders"} 1.0'
    until(lambda: done in get(f"{address}/metrics")[1], "the event is counted")
    running.send(signal.SIGTERM)
    assert running.ended() == ends_bare(server)


def test_the_example_ends_the_server_when_its_handlers_fail(server: Server) -> None:
    broken = "from onward.flow.consumer import Consumer\ndef take(self, messages): raise RuntimeError('boom')\n"
    (server.folder / "broken.py").write_text(f"{broken}Consumer._take = take\n")
    (server.folder / "fastapi_app.py").write_text(f"import broken\n{source('fastapi_app.py')}")
    running = server.start("fastapi_app:api")
    running.ended(PATIENCE_S)
    assert "RuntimeError: boom" in running.err


def test_the_docs_page_shows_the_example() -> None:
    assert source("fastapi_app.py") in (ROOT / "docs/fastapi.md").read_text(encoding="utf-8")
