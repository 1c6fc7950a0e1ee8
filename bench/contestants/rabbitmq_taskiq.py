"""taskiq-aio-pika at its best: a quorum queue, a prefetch, up to 100 tasks at a time, no validation of parameters.

It acknowledges each task after it has ended.
"""

import asyncio
import logging
from collections.abc import Iterable
from uuid import uuid4

import msgspec
from taskiq import TaskiqMessage
from taskiq.receiver import Receiver
from taskiq_aio_pika import AioPikaBroker
from taskiq_aio_pika.queue import Queue

from bench.amqp_frames import Outgoing, Wire, publish
from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.rabbitmq_properties import outgoing
from bench.workload import Item, Order

PREFETCH = 500
TASKS = 100
STUCK_S = 100.0
NAME = "handle"


def fill(url: str, queue: str, items: Iterable[Item]) -> None:
    """Declare the queue as taskiq does, and publish the messages that taskiq would send."""
    asyncio.run(_fill(url, queue, items))


async def _fill(url: str, queue: str, items: Iterable[Item]) -> None:
    broker = _broker(url, queue)
    await broker.startup()
    await broker.shutdown()
    with Wire(url) as wire:
        publish(wire, [_message(broker, queue, data.decode()) for _, data in items])


def _message(broker: AioPikaBroker, queue: str, data: str) -> Outgoing:
    task = TaskiqMessage(task_id=uuid4().hex, task_name=NAME, labels={}, args=[data], kwargs={})
    body = broker.formatter.dumps(task).message
    return outgoing(queue, body, headers={"task_id": task.task_id, "task_name": NAME})


def _broker(url: str, queue: str) -> AioPikaBroker:
    return AioPikaBroker(url, qos=PREFETCH, task_queues=[Queue(name=queue)])


def run(url: str, queue: str, events: int) -> Ran:
    return looped(_run(url, queue, Lap(events)))


async def _run(url: str, queue: str, lap: Lap) -> Ran:
    logging.disable(logging.CRITICAL)
    broker = _broker(url, queue)
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
