"""How many messages wait in queues, for the metrics: read from the management API, or asked over AMQP."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from onward.brokers.rabbitmq.amqp import AmqpError, ChannelClosed, Connection
from onward.brokers.rabbitmq.operate.figures import QueueDepth, RabbitFigures
from onward.brokers.rabbitmq.operate.management import ManagementApi, ManagementError
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel
from onward.errors import BrokerError

log = logging.getLogger("onward")

_EVERY_S = 10.0


class DepthProbe:
    """Asks for the depth of queues on a channel of its own, so that a missing queue disturbs nothing else.

    A queue that cannot be asked has no depth in the metrics, its failed probes are counted, and `problems` says why."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        figures: RabbitFigures,
        management: ManagementApi | None = None,
    ) -> None:
        self.problems: Mapping[str, str] = {}  # by queue, why its depth is unknown
        self._connect = connect
        self._figures = figures
        self._management = management
        self._asked: frozenset[str] = frozenset()
        self._warned: dict[str, str] = {}  # by queue, the problem that was logged last
        self._without = ""  # the problem of the management API that was logged last

    async def watch(self, queues: Callable[[], Collection[str]], every_s: float = _EVERY_S) -> None:
        """Look again and again, until it is cancelled."""
        while True:
            await self.look(queues())
            await asyncio.sleep(every_s)

    async def look(self, queues: Collection[str]) -> None:
        """Ask once, and store the answers in the figures. It does not raise if the server cannot be asked."""
        found: dict[str, QueueDepth | str] = {}
        if queues:
            found = await self._found(sorted(set(queues)))
        for queue in self._asked - found.keys():
            self._figures.forget(queue)
        for queue, answer in found.items():
            if isinstance(answer, str):
                self._figures.probe_failed(queue)
            else:
                self._figures.depth(queue, *answer)
        self._asked = frozenset(found)
        before = self.problems
        self.problems = {queue: answer for queue, answer in found.items() if isinstance(answer, str)}
        self._warn(before)

    def _warn(self, before: Collection[str]) -> None:
        """Log what is unknown for the second time in a row: the management API has no figures of a new queue for some
        seconds. `before`: the queues that were unknown at the last look."""
        for queue, why in self.problems.items():
            if queue in before and self._warned.get(queue) != why:
                self._warned[queue] = why
                log.warning("the depth of queue %s is unknown: %s", queue, why)
        for queue in self._warned.keys() - self.problems.keys():
            del self._warned[queue]

    async def _found(self, queues: Collection[str]) -> dict[str, QueueDepth | str]:
        if self._management is not None:
            try:
                return {queue: await _managed(self._management, queue) for queue in queues}
            except ManagementError as error:
                if str(error) != self._without:
                    self._without = str(error)
                    log.warning("asking for the depth of queues over AMQP: %s", error)
        try:
            probe = ProbeChannel(await self._connect())
            try:
                return {queue: await _asked(probe, queue) for queue in queues}
            finally:
                await probe.close()
        except (AmqpError, BrokerError) as error:
            return dict.fromkeys(queues, str(error))


async def _asked(probe: ProbeChannel, queue: str) -> QueueDepth | str:
    try:
        state = await probe.queue(queue)
    except ChannelClosed as error:
        if not error.code:
            raise
        return error.text
    return QueueDepth(state.messages, state.consumers)


async def _managed(management: ManagementApi, queue: str) -> QueueDepth | str:
    found = await management.queue(queue)
    if found is None:
        return f"there is no queue {queue} in virtual host {management.place.vhost}"
    if "messages_ready" not in found:
        return "the management API has no figures of it; its node may be down"
    return QueueDepth(found["messages_ready"], found.get("consumers", 0), _age_s(found))


def _age_s(found: Mapping[str, Any]) -> float | None:
    """The age of the first message. The server knows it of classic queues whose messages have a timestamp."""
    stamp = found.get("head_message_timestamp")
    return max(0.0, time.time() - stamp) if isinstance(stamp, int | float) else None
