"""The commands on Redis, each in a process of its own, on a server of these tests alone."""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from onward import Onward
from tests.brokers.redis_stage import own_server
from tests.cli.shell import Shell, until
from tests.servers.redis import RedisServer
from tests.servers.server import free_port

pytestmark = pytest.mark.servers

SHOP = """
from onward import GiveUp, Onward

app = Onward("{url}", lease_s=1.0, takeover_grace_s=0.1, {settings})


@app.handler("orders", group="billing")
async def bill(order: dict) -> None:
    if order["id"] == "bad":
        raise GiveUp("no such customer")
    print("billed", order["id"], flush=True)
"""
LATE_SHOP = """
from onward import Onward
app = Onward("{url}?publish_timeout_s=0.3")
@app.handler("orders")
async def bill(order: dict) -> None:
    print("billed", order["id"], flush=True)
"""
NO_SERVER = "redis://127.0.0.1:{port}?publish_timeout_s=0.5"
COMMANDS = [
    "publish orders 1 --url {url}",
    "dead list --group billing --url {url}",
    "doctor {url}",
]
Finding = dict[str, str]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with own_server() as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def shop(server: RedisServer, client: Redis, shell: Shell) -> Shell:
    shell.write("shop.py", SHOP.format(url=server.url, settings=""))
    return shell


