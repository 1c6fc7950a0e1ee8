"""The page about Redis is true: its examples are those in examples/, and its commands work on a real server."""

import json
import re
import shlex
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from onward.brokers.redis import Streams
from tests.brokers.redis_stage import own_server
from tests.cli.shell import Shell
from tests.examples import ROOT, source
from tests.servers.redis import RedisServer

PAGE = (ROOT / "docs/redis.md").read_text(encoding="utf-8")
URL = "redis://localhost:6379"
PRINTS = {  # what each line of the page's shell block prints
    "publish": r"^[0-9a-f-]{36}$",
    "tail": r'"total":\s*-1',
    "dead list": r"GiveUp",
    "dead replay": r"1 ",
    "demo": r"verdict: OK published=2000 handled=2000 dead=0 lost=0 inverted=0",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_are_those_in_examples() -> None:
    assert blocks("python") == [source("on_redis.py"), source("on_streams.py")]


def test_the_table_of_stream_fields_is_complete_and_the_toml_says_the_same_as_the_code() -> None:
    (table,) = re.findall(r"\| field \| meaning \|\n(.*?)\n\n", PAGE, re.DOTALL)
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(Streams.__struct_fields__)
    (toml,) = blocks("toml")
    assert msgspec.convert(tomllib.loads(toml)["streams"]["scan"], Streams) == Streams(
        "scan:events", shards=4, key="job_id", hash="md5"
    )


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Its own: the page uses fixed names."""
    with own_server() as server:
        yield server


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


@pytest.mark.slow
def test_the_commands_of_the_page_print_what_is_expected(server: RedisServer, shell: Shell) -> None:
    shell.write("on_redis.py", source("on_redis.py").replace(URL, server.url))
    (block,) = blocks("sh")
    first, *rest = [shlex.split(line.replace(URL, server.url))[1:] for line in block.splitlines()]
    running = shell.start(*first)
    for words in rest:
        if words[0] == "dead":
            running.saw("pays 9.5 for order 1")
        done = shell.run(*words)
        assert done.returncode == 0, done.stderr
        pattern = next(each for name, each in PRINTS.items() if " ".join(words).startswith(name))
        assert re.search(pattern, done.stdout + done.stderr, re.MULTILINE), done.stdout + done.stderr
    running.send(signal.SIGTERM)
    assert running.ended() == 0


@pytest.mark.slow
def test_the_example_with_streams_of_others_reads_publishes_and_goes_on_after_a_drop(
    server: RedisServer, shell: Shell
) -> None:
    shell.write("on_streams.py", source("on_streams.py").replace(URL, server.url))
    with server.client() as other:
        entry = other.xadd("scan:events:2", {"job_id": "job-7", "stage": "vision", "status": "started"})
        running = shell.start("run", "on_streams:app")
        running.saw(f"job-7 is vision, entry {entry.decode()}")
        fields = json.dumps({"job_id": "job-8", "stage": "rule"})
        done = shell.run("publish", "scan", fields, "--key", "job-8", "--app", "on_streams:app")
        assert done.returncode == 0, done.stderr
        running.saw("job-8 is rule, entry")
        running.send(signal.SIGTERM)
        assert running.ended() == 0
        assert other.xpending("scan:events:2", "router")["pending"] == 0
        dropping = next(line for line in re.findall(r"`onward (.*?)`", PAGE, re.DOTALL) if "groups drop" in line)
        assert shell.run(*shlex.split(dropping), "--yes").returncode == 0
        running = shell.start("run", "on_streams:app")
        running.saw(f"job-7 is vision, entry {entry.decode()}")
        running.send(signal.SIGTERM)
        assert running.ended() == 0


@pytest.mark.slow
def test_the_permissions_of_the_page_are_enough(server: RedisServer, shell: Shell) -> None:
    (line,) = re.findall(r"^ACL SETUSER .*$", PAGE, re.MULTILINE)
    with server.client() as admin:
        admin.execute_command(*line.replace("password", "secret").split())
    url = server.url.replace("redis://", "redis://shop:secret@")
    shell.write("on_redis.py", source("on_redis.py").replace(URL, url))
    running = shell.start("run", "on_redis:app")
    done = shell.run("publish", "shop-orders", '{"id": 1, "total": 9.5}', "--key", "c-1", "--app", "on_redis:app")
    assert done.returncode == 0, done.stderr
    running.saw("c-1 pays 9.5 for order 1")
    done = shell.run("doctor", url)
    assert "no permission" not in done.stdout + done.stderr
    running.send(signal.SIGTERM)
    assert running.ended() == 0
