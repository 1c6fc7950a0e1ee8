"""The real servers as fixtures: each starts when the first test asks for it, and ends with the run."""

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import pytest
from playwright.sync_api import Page

from tests.servers.chromium import ChromiumServer
from tests.servers.kafka import KafkaServer
from tests.servers.mariadb import MariaDBServer
from tests.servers.needs import Missing
from tests.servers.postgres import PostgresServer
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.rabbitmq_cluster import RabbitMQCluster
from tests.servers.rabbitmq_newer import NewerRabbitMQ, NewestRabbitMQ
from tests.servers.redis import OldRedisServer, RedisServer, ValkeyServer
from tests.servers.redis_cluster import RedisCluster
from tests.servers.redis_pair import RedisPair
from tests.servers.redis_sentinel import RedisSentinel

SERVER_FIXTURES = {
    "redis_server",
    "old_redis_server",
    "valkey_server",
    "redis_cluster",
    "redis_sentinel",
    "redis_pair",
    "rabbitmq_server",
    "newer_rabbitmq_server",
    "newest_rabbitmq_server",
    "rabbitmq_cluster",
    "postgres_server",
    "mariadb_server",
    "kafka_server",
    "chromium_server",
}
started: list["Startable"] = []

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell started us in the background. Without this, programs that the tests start would ignore Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Startable(Protocol):
    """A server, or several that belong together."""

    def start(self) -> None: ...
    def heal(self) -> None: ...
    def close(self) -> None: ...


def shared(kind: Callable[[], Startable]) -> object:
    """A fixture with one server of this kind for the whole run."""

    @pytest.fixture(scope="session")
    def fixture() -> Iterator[Startable]:
        server = kind()
        try:
            server.start()
            started.append(server)
            yield server
        finally:
            server.close()

    return fixture


redis_server = shared(RedisServer)
old_redis_server = shared(OldRedisServer)
valkey_server = shared(ValkeyServer)
redis_cluster = shared(RedisCluster)
redis_sentinel = shared(RedisSentinel)
redis_pair = shared(RedisPair)
rabbitmq_server = shared(RabbitMQServer)
newer_rabbitmq_server = shared(NewerRabbitMQ)
newest_rabbitmq_server = shared(NewestRabbitMQ)
rabbitmq_cluster = shared(RabbitMQCluster)
postgres_server = shared(PostgresServer)
mariadb_server = shared(MariaDBServer)
kafka_server = shared(KafkaServer)
chromium_server = shared(ChromiumServer)


@pytest.fixture
def page(chromium_server: ChromiumServer) -> Iterator[Page]:
    with chromium_server.page() as page:
        yield page


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses a server, so that `-m "not servers"` deselects all of them."""
    for item in items:
        if SERVER_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.servers)


@contextmanager
def skipped_without_its_server() -> Iterator[None]:
    """A test is skipped if the server that it or its fixture starts is not installed. In CI it fails."""
    try:
        yield
    except Missing as reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Repair the servers that the last test broke."""
    if item.get_closest_marker("servers"):
        for server in started:
            server.heal()
    with skipped_without_its_server():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with skipped_without_its_server():
        yield


_SLOWEST_FILES = 10


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the files whose tests took longest."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > _SLOWEST_FILES:
        terminalreporter.section("slowest files")
        for name, took_s in sorted(seconds.items(), key=lambda each: -each[1])[:_SLOWEST_FILES]:
            terminalreporter.write_line(f"{took_s:7.1f} s  {name}")
