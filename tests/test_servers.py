"""The test servers start, stop, break and recover as promised, and leave nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import aio_pika
import psycopg
import pymysql
import pytest
from aio_pika.abc import AbstractChannel
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from playwright.sync_api import Page
from pymysql.cursors import Cursor
from redis import Redis, RedisError

from tests.servers import install
from tests.servers.chromium import ChromiumServer
from tests.servers.guard import descendants
from tests.servers.needs import MORE, PROJECT, SERVERS, Need
from tests.servers.redis import RedisServer
from tests.servers.redis_pair import RedisPair
from tests.servers.server import Server, ServerFailed, free_port, until

PATIENT_S, IMPATIENT_S = 30, 1
LOST = (OSError, RedisError, psycopg.Error, pymysql.Error, KafkaException, aio_pika.exceptions.AMQPError)


@dataclass(frozen=True)
class Client:
    """Puts a value into a server and gets it back, through the client library that users have."""

    put: Callable[[str, str], None]
    get: Callable[[str, int], str]
    has_kept: Callable[[Server], bool] = lambda server: True  # whether the value would survive a kill now


@contextmanager
def redis_client(url: str, timeout_s: int) -> Iterator[Redis]:
    with Redis.from_url(url, decode_responses=True, socket_timeout=timeout_s, retry=None) as client:
        yield client


def redis_put(url: str, value: str) -> None:
    with redis_client(url, PATIENT_S) as client:
        client.set("proof", value)


def redis_get(url: str, timeout_s: int) -> str:
    with redis_client(url, timeout_s) as client:
        return str(client.get("proof"))


def postgres_put(url: str, value: str) -> None:
    with psycopg.connect(url, connect_timeout=PATIENT_S) as connection:
        connection.execute("create table proof as select %s::text as value", [value])


def postgres_get(url: str, timeout_s: int) -> str:
    with psycopg.connect(url, connect_timeout=timeout_s) as connection:
        return "".join(connection.execute("select value from proof").fetchone() or ())


@contextmanager
def mariadb_cursor(url: str, timeout_s: int) -> Iterator[Cursor]:
    at = urlsplit(url)
    with pymysql.connect(
        host=at.hostname,
        port=at.port or 0,
        user=at.username,
        password=at.password or "",
        database=at.path[1:],
        connect_timeout=timeout_s,
        read_timeout=timeout_s,
    ) as connection:
        yield connection.cursor()


def mariadb_put(url: str, value: str) -> None:
    with mariadb_cursor(url, PATIENT_S) as cursor:
        cursor.execute("create table proof as select %s as value", [value])


def mariadb_get(url: str, timeout_s: int) -> str:
    with mariadb_cursor(url, timeout_s) as cursor:
        cursor.execute("select value from proof")
        return "".join(cursor.fetchone() or ())


@asynccontextmanager
async def rabbitmq_channel(url: str, timeout_s: int) -> AsyncIterator[AbstractChannel]:
    async with asyncio.timeout(timeout_s), await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("proof", durable=True)
        yield channel


async def rabbitmq_put(url: str, value: str) -> None:
    async with rabbitmq_channel(url, PATIENT_S) as channel:
        message = aio_pika.Message(value.encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, "proof")


def rabbitmq_has_kept(server: Server) -> bool:
    """Whether Mnesia's log has the queue. The message is already on disk, but the log is written two seconds later."""
    files = [path for path in (server.folder / "mnesia").glob("*/*.*") if path.is_file()]
    at_rest = time.time() - 2.5  # the log is written every two seconds: the end of a transaction may follow later
    return any(path.stat().st_mtime < at_rest and b"proof" in path.read_bytes() for path in files)


async def rabbitmq_get(url: str, timeout_s: int) -> str:
    async with rabbitmq_channel(url, timeout_s) as channel:
        found = await (await channel.get_queue("proof")).get()
        assert found is not None
        await found.reject(requeue=True)
        return found.body.decode()


def kafka_put(url: str, value: str) -> None:
    producer = Producer({"bootstrap.servers": urlsplit(url).netloc, "acks": "all"})
    producer.produce("proof", value)
    assert producer.flush(PATIENT_S) == 0


def kafka_get(url: str, timeout_s: int) -> str:
    consumer = Consumer({"bootstrap.servers": urlsplit(url).netloc, "group.id": "proof", "log_level": 0})
    try:
        consumer.assign([TopicPartition("proof", 0, 0)])
        messages = consumer.consume(1, timeout=timeout_s)
    finally:
        consumer.close()
    if not messages or messages[0].error():
        raise TimeoutError("the broker sent nothing")
    return (messages[0].value() or b"").decode()


RABBITMQ = Client(
    lambda url, value: asyncio.run(rabbitmq_put(url, value)),
    lambda url, timeout_s: asyncio.run(rabbitmq_get(url, timeout_s)),
    rabbitmq_has_kept,
)
CLIENTS = {
    "redis_server": Client(redis_put, redis_get),
    "old_redis_server": Client(redis_put, redis_get),
    "valkey_server": Client(redis_put, redis_get),
    "rabbitmq_server": RABBITMQ,
    "newer_rabbitmq_server": RABBITMQ,
    "newest_rabbitmq_server": RABBITMQ,
    "postgres_server": Client(postgres_put, postgres_get),
    "mariadb_server": Client(mariadb_put, mariadb_get),
    "kafka_server": Client(kafka_put, kafka_get),
}


