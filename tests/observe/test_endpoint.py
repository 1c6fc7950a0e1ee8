"""What `onward run` shows of its engines: metrics over HTTP, and a log line."""

import asyncio
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.errors import BadSetting
from onward.observe.endpoint import serving
from tests.cli.shell import Shell, until
from tests.cli.system import publish

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


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
    return text


def test_metrics_are_served_and_nothing_else() -> None:
    async def main() -> None:
        async with serving(lambda: "up 1\n", "127.0.0.1", 0) as port:
            url = f"http://127.0.0.1:{port}"
            assert await asyncio.to_thread(fetch, f"{url}/metrics") == "up 1\n"
            with pytest.raises(urllib.error.HTTPError, match="404"):
                await asyncio.to_thread(fetch, f"{url}/secrets")
            with pytest.raises(BadSetting, match="choose another --metrics"):
                async with serving(lambda: "", "127.0.0.1", port):
                    pass

    asyncio.run(main())


def test_a_running_application_can_be_scraped_and_runs_on_uvloop(shell: Shell) -> None:
    publish(shell.folder, *range(3))
    running = shell.start("run", "shop:app", "--metrics", "127.0.0.1:0")
    running.saw("billed", times=3)
    running.saw("runs on uvloop")
    found = re.search(r"metrics at (\S+)", running.err)
    assert found is not None
    done = 'shop_events_done_total{group="billing",topic="orders"} 3.0'
    until(lambda: done in fetch(found[1]), done)
    assert 'shop_engine_workers{group="billing",topic="orders"} 1.0' in fetch(found[1])
    running.send(signal.SIGTERM)
    assert running.ended() == 0


@pytest.mark.slow
def test_a_running_application_tells_how_its_engines_fare(shell: Shell) -> None:
    publish(shell.folder, *range(3))
    running = shell.start("run", "shop:app")
    running.saw("orders for billing: processes 1 workers, 0 busy, 0 restarted; 3 done, 0 retried, 0 dead")
    running.send(signal.SIGTERM)
    assert running.ended() == 0


def test_a_place_that_is_none_is_refused(shell: Shell) -> None:
    running = shell.start("run", "shop:app", "--metrics", "here")
    assert running.ended() == 2
    assert "[HOST:]PORT" in running.err
