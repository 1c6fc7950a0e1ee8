"""A channel: declares, consumers, acknowledgements and publishing."""

import asyncio
import copy
import itertools
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from onward.brokers.rabbitmq.amqp import frames
from onward.brokers.rabbitmq.amqp.assembly import Answered, Arrival, Confirm, Deliveries, Received, ServerMethod
from onward.brokers.rabbitmq.amqp.calls import Calls
from onward.brokers.rabbitmq.amqp.confirms import Confirms, Outbound, PublishAnswer, merged
from onward.brokers.rabbitmq.amqp.faults import AmqpError, ChannelClosed, ConnectionLost, Malformed
from onward.brokers.rabbitmq.amqp.publish_frames import PublishFrames
from onward.brokers.rabbitmq.amqp.wire import Wire

log = logging.getLogger("onward")

if TYPE_CHECKING:
    from onward.brokers.rabbitmq.amqp.connection import Connection

_ACK = struct.Struct(">BHIHHQBB").pack
_ACK_BYTES = 13
_MULTIPLE, _REQUEUE = 1, 2
_CLOSE_S = 3.0
_tags = itertools.count(1)

Table = Mapping[str, Any] | None


class QueueState(NamedTuple):
    name: str
    messages: int
    consumers: int


class ConsumerCalls(NamedTuple):
    """What to call for one consumer."""

    on_messages: Callable[[list[Received]], None]
    on_cancel: Callable[[], None] | None


