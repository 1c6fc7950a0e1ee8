"""`onward demo --url redis://…` removes what it created on the server, and nothing else."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from tests.demo.test_kafka import start, until
from tests.servers.redis import RedisServer

# The server remembers the last fence of every outbox for ever. Otherwise an old relay could publish again.
FENCES = "onward:relays"
THEIRS = {"{orders}": "of another application", "{orders:0}:meta": "of another application", "session:7": "user"}


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Redis]:
    with redis_server.client() as client:
        client.flushall()
        client.mset(THEIRS)
        yield client
        redis_server.heal()
        client.flushall()


def keys(client: Redis) -> set[str]:
    return {key.decode() for key in client.scan_iter("*")} - {FENCES}


@pytest.mark.slow
def test_the_demo_gives_its_verdict_on_redis_and_removes_what_it_created(
    redis_server: RedisServer, client: Redis, tmp_path: Path
) -> None:
    out, err = (process := start(tmp_path, redis_server.url, "--events", "1000")).communicate(timeout=100)
    assert process.returncode == 0, out + err
    assert out.startswith("verdict: OK published=1000 handled=1000 dead=0 lost=0 inverted=0"), out
    assert keys(client) == THEIRS.keys()
    assert list(tmp_path.iterdir()) == []
    assert "there" not in err


@pytest.mark.slow
def test_after_ctrl_c_the_demo_removes_what_it_created_on_redis(
    redis_server: RedisServer, client: Redis, tmp_path: Path
) -> None:
    process = start(tmp_path, redis_server.url, "--events", "1000000")
    until(lambda: any(":g:billing" in key for key in keys(client)) and any(":p:" in key for key in keys(client)))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert keys(client) == THEIRS.keys()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
def test_the_demo_names_what_it_cannot_remove_from_redis(
    redis_server: RedisServer, client: Redis, tmp_path: Path
) -> None:
    process = start(tmp_path, redis_server.url, "--events", "1000000")
    until(lambda: any(":g:billing" in key for key in keys(client)))
    redis_server.kill()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert re.search(r"topic \S+ and group billing-\S+ on redis://\S+ may still be there", err), err
    assert "Traceback" not in err