def onward(shop: Shell, *arguments: str, code: int = 0) -> str:
    done = shop.run(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def findings(shop: Shell, *arguments: str, code: int = 0) -> list[Finding]:
    found: list[Finding] = json.loads(onward(shop, "doctor", "--json", *arguments, code=code))
    return found


def the_one(found: list[Finding], pattern: str) -> Finding:
    matching = [each for each in found if re.search(pattern, each["what"])]
    assert len(matching) == 1, f"{pattern}: {found}"
    return matching[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_is_not_running_is_reported_once_and_soon(shell: Shell, command: str) -> None:
    url = NO_SERVER.format(port=free_port())
    shell.write("shop.py", SHOP.format(url=url, settings=""))
    done = shell.run(*command.format(url=url).split())
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert re.search(r"error: Redis at .*127\.0\.0\.1:\d+.*refused", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_topology_groups_tail_and_dead_letters(server: RedisServer, shop: Shell) -> None:
    url = ("--url", server.url)
    shop.write("shop.py", SHOP.format(url=server.url, settings="auto_declare=False"))
    created = "+ create topic orders with 8 partitions\n"
    assert onward(shop, "topology", "plan", "--app", "shop:app") == created
    assert onward(shop, "topology", "apply", "--app", "shop:app") == created
    assert "has everything" in onward(shop, "topology", "plan", "--app", "shop:app")
    shop.write("shop.py", SHOP.format(url=server.url, settings="partitions=5"))
    assert "! topic orders has 8 partitions" in onward(shop, "topology", "plan", "--app", "shop:app", code=1)
    shop.write("shop.py", SHOP.format(url=server.url, settings=""))
    running = shop.start("run", "shop:app")
    for number, order in enumerate(("1", "2", '"bad"')):
        onward(shop, "publish", "orders", f'{{"id": {order}}}', "--key", f"c-{number}", *url)
    running.saw("billed 1")
    running.saw("billed 2")
    shown = onward(shop, "tail", "orders", "--from", "earliest", "--limit", "3", "--json", *url)
    assert len(shown.splitlines()) == 3
    until(lambda: "no such customer" in shop.run("dead", "list", *url).stdout, "the dead letter is listed")
    (info,) = json.loads(onward(shop, "groups", "list", "--topic", "orders", "--json", *url))
    (member,) = info["members"]
    assert {place["owner"] for place in info["partitions"].values()} == {member["name"]}
    assert "is running" in shop.run("groups", "drop", "billing", "--topic", "orders", "--yes", *url).stderr
    running.send(signal.SIGTERM)
    assert running.ended() == 0
    onward(shop, "dead", "replay", "--topic", "orders", "--group", "billing", *url)
    assert "no such customer" not in onward(shop, "dead", "list", *url)
    onward(shop, "groups", "drop", "billing", "--topic", "orders", "--yes", *url)
    assert onward(shop, "groups", "list", "--topic", "orders", *url) == "no groups\n"


def test_doctor_knows_the_server(server: RedisServer, shop: Shell) -> None:
    found = findings(shop, server.url)
    assert the_one(found, r"^Redis \d+\.\d+\.\d+ answers")["level"] == "ok"
    assert the_one(found, "durability fsync")["level"] == "ok"
    assert "set maxmemory" in the_one(found, r"bytes of memory are used; maxmemory is not set")["cure"]
    assert the_one(found, "no replica is connected")["level"] == "ok"


def test_doctor_warns_before_the_memory_is_full(shop: Shell) -> None:
    with own_server("--appendfsync", "everysec") as small, small.client() as client:
        client.setrange("filler", 20 << 20, "x")
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", int(used * 1.1))
        found = findings(shop, small.url)
        assert the_one(found, r"of maxmemory\); a full server refuses")["level"] == "warning"
        assert the_one(found, "durability window: a crash may lose the last second")["level"] == "warning"


def test_doctor_names_the_replicas(server: RedisServer, shop: Shell) -> None:
    with own_server("--replicaof", server.host, str(server.port)):
        until(lambda: the_one(findings(shop, server.url), "replica")["what"] == "1 replica is up to date", "it is")


def test_doctor_names_who_keeps_a_stream_long(server: RedisServer, shop: Shell, client: Any) -> None:
    def settled() -> bool:
        running.saw("billed 700")
        (info,) = json.loads(onward(shop, "groups", "list", "--topic", "orders", "--json", "--url", server.url))
        return all(place["watermark"] == place["end"] for place in info["partitions"].values())

    async def publish(times: int) -> None:
        async with Onward(server.url, partitions=1) as app:
            for _ in range(times):
                await app.publish_many("orders", [("c-1", {"id": n}) for n in range(1, 701)])

    shop.write("shop.py", SHOP.format(url=server.url, settings="retention_events=1, partitions=1"))
    asyncio.run(publish(1))
    assert "start its handlers" in the_one(findings(shop, server.url), "no group reads topic orders")["cure"]
    running = shop.start("run", "shop:app")
    until(settled, "all are settled")
    running.send(signal.SIGTERM)
    assert running.ended() == 0
    asyncio.run(publish(3))
    found = findings(shop, "--app", "shop:app")
    assert "groups drop billing" in the_one(found, "group billing of topic orders has unfinished events")["cure"]
    kept = the_one(found, r"2,099 events of topic orders stay beyond the retention: group billing")
    assert "groups drop billing --topic orders" in kept["cure"]
    assert not [each for each in found if "were removed" in each["what"]]
    client.xtrim("{orders:0}", maxlen=100, approximate=False)
    found = findings(shop, "--app", "shop:app", code=1)
    assert the_one(found, "^2,000 events of topic orders were removed before group billing")["level"] == "error"


def test_doctor_names_consumers_of_other_programs(server: RedisServer, shop: Shell, client: Any) -> None:
    settings = 'streams={{"orders": Streams("shop:orders", shards=1)}}, reclaim_idle_s={idle_s}'
    text = "from onward.brokers.redis.foreign.streams import Streams\n" + SHOP
    for n in range(5):
        client.xadd("shop:orders:0", {"id": n})
    client.xgroup_create("shop:orders:0", "billing", id="0")
    client.xreadgroup("billing", "old-worker", {"shop:orders:0": ">"}, count=3)
    client.xgroup_createconsumer("shop:orders:0", "billing", "older-worker")
    shop.write("shop.py", text.format(url=server.url, settings=settings.format(idle_s=300)))
    running = shop.start("run", "shop:app")
    until(lambda: client.keys("*:onward:shop:orders:0:g:billing"), "the group has joined")
    running.send(signal.SIGTERM)
    assert running.ended() == 0
    found = findings(shop, "--app", "shop:app", code=1)
    assert the_one(found, "consumer old-worker .* group billing of stream shop:orders:0 is alive")["level"] == "error"
    shop.write("shop.py", text.format(url=server.url, settings=settings.format(idle_s=0.001)))
    found = findings(shop, "--app", "shop:app")
    assert "start the handler" in the_one(found, "old-worker .* stopped with 3 pending entries")["cure"]
    orphan = the_one(found, "older-worker .* has nothing pending")
    assert orphan["cure"] == "remove it: XGROUP DELCONSUMER shop:orders:0 billing older-worker"


@pytest.mark.more
def test_workers_wait_for_a_server_that_comes_up_late(shell: Shell) -> None:
    late = RedisServer()
    try:
        shell.write("shop.py", LATE_SHOP.format(url=late.url))
        running = shell.start("run", "shop:app", "--workers", "1")
        running.saw("does not answer", times=4)  # a worker that fails otherwise is started three times
        late.start()
        assert shell.run("publish", "orders", '{"id": 7}', "--url", late.url).returncode == 0
        running.saw("billed 7")
        assert "giving up" not in running.err
    finally:
        late.close()


def test_doctor_reports_a_warning_once(shell: Shell) -> None:
    with own_server("--appendonly", "no") as server:
        done = shell.run("doctor", server.url)
    assert (done.stdout + done.stderr).count("durability memory") == 1
