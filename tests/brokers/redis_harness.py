"""Redis under the suites."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from onward.brokers.redis import log_scripts
from onward.brokers.redis.scripts import Script
from onward.event import Event
from tests.servers.redis import RedisServer

_REFUSED = "return redis.error_reply('OOM refused by the test')"


class Addressed(Protocol):
    """A server, or several behind one URL."""

    @property
    def url(self) -> str: ...


class RedisHarness:
    """A real Redis under the suites. To refuse, the server runs a script that checks for one thing more."""

    def __init__(self, server: Addressed, folder: Path) -> None:
        self.folder = folder
        self.url = server.url

    @contextmanager
    def refuse(self, event: Event) -> Iterator[None]:
        """The server refuses the call that holds this event."""
        check = f"for i = 7, #ARGV do if ARGV[i]:find('{event.id}', 1, true) then {_REFUSED} end end\n"
        with self._checking("PUBLISH", check):
            yield

    @contextmanager
    def refuse_aside(self, larger_than: int = 0) -> Iterator[None]:
        """The server refuses records."""
        check = f"for i = 0, tonumber(ARGV[6]) - 1 do if #ARGV[9 + 3 * i] > {larger_than} then {_REFUSED} end end\n"
        with self._checking("SETTLE", check):
            yield

    @contextmanager
    def _checking(self, name: str, check: str) -> Iterator[None]:
        script: Script = getattr(log_scripts, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log_scripts, name, Script(check + script.text))
            yield


@contextmanager
def harnessed(server: RedisServer, folder: Path) -> Iterator[RedisHarness]:
    """An empty server under the suites, which leave it empty."""
    with server.client() as client:
        client.flushall()
        yield RedisHarness(server, folder)
        client.flushall()


SERVERS = [
    pytest.param("redis_server", marks=pytest.mark.servers),
    pytest.param("old_redis_server", marks=[pytest.mark.servers, pytest.mark.more]),
    pytest.param("valkey_server", marks=[pytest.mark.servers, pytest.mark.more]),
]


@pytest.fixture(params=SERVERS)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisHarness]:
    """On Redis 7, and in `make test-more` on the oldest version and on Valkey."""
    with harnessed(request.getfixturevalue(request.param), tmp_path) as harness:
        yield harness