@dataclass(frozen=True)
class Case:
    """A durable server with one value in it."""

    server: Server
    client: Client

    def kept(self, url: str) -> bool:
        return self.client.get(url, PATIENT_S) == "kept"

    def lost(self, url: str) -> bool:
        """Whether a client that waits a moment gets an error instead of an answer."""
        try:
            self.client.get(url, IMPATIENT_S)
        except LOST:
            return True
        return False


RARE = {"old_redis_server", "valkey_server", "newer_rabbitmq_server", "newest_rabbitmq_server"}


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.servers, pytest.mark.more] if name in RARE else [pytest.mark.servers]


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in CLIENTS], scope="session")
def case(request: pytest.FixtureRequest) -> Case:
    client, server = CLIENTS[request.param], request.getfixturevalue(request.param)
    client.put(server.url, "kept")
    until(lambda: client.has_kept(server), PATIENT_S, f"{server.name} does not store the value", server.log)
    return Case(server, client)


def test_a_confirmed_value_survives_kill_9(case: Case) -> None:
    server, port, pid = case.server, case.server.port, case.server.pid
    server.kill()
    assert case.lost(server.url)
    server.restart()
    assert case.kept(server.url)
    assert server.port == port
    assert server.pid != pid


def test_a_paused_server_is_silent_until_it_resumes(case: Case) -> None:
    case.server.pause()
    assert case.lost(case.server.url)
    case.server.resume()
    assert case.kept(case.server.url)


def test_the_proxy_cuts_stalls_and_mends(case: Case) -> None:
    with case.server.proxy() as proxy:
        assert case.kept(proxy.url)
        for fault in (proxy.cut, proxy.stall):
            fault()
            assert case.lost(proxy.url)
            proxy.mend()
            assert case.kept(proxy.url)


