"""The tests of the Redis broker that start their own servers, on the oldest version and on Valkey."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.needs import PROJECT
from tests.servers.redis import RedisServer

pytestmark = [pytest.mark.more, pytest.mark.servers, pytest.mark.timeout(600)]

FILES = [f"tests/brokers/test_redis_{name}.py" for name in ("leases", "loss", "publishing", "reading", "servers")]


@pytest.mark.parametrize("fixture", ["old_redis_server", "valkey_server"])
def test_the_broker_passes_on(fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The servers of the tests are the first `redis-server` on PATH."""
    server: RedisServer = request.getfixturevalue(fixture)
    (tmp_path / "redis-server").symlink_to(server.program.path)
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not more and not storm", *FILES],
        cwd=PROJECT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
