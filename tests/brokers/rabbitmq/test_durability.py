"""What the broker says about its durability."""

import asyncio

import pytest

from onward import settings
from onward.brokers import open_broker
from tests.brokers.rabbitmq.harness import RabbitHarness, harness

__all__ = ["harness"]

pytestmark = pytest.mark.servers


def durability(url: str, **client: object) -> str:
    async def asked() -> str:
        broker = await open_broker(settings.load(url, client=client))
        await broker.close()
        return broker.features.durability

    return asyncio.run(asked())


def test_one_node_loses_the_last_moments_in_a_power_cut(harness: RabbitHarness) -> None:
    """A stream is not written to disk before it is confirmed."""
    assert durability(harness.url) == "window"
    assert durability(harness.url, management_url=harness.server.management_url) == "window"


def test_a_cluster_has_copies(harness: RabbitHarness) -> None:
    assert durability(harness.url, cluster_nodes=3) == "replicated"


def test_a_management_api_that_does_not_answer_is_reported_and_assumed_to_be_one_node(
    harness: RabbitHarness, caplog: pytest.LogCaptureFixture
) -> None:
    assert durability(harness.url, management_url="http://127.0.0.1:1") == "window"
    assert "assumes one" in caplog.text