def test_nothing_listens_beyond_loopback(case: Case) -> None:
    sockets = listening(descendants())
    assert case.server.port in {port for _, port in sockets}
    assert {address for address, _ in sockets} <= {
        "0100007F",  # 127.0.0.1
        "00000000000000000000000001000000",  # ::1
        "0000000000000000FFFF00000100007F",  # 127.0.0.1 inside IPv6
    }


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Address (in the kernel's hexadecimal) and port of every TCP socket on which these processes listen."""
    sockets = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").glob("*") if fd.is_symlink()}
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path("/proc/net", table).read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return {(address, int(port, 16)) for address, port in ends}


def test_a_connection_through_a_stalled_proxy_gets_its_answer_later(redis_server: RedisServer) -> None:
    with redis_server.proxy() as proxy, redis_client(proxy.url, PATIENT_S) as client:
        client.ping()
        proxy.stall()
        began = time.monotonic()
        threading.Timer(0.3, proxy.mend).start()
        client.ping()
        assert time.monotonic() - began >= 0.2


def test_a_server_that_was_stopped_gracefully_starts_again(redis_server: RedisServer) -> None:
    redis_put(redis_server.url, "kept")
    redis_server.stop()
    assert not redis_server.running
    redis_server.restart()
    assert redis_get(redis_server.url, PATIENT_S) == "kept"


class BrokenServer(RedisServer):
    def command(self) -> list[str]:
        return [*super().command(), "--teapot", "yes"]


@pytest.mark.usefixtures("redis_server")
def test_a_server_that_cannot_start_shows_its_log() -> None:
    with closing(BrokenServer()) as server, pytest.raises(ServerFailed, match="teapot"):
        server.start()


def test_a_server_does_not_mistake_another_for_itself(redis_server: RedisServer) -> None:
    with closing(RedisServer()) as rival:
        rival.port = redis_server.port
        with pytest.raises(ServerFailed, match="taken"):
            rival.start()


def test_no_other_test_run_takes_the_port_of_a_server_that_is_down() -> None:
    port = free_port()
    use = f"server._ports = iter([{port}, *range(19_000, 19_100)])"
    code = f"from tests.servers import server; {use}; print(server.free_port())"
    other = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert int(other.stdout) in range(19_000, 19_100)


def test_a_promoted_replica_has_what_it_had_copied(redis_pair: RedisPair) -> None:
    with redis_client(redis_pair.url, PATIENT_S) as client:
        client.set("proof", "copied")
        redis_pair.catch_up()
        redis_pair.lag()
        client.set("proof", "lost")
        assert client.wait(1, 200) == 0
        redis_pair.promote()
        assert client.get("proof") == "copied"
        client.set("proof", "written after")
    redis_pair.heal()
    with redis_pair.replica.client() as its_client:
        assert its_client.get("proof") == b"lost"


def test_a_replica_that_lagged_catches_up(redis_pair: RedisPair) -> None:
    with redis_client(redis_pair.url, PATIENT_S) as client, redis_pair.replica.client() as its_client:
        client.set("proof", "first")
        redis_pair.catch_up()
        redis_pair.lag()
        client.set("proof", "second")
        assert client.wait(1, 200) == 0
        assert its_client.get("proof") == b"first"
        redis_pair.catch_up()
        assert its_client.get("proof") == b"second"


PAGE = b"""<!doctype html><button onclick="document.title = 'clicked'">press</button>"""


class OnePage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_request(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OnePage) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_chromium_renders_and_clicks(page: Page, site: str) -> None:
    page.goto(site)
    page.get_by_role("button").click()
    assert page.title() == "clicked"
    assert page.screenshot().startswith(b"\x89PNG")


def test_chromium_restarts_after_kill_9(chromium_server: ChromiumServer, site: str) -> None:
    chromium_server.kill()
    chromium_server.restart()
    with chromium_server.page() as page:
        page.goto(site)
        assert page.get_by_role("button").inner_text() == "press"


@pytest.mark.more
@pytest.mark.parametrize(
    ("fixture", "version"), [("old_redis_server", "redis_version:6.2."), ("valkey_server", "valkey_version:9.")]
)
@pytest.mark.servers
def test_the_version_is_the_one_that_the_name_promises(
    fixture: str, version: str, request: pytest.FixtureRequest
) -> None:
    server: RedisServer = request.getfixturevalue(fixture)
    with server.client() as client:
        client.response_callbacks.pop("INFO", None)
        assert version in str(client.execute_command("INFO", "server"))


@pytest.mark.more
@pytest.mark.parametrize("fixture", ["redis_server", "old_redis_server", "valkey_server"])
@pytest.mark.servers
def test_the_end_of_the_append_only_file_can_be_forgotten(fixture: str, request: pytest.FixtureRequest) -> None:
    server: RedisServer = request.getfixturevalue(fixture)
    redis_put(server.url, "kept")
    size = server.appended.stat().st_size
    redis_put(server.url, "forgotten")
    server.forget(size)
    assert redis_get(server.url, PATIENT_S) == "kept"


START_AND_WAIT = """
import sys, time
from tests.servers.{module} import {kind}
server = {kind}()
server.start()
print(server.folder, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("module", "kind", "end"),
    [
        ("redis", "RedisServer", signal.SIGINT),
        ("redis", "RedisServer", signal.SIGTERM),
        ("redis", "RedisServer", signal.SIGKILL),
        ("postgres", "PostgresServer", signal.SIGKILL),
    ],
)
@pytest.mark.usefixtures("redis_server", "postgres_server")
def test_a_test_run_that_dies_leaves_nothing_behind(module: str, kind: str, end: signal.Signals) -> None:
    code = START_AND_WAIT.format(module=module, kind=kind)
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        folder = Path(run.stdout.readline().strip())
        left = [Path(f"/proc/{pid}") for pid in descendants(run.pid)]
        assert folder.is_dir()
        assert len(left) >= 2
        run.send_signal(end)
    deadline = time.monotonic() + 30
    while any(path.exists() for path in [folder, *left]):
        assert time.monotonic() < deadline, [path for path in [folder, *left] if path.exists()]
        time.sleep(0.05)


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_the_installer_names_what_is_missing(
    ci: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setitem(SERVERS, "Teapot", (Need("kettle", lambda: None, "boil water"),))
    monkeypatch.setattr(install, "install_packages", lambda servers: None)
    monkeypatch.setattr(install, "fetch_jars", lambda: None)
    monkeypatch.setattr(install, "fetch_sqlalchemy", lambda: None)
    got = install.main(more=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [server for server in SERVERS if server not in MORE]
    assert lines[-1] == "Teapot        missing: kettle (get it with: boil water)"
    assert got == code


def child_pytest(*arguments: str, **env: str) -> str:
    """The output of a test run of this file, in our environment changed by `env`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_servers.py", *arguments]
    done = subprocess.run(
        command, cwd=PROJECT, env=os.environ | env, capture_output=True, text=True, timeout=100, check=False
    )
    return done.stdout


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 error")])
def test_without_its_server_a_test_is_skipped_but_fails_in_ci(ci: str, outcome: str) -> None:
    output = child_pytest("-k", "stopped_gracefully", PATH="/nowhere", CI=ci)
    assert outcome in output
    assert "apt-get install -y --no-install-recommends redis-server" in output


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 failed")])
def test_without_the_server_that_it_starts_a_test_is_skipped_but_fails_in_ci(ci: str, outcome: str) -> None:
    output = child_pytest(
        "tests/brokers/test_redis_servers.py", "-k", "a_wrong_password_is_refused", PATH="/nowhere", CI=ci
    )
    assert outcome in output


def test_a_test_that_uses_a_server_is_marked() -> None:
    output = child_pytest("--collect-only", "-q", "-m", "not servers")
    assert "test_a_test_that_uses_a_server_is_marked" in output
    assert "chromium" not in output
    assert "kill_9" not in output
