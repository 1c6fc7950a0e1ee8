"""A stream that has lost its end on disk, as after a power cut: no event may be skipped."""

import os
from pathlib import Path

import pytest

from onward import settings
from onward.brokers import open_broker
from onward.testing.scenario import Member
from tests.brokers.rabbitmq.stage import played
from tests.brokers.rabbitmq.token_stage import event
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.more]

OLD, NEW = 2_000, 300


def _cut(folder: Path) -> None:
    """Cut off a fifth of the topic's stream. The aside of the group is a stream too, and much smaller."""
    segments = [path for path in folder.rglob("*.segment") if "orders" in path.parent.name]
    largest = max(segments, key=lambda path: path.stat().st_size)
    os.truncate(largest, int(largest.stat().st_size * 0.8))


@played
async def test_events_of_a_log_that_lost_its_end_run_again_and_none_is_skipped() -> None:
    server = RabbitMQServer()
    try:
        server.start()
        loaded = settings.load(server.url, partitions=1, lease_s=2.0, takeover_grace_s=0.1)
        broker = await open_broker(loaded)
        for start in range(0, OLD, 100):
            await broker.publish([event("orders", n) for n in range(start, start + 100)])
        member = await Member.join(broker, "orders", "group")
        await member.take(OLD)
        assert not await member.settle()
        (log_id,) = {each.log_id for each in member.assigned.values()}
        await member.release(list(member.assigned), drained=True)
        await broker.close()
        server.until_durable("/")
        server.kill()
        _cut(server.folder)
        server.start()
        server.until_streams_are_back()
        broker = await open_broker(loaded)
        await broker.publish([event("orders", OLD + n) for n in range(NEW)])
        again = await Member.join(broker, "orders", "group")
        await again.until(lambda: set(range(OLD, OLD + NEW)) <= set(again.values))
        assert next(iter(again.assigned.values())).log_id != log_id
        assert next(iter(again.assigned.values())).unclean
        await broker.close()
    finally:
        server.close()
