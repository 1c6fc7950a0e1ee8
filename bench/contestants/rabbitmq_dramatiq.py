"""Dramatiq at its best: a quorum queue, a prefetch, worker threads, its usual middleware, no log lines.

It acknowledges each message after its actor.
"""

import logging
import threading
from collections.abc import Iterable
from typing import Any

import dramatiq
import msgspec
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from bench.amqp_frames import Wire, publish
from bench.contestants.lap import Lap
from bench.kit import Ran
from bench.rabbitmq_properties import outgoing
from bench.workload import Item, Order

PREFETCH = 500
THREADS = 8
STUCK_S = 100.0
NAME = "handle"


class QuorumBroker(RabbitmqBroker):
    """Dramatiq declares classic queues, so its own arguments get one more."""

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        return {**super()._build_queue_arguments(queue_name), "x-queue-type": "quorum"}  # type: ignore[no-untyped-call]


def fill(url: str, queue: str, items: Iterable[Item]) -> None:
    """Declare the queues as Dramatiq does, and publish the messages that Dramatiq would send."""
    broker = QuorumBroker(url=url)

    @dramatiq.actor(broker=broker, actor_name=NAME, queue_name=queue)
    def handle(data: str) -> None:
        pass

    broker.declare_queue(queue, ensure=True)
    broker.close()
    with Wire(url) as wire:
        publish(wire, [outgoing(queue, handle.message(data.decode()).encode()) for _, data in items])


def run(url: str, queue: str, events: int) -> Ran:
    logging.disable(logging.CRITICAL)
    broker = QuorumBroker(url=url)
    lap, lock, over = Lap(events), threading.Lock(), threading.Event()
    decode = msgspec.json.Decoder(Order).decode

    @dramatiq.actor(broker=broker, actor_name=NAME, queue_name=queue)
    def handle(data: str) -> None:
        order = decode(data)
        with lock:
            if lap.saw(order.customer, order.number):
                over.set()

    worker = dramatiq.Worker(broker, queues={queue}, worker_threads=THREADS)
    worker.queue_prefetch = PREFETCH
    worker.start()
    over.wait(STUCK_S)
    worker.stop()
    broker.close()
    return lap.ran()
