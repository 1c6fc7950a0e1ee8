"""The suites on a real Redis, and in `make test-more` on the oldest version and on Valkey."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.testing import AsideSuite, BrokerSuite, FailureSuite
from tests.brokers.redis_harness import RedisHarness, harnessed

pytestmark = pytest.mark.timeout(240)  # scenarios have a limit of their own

SERVERS = [
    pytest.param("redis_server", marks=pytest.mark.servers),
    pytest.param("old_redis_server", marks=[pytest.mark.servers, pytest.mark.more]),
    pytest.param("valkey_server", marks=[pytest.mark.servers, pytest.mark.more]),
]


@pytest.fixture(params=SERVERS)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisHarness]:
    with harnessed(request.getfixturevalue(request.param), tmp_path) as harness:
        yield harness


class TestRedis(BrokerSuite):
    pass


@pytest.mark.slow
class TestRedisAside(AsideSuite):
    pass


@pytest.mark.slow
class TestRedisFailure(FailureSuite):
    pass
