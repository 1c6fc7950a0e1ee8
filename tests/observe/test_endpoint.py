"""The endpoint: what it serves, and how `onward run` serves it."""

import asyncio
import errno
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onward.errors import BadSetting
from onward.observe.endpoint import Address, serving, serving_in_thread
from onward.observe.health import Health
from onward.observe.reading import Reading
from tests.cli.shell import Shell, until
from tests.cli.system import publish
from tests.observe.readings import partition, reading

SHOP = """
import asyncio
from onward import Onward

app = Onward("sqlite:///shop.db", metrics_prefix="shop", lease_s=1.0)


@app.handler("orders", group="billing", engine="processes", workers=1)
def bill(order: dict) -> None:
    print("billed", order["id"], flush=True)


@app.handler("orders", group="loop")
async def tell(order: dict) -> None:
    print("runs on", type(asyncio.get_running_loop()).__module__, flush=True)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    shell.write("shop.py", SHOP)
    yield shell
    shell.close()


class System:
    """A system with fixed answers for an endpoint."""

    def __init__(self, *troubles: str) -> None:
        self.troubles = troubles

    def metrics(self) -> str:
        return "up 1\n"

    def health(self) -> Health:
        return Health(not self.troubles, self.troubles)

    def readings(self) -> list[Reading]:
        return [reading(partition(3))]


def fetch(url: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_health_and_readings_are_served_and_nothing_else() -> None:
    system = System()

    async def main() -> None:
        async with serving(system, Address("127.0.0.1", 0)) as place:

            async def get(path: str, method: str = "GET") -> tuple[int, str]:
                return await asyncio.to_thread(fetch, f"http://{place}{path}", method)

            assert await get("/metrics") == (200, "up 1\n")
            assert await get("/metrics?name[]=up") == (200, "up 1\n")
            assert await get("/health/live") == (200, '{"live":true,"troubles":[]}')
            assert await get("/health/ready") == (200, '{"ready":true,"troubles":[]}')
            system.troubles = ("the disk is full",)
            assert await get("/health/ready") == (503, '{"ready":false,"troubles":["the disk is full"]}')
            assert await get("/health/live") == (200, '{"live":true,"troubles":[]}'), "live does not depend on ready"
            status, body = await get("/readings")
            assert status == 200
            assert msgspec.json.decode(body, type=list[Reading]) == system.readings()
            assert (await get("/secrets"))[0] == 404
            assert (await get("/metrics", "POST"))[0] == 405
            with pytest.raises(BadSetting, match="the port is in use; choose another address for --metrics"):
                async with serving(system, place):
                    pass

    asyncio.run(main())


def test_a_page_that_raises_gets_an_answer_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(System):
        def metrics(self) -> str:
            raise RuntimeError("out of numbers")

    with serving_in_thread(Broken(), Address("127.0.0.1", 0), lambda: Health(True)) as place:
        assert fetch(f"http://{place}/metrics") == (500, "/metrics failed with RuntimeError; see the log\n")
        assert fetch(f"http://{place}/health/ready")[0] == 200
    assert "RuntimeError: out of numbers" in caplog.text


@pytest.mark.parametrize("path", ["/metrics", "/health/live", "/health/ready", "/secrets"])
def test_head_gets_the_answer_of_get_without_the_body(path: str) -> None:
    def answer(method: str) -> tuple[bytes, bytes]:
        with socket.create_connection(place, timeout=10) as link, link.makefile("rwb") as stream:
            stream.write(f"{method} {path} HTTP/1.1\r\n\r\n".encode())
            stream.flush()
            head, _, body = stream.read().partition(b"\r\n\r\n")
            return head, body

    with serving_in_thread(System("the disk is full"), Address("127.0.0.1", 0), lambda: Health(True)) as place:
        head, body = answer("GET")
        assert body
        assert answer("HEAD") == (head, b"")


def test_an_endpoint_in_its_own_thread_returns_its_address_or_raises() -> None:
    with serving_in_thread(System(), Address("127.0.0.1", 0), lambda: Health(False, ("hung",))) as place:
        assert fetch(f"http://{place}/metrics") == (200, "up 1\n")
        assert fetch(f"http://{place}/health/live") == (503, '{"live":false,"troubles":["hung"]}')
        with (
            pytest.raises(BadSetting, match="choose another"),
            serving_in_thread(System(), place, lambda: Health(True)),
        ):
            pass


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.EADDRINUSE, "error while attempting to bind on address"), "the port is in use"),
        (OSError(errno.EACCES, "error while attempting to bind on address"), "not permitted"),
        (OSError(errno.EADDRNOTAVAIL, "error while attempting to bind"), os.strerror(errno.EADDRNOTAVAIL)),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (OSError("could not bind on any address"), "could not bind on any address"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, error: OSError, cause: str
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise error

    async def main() -> None:
        async with serving(System(), Address("127.0.0.1", 80)):
            pass

    monkeypatch.setattr(asyncio, "start_server", refuse)
    with pytest.raises(BadSetting) as caught:
        asyncio.run(main())
    assert str(caught.value) == f"cannot serve at 127.0.0.1:80: {cause}; choose another address for --metrics"


@pytest.mark.parametrize(
    ("text", "place", "public"),
    [
        ("9464", "127.0.0.1:9464", "127.0.0.1:9464"),
        (":9464", "127.0.0.1:9464", "127.0.0.1:9464"),
        ("0.0.0.0:9464", "0.0.0.0:9464", f"{socket.gethostname()}:9464"),
        ("[::]:9464", "[::]:9464", f"{socket.gethostname()}:9464"),
        ("[::1]:0", "[::1]:0", "[::1]:0"),
        ("shop-1:80", "shop-1:80", "shop-1:80"),
    ],
)
def test_an_address_is_parsed_and_printed(text: str, place: str, public: str) -> None:
    read = Address.parse(text)
    assert (str(read), str(read.public)) == (place, public)


@pytest.mark.parametrize("text", ["here", "", "host:", "1:65536", "1:-1", "1:²"])
def test_a_text_that_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST"):
        Address.parse(text)


def test_a_running_application_can_be_scraped_and_runs_on_uvloop(shell: Shell) -> None:
    publish(shell.folder, *range(3))
    running = shell.start("run", "shop:app", "--metrics", "127.0.0.1:0")
    running.saw("billed", times=3)
    running.saw("runs on uvloop")
    found = re.search(r"metrics at (\S+)", running.err)
    assert found is not None
    done = 'shop_events_done_total{group="billing",topic="orders"} 3.0'
    until(lambda: done in fetch(found[1])[1], done)
    assert 'shop_engine_workers{group="billing",topic="orders"} 1.0' in fetch(found[1])[1]
    running.send(signal.SIGTERM)
    assert running.ended() == 0


@pytest.mark.slow
def test_a_running_application_logs_its_counts(shell: Shell) -> None:
    publish(shell.folder, *range(3))
    running = shell.start("run", "shop:app")
    running.saw("6 events done (orders for billing 3, orders for loop 3), 0 retried, 0 dead; 0 running")
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_run_refuses_a_text_that_is_not_an_address(shell: Shell) -> None:
    running = shell.start("run", "shop:app", "--metrics", "here")
    assert running.ended() == 2
    assert "[HOST:]PORT" in running.err
