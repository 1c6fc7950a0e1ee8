"""taskiq-redis at its best: streams with a consumer group, 1,000 entries a read, up to 100 tasks at a time.

It acknowledges each task after it has ended. It does not keep the order of a key.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

import msgspec
from taskiq.receiver import Receiver
from taskiq_redis import RedisStreamBroker

from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.workload import Item, Order

COUNT = 1_000
TASKS = 100
BLOCK_MS = 200  # at the end, the receiver waits for its last read
STUCK_S = 100.0
NAME = "handle"


def fill(url: str, events: Iterable[tuple[str, Item]]) -> None:
    """Send a task for each event, to its stream."""
    asyncio.run(_fill(url, events))


async def _fill(url: str, events: Iterable[tuple[str, Item]]) -> None:
    broker = RedisStreamBroker(url)

    @broker.task(task_name=NAME)
    async def handle(data: str) -> None:
        pass

    for stream, (_, data) in events:
        await handle.kicker().with_labels(queue_name=stream).kiq(data.decode())
    await broker.shutdown()


def run(url: str, streams: Sequence[str], group: str, events: int) -> Ran:
    return looped(_run(url, streams, group, Lap(events)))


async def _run(url: str, streams: Sequence[str], group: str, lap: Lap) -> Ran:
    logging.disable(logging.CRITICAL)
    broker = RedisStreamBroker(
        url,
        queue_name=streams[0],
        additional_streams=dict.fromkeys(streams[1:], ">"),
        consumer_group_name=group,
        consumer_id="0",
        xread_count=COUNT,
        xread_block=BLOCK_MS,
    )
    decode, over = msgspec.json.Decoder(Order).decode, asyncio.Event()

    @broker.task(task_name=NAME)
    async def handle(data: str) -> None:
        order = decode(data)
        if lap.saw(order.customer, order.number):
            over.set()

    broker.is_worker_process = True
    await broker.startup()
    receiver = Receiver(broker, validate_params=False, max_async_tasks=TASKS, run_startup=False)
    asyncio.get_running_loop().call_later(STUCK_S, over.set)
    await receiver.listen(over)
    await broker.shutdown()
    return lap.ran()
