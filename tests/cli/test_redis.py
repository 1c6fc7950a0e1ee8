"""`onward run` on a Redis that comes up late."""

import pytest

from tests.cli.shell import Shell
from tests.servers.redis import RedisServer

SHOP = """
from onward import Onward
app = Onward("{url}?publish_timeout_s=0.3")
@app.handler("orders")
async def bill(order: dict) -> None:
    print("billed", order["id"], flush=True)
"""


@pytest.mark.slow
def test_workers_wait_for_a_server_that_comes_up_late(redis_server: RedisServer, shell: Shell) -> None:
    late = RedisServer()
    try:
        shell.write("shop.py", SHOP.format(url=late.url))
        running = shell.start("run", "shop:app", "--workers", "1")
        running.saw("does not answer", times=4)  # a worker that fails otherwise is started three times
        late.start()
        assert shell.run("publish", "orders", '{"id": 7}', "--url", late.url).returncode == 0
        running.saw("billed 7")
        assert "giving up" not in running.err
    finally:
        late.close()