class PublishWait:
    """Messages that were sent. `reasons`: None for each that the server has accepted, otherwise why not."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.reasons: list[str | None] = ["no answer"] * count
        self.open = count
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, answer: PublishAnswer) -> None:
        for number in range(max(answer.first, self.first), min(answer.last + 1, self.first + len(self.reasons))):
            self.reasons[number - self.first] = answer.why
            self.open -= 1
        if self.open <= 0 and not self.answered.done():
            self.answered.set_result(None)

    def fail(self, why: AmqpError) -> None:
        if not self.answered.done():
            self.answered.set_exception(copy.copy(why))


class Channel:
    """`closing` is done with the reason when the channel has ended: ChannelClosed or ConnectionLost.

    Every call raises that reason then. Wait for `closing` with asyncio.wait, which does not cancel it. Callbacks run in
    the loop of the connection; if one raises, the connection is closed.
    """

    def __init__(self, connection: "Connection", wire: Wire, number: int) -> None:
        self.connection = connection
        self.number = number
        self.closing: asyncio.Future[AmqpError] = asyncio.get_running_loop().create_future()
        self.on_answers: Callable[[list[PublishAnswer]], None] | None = None
        self._wire = wire
        self._calls = Calls(wire, number)
        self._consumers: dict[str, ConsumerCalls] = {}
        self._frames = PublishFrames(number, connection.frame_max)
        self._confirms: Confirms | None = None
        self._waits: list[PublishWait] = []

    @property
    def is_closed(self) -> bool:
        return self._calls.why_ended is not None

    async def open(self) -> None:
        """For the connection, which hands out only open channels."""
        await self._calls.call(frames.CHANNEL_OPEN, "", reply=frames.CHANNEL_OPEN_OK)

    async def declare_queue(
        self,
        name: str,
        *,
        passive: bool = False,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Table = None,
    ) -> QueueState:
        """With an empty name the server chooses one. `passive`: only look whether it exists."""
        bits = passive, durable, exclusive, auto_delete, False
        reply = frames.QUEUE_DECLARE_OK
        return QueueState(*await self._calls.call(frames.QUEUE_DECLARE, 0, name, *bits, arguments, reply=reply))

    async def delete_queue(self, name: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """How many messages were in it. A queue that does not exist is no error."""
        bits = if_unused, if_empty, False
        (count,) = await self._calls.call(frames.QUEUE_DELETE, 0, name, *bits, reply=frames.QUEUE_DELETE_OK)
        return int(count)

    async def declare_exchange(
        self,
        name: str,
        kind: str,
        *,
        passive: bool = False,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Table = None,
    ) -> None:
        bits = passive, durable, auto_delete, internal, False
        reply = frames.EXCHANGE_DECLARE_OK
        await self._calls.call(frames.EXCHANGE_DECLARE, 0, name, kind, *bits, arguments, reply=reply)

    async def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        await self._calls.call(frames.EXCHANGE_DELETE, 0, name, if_unused, False, reply=frames.EXCHANGE_DELETE_OK)

    async def bind_queue(self, queue: str, exchange: str, key: str = "", arguments: Table = None) -> None:
        await self._calls.call(frames.QUEUE_BIND, 0, queue, exchange, key, False, arguments, reply=frames.QUEUE_BIND_OK)

    async def unbind_queue(self, queue: str, exchange: str, key: str = "", arguments: Table = None) -> None:
        await self._calls.call(frames.QUEUE_UNBIND, 0, queue, exchange, key, arguments, reply=frames.QUEUE_UNBIND_OK)

    async def bind_exchange(self, destination: str, source: str, key: str = "", arguments: Table = None) -> None:
        reply = frames.EXCHANGE_BIND_OK
        await self._calls.call(frames.EXCHANGE_BIND, 0, destination, source, key, False, arguments, reply=reply)

    async def unbind_exchange(self, destination: str, source: str, key: str = "", arguments: Table = None) -> None:
        reply = frames.EXCHANGE_UNBIND_OK
        await self._calls.call(frames.EXCHANGE_UNBIND, 0, destination, source, key, False, arguments, reply=reply)

    async def qos(self, prefetch: int) -> None:
        """For each consumer that starts after it."""
        await self._calls.call(frames.QOS, 0, prefetch, False, reply=frames.QOS_OK)

    async def confirm_select(self) -> None:
        """From now on the server answers for each message; the first has the number 1."""
        await self._calls.call(frames.CONFIRM_SELECT, False, reply=frames.CONFIRM_SELECT_OK)
        self._confirms = self._confirms or Confirms()

    async def consume(
        self,
        queue: str,
        on_messages: Callable[[list[Received]], None],
        *,
        tag: str = "",
        exclusive: bool = False,
        no_ack: bool = False,
        arguments: Table = None,
        on_cancel: Callable[[], None] | None = None,
    ) -> str:
        """Start a consumer and return its tag. `on_messages` gets all messages of one read, also before this returns.

        `on_cancel`: the server has cancelled it, for example because the queue was deleted.
        """
        tag = tag or f"onward.{next(_tags)}"
        if tag in self._consumers:
            raise ValueError(f"the channel already has a consumer {tag!r}")
        self._consumers[tag] = ConsumerCalls(on_messages, on_cancel)
        bits = False, no_ack, exclusive, False
        try:
            await self._calls.call(frames.CONSUME, 0, queue, tag, *bits, arguments, reply=frames.CONSUME_OK)
        except ValueError:  # it was not sent
            del self._consumers[tag]
            raise
        return tag

    async def cancel(self, tag: str) -> None:
        """Stop a consumer. Messages that were under way reach `on_messages` before this returns."""
        await self._calls.call(frames.CANCEL, tag, False, reply=frames.CANCEL_OK)

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        """Written at the end of the loop turn. On a closed channel it does nothing."""
        self._settle(frames.ACK, tag, _MULTIPLE if multiple else 0)

    def nack(self, tag: int, *, multiple: bool = False, requeue: bool = True) -> None:
        """As ack. Without `requeue` the message is dropped or dead-lettered."""
        self._settle(frames.NACK, tag, (_MULTIPLE if multiple else 0) | (_REQUEUE if requeue else 0))

    def _settle(self, method: frames.Method, tag: int, bits: int) -> None:
        if not self.is_closed:
            head = frames.METHOD, self.number, _ACK_BYTES, method.family, method.number
            self._wire.write(_ACK(*head, tag, bits, frames.FRAME_END))

    def send(self, messages: Sequence[Outbound]) -> int:
        """Write the messages in one burst. Returns the publish number of the first; 0 outside confirm mode.

        Raises ValueError if one cannot be encoded; none of them is then sent.
        """
        self._calls.check()
        self._wire.write(self._frames.encoded(messages))
        return self._confirms.sent(messages) if self._confirms else 0

    async def publish(self, messages: Sequence[Outbound]) -> list[str | None]:
        """Send the messages in confirm mode and wait for all answers: None for accepted, else why not.

        Raises ChannelClosed or ConnectionLost if the channel ends first: some may be stored. `on_answers` gets these
        answers too.
        """
        if not messages:
            return []
        wait = await self.publishing(messages)
        await wait.answered
        return wait.reasons

    async def publishing(self, messages: Sequence[Outbound]) -> PublishWait:
        """As publish, but the caller waits for `answered`, for as long as it likes."""
        if self._confirms is None:
            await self.confirm_select()
        wait = PublishWait(self.send(messages), len(messages))
        self._waits.append(wait)
        return wait

    async def close(self) -> None:
        """Idempotent. Messages that were not acknowledged go back to their queues.

        It does not wait for ever: a channel at the server may wait for a queue whose node is silent."""
        if self.is_closed:
            return
        self._end(ChannelClosed(f"channel {self.number} was closed by us"))
        await asyncio.wait([self.connection.leave(self.number)], timeout=_CLOSE_S)

    def arrived(self, arrival: Arrival) -> None:
        """For the connection: something came on this channel. Raises Malformed, or what a callback raised."""
        if isinstance(arrival, Deliveries):
            consumer = self._consumers.get(arrival[0].consumer)
            if consumer is None:
                raise Malformed(f"a delivery for {arrival[0].consumer!r}, which is no consumer of the channel")
            consumer.on_messages(arrival)
        elif isinstance(arrival, Answered):
            self._answered(arrival)
        else:
            self._method(arrival)

    def ended(self, why: AmqpError) -> None:
        """For the connection: nothing more will come on this channel."""
        if not self.is_closed:
            self._end(why)

    def _end(self, why: AmqpError) -> None:
        self._calls.end(why)
        self._consumers.clear()
        for wait in self._waits:
            wait.fail(why)
        try:
            self._report(self._confirms.ended(str(why)) if self._confirms else [])
        except Exception as error:
            log.exception("RabbitMQ: the connection is closed because a callback failed")
            self._wire.end(ConnectionLost(f"closed by us because a callback failed: {error!r}"))
        if not self.closing.done():  # a waiter may have cancelled it
            self.closing.set_result(why)

    def _method(self, arrived: ServerMethod) -> None:
        match arrived.method:
            case frames.CANCEL:
                consumer = self._consumers.pop(arrived.arguments[0], None)
                if consumer is not None and consumer.on_cancel is not None:
                    consumer.on_cancel()
            case frames.CANCEL_OK:
                self._consumers.pop(arrived.arguments[0], None)
                self._calls.take(arrived)
            case _:
                self._calls.take(arrived)

    def _answered(self, arrived: Answered) -> None:
        if self._confirms is None:
            raise Malformed(f"an answer to a message on channel {self.number}, which is not in confirm mode")
        answers: list[PublishAnswer] = []
        for each in arrived:
            if isinstance(each, Confirm):
                answers += self._confirms.confirmed(each)
            else:
                answers.append(self._confirms.returned(each))
        self._report(merged(answers))

    def _report(self, answers: list[PublishAnswer]) -> None:
        for wait in self._waits:
            for each in answers:
                wait.take(each)
        if self._waits:
            self._waits = [wait for wait in self._waits if not wait.answered.done()]
        if answers and self.on_answers is not None:
            self.on_answers(answers)
