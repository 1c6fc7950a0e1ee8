"""Celery at its best in one process: a quorum queue, late acknowledgements, a prefetch, no events, no results.

Its tasks run in the process that reads ("solo"): a task that does nothing gains nothing from other processes.
"""

import logging
import threading
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import msgspec
from celery import Celery
from celery.worker import state
from kombu.entity import Exchange, Queue

from bench.amqp_frames import Wire, publish
from bench.contestants.lap import Lap
from bench.kit import Ran
from bench.rabbitmq_properties import outgoing
from bench.workload import Item, Order

PREFETCH = 500
STUCK_S = 100.0
NAME = "handle"
POOL = "solo"


def fill(url: str, queue: str, items: Iterable[Item]) -> None:
    """Declare the queue as Celery does, and publish the messages that Celery would send."""
    app = _celery(url, queue)
    with app.connection_for_write() as connection:
        app.amqp.queues[queue](connection).declare()
    with Wire(url) as wire:
        publish(wire, [_message(app, queue, data.decode()) for _, data in items])


def _message(app: Any, queue: str, data: str) -> Any:
    id_ = str(uuid4())
    task = app.amqp.as_task_v2(id_, NAME, args=(data,))
    named = {"content_encoding": "utf-8", "correlation_id": id_}
    return outgoing(queue, msgspec.json.encode(task.body), headers=task.headers, **named)


def _celery(url: str, queue: str) -> Any:
    app = Celery("bench", broker=url, set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        task_acks_late=True,
        task_ignore_result=True,
        task_queues=[_quorum(queue)],
        task_default_queue=queue,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        worker_prefetch_multiplier=PREFETCH,
        worker_redirect_stdouts=False,
        worker_send_task_events=False,
    )
    return app


def _quorum(queue: str) -> Any:
    arguments = {"x-queue-type": "quorum"}
    return Queue(queue, Exchange(""), routing_key=queue, queue_arguments=arguments)  # type: ignore[no-untyped-call]


def run(url: str, queue: str, events: int) -> Ran:
    logging.disable(logging.CRITICAL)
    app, lap = _celery(url, queue), Lap(events)
    decode = msgspec.json.Decoder(Order).decode

    @app.task(name=NAME)  # type: ignore[untyped-decorator]
    def handle(data: str) -> None:
        order = decode(data)
        if lap.saw(order.customer, order.number):
            state.should_stop = 0  # the exit code: the worker ends when it has acknowledged this task
            threading.Timer(0.05, worker.hub.call_soon, (int,)).start()  # else its loop may wait for 10 s

    worker = app.Worker(pool=POOL, concurrency=1, without_gossip=True, without_mingle=True, without_heartbeat=True)
    guard = threading.Timer(STUCK_S, setattr, (state, "should_stop", 0))
    guard.daemon = True
    guard.start()
    worker.start()
    guard.cancel()
    return lap.ran()
