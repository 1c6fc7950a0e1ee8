"""Redis under the suites."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from onward.brokers.redis import log_scripts
from onward.brokers.redis.scripts import Script
from onward.event import Event
from tests.servers.redis import RedisServer

_REFUSED = "return redis.error_reply('OOM refused by the test')"


class RedisHarness:
    """A real Redis under the suites. To refuse, the server runs a script that checks for one thing more."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.folder = folder
        self.url = server.url
        self.client = Redis(host=server.host, port=server.port)

    @contextmanager
    def refuse(self, event: Event) -> Iterator[None]:
        """The server refuses the call that holds this event."""
        check = f"for i = 7, #ARGV do if ARGV[i]:find('{event.id}', 1, true) then {_REFUSED} end end\n"
        with self._checking("PUBLISH", check):
            yield

    @contextmanager
    def refuse_aside(self, larger_than: int = 0) -> Iterator[None]:
        """The server refuses records."""
        check = f"for i = 0, tonumber(ARGV[7]) - 1 do if #ARGV[10 + 3 * i] > {larger_than} then {_REFUSED} end end\n"
        with self._checking("SETTLE", check):
            yield

    @contextmanager
    def _checking(self, name: str, check: str) -> Iterator[None]:
        script: Script = getattr(log_scripts, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log_scripts, name, Script(check + script.text))
            yield


@pytest.fixture
def harness(redis_server: RedisServer, tmp_path: Path) -> Iterator[RedisHarness]:
    harness = RedisHarness(redis_server, tmp_path)
    harness.client.flushall()
    yield harness
    harness.client.flushall()
    harness.client.close()
