"""Reads the stream of one partition into the holdings."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from onward import clock
from onward.brokers.core.holdings import Chunk
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError, Channel, Connection, Received
from onward.brokers.rabbitmq.connecting import pauses
from onward.brokers.rabbitmq.message import from_stream
from onward.brokers.rabbitmq.ordered.log_anchors import LogVerdict, mark_of
from onward.brokers.rabbitmq.ordered.log_start import checked
from onward.brokers.rabbitmq.ordered.ordered_hold import OrderedHold, OrderedHoldings
from onward.brokers.rabbitmq.ordered.token import Token
from onward.brokers.rabbitmq.registry.topic_objects import cure_of_a_deleted_stream
from onward.brokers.rabbitmq.server_errors import explained, is_missing
from onward.brokers.rabbitmq.stream_reader import EmptyStream, consuming, end_of
from onward.errors import BrokerError
from onward.event import Delivery, Partition

log = logging.getLogger("onward")

_FIRST_PREFETCH = 20  # until the size of the events is known, because a prefetch counts messages
_MOST_PREFETCH = 500
_ROOM_BYTES = 4 << 20  # of messages that may be under way
_SILENT_S = 30.0  # then ask whether the log has more
_AHEAD = 1_000  # events to read ahead in a partition that is paused


def deleted(partition: Partition) -> str:
    """What an operator must do about a partition whose stream is gone."""
    cure = cure_of_a_deleted_stream(partition.topic)
    return f"stream {names.stream(*partition)} does not exist: it was deleted, with its events; {cure}"


def fitting_prefetch(mean_bytes: float) -> int:
    return int(max(_FIRST_PREFETCH, min(_MOST_PREFETCH, _ROOM_BYTES / max(1.0, mean_bytes))))


class PartitionReader:
    """Reads for one ownership. It stops acknowledging while enough was read ahead, so the server stops sending.

    `on_displaced` is called if the log is not the one that was assigned. `trouble`: why nothing is read now."""

    def __init__(
        self,
        hold: OrderedHold,
        holdings: OrderedHoldings,
        stalled: "set[PartitionReader]",
        on_displaced: Callable[[str], None],
    ) -> None:
        """`stalled`: where it enters itself while it waits for room."""
        self.hold = hold
        self.trouble = ""
        self.heard_at = clock.now()  # the last time a message came
        self._holdings = holdings
        self._stalled = stalled
        self._on_displaced = on_displaced
        self._window = ReadWindow()
        self._next = hold.ahead.position
        self._channel: Channel | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def partition(self) -> Partition:
        return self.hold.partition

    @property
    def position(self) -> int:
        """The offset that would be read next."""
        return self._next

    @property
    def is_stalled(self) -> bool:
        return self in self._stalled

    # -- from outside -----------------------------------------------------------------------------------------------

    def start(self, connection: Connection, *, is_empty: bool) -> None:
        """Read in a task of its own, until `close` or the end of the connection."""
        self._task = asyncio.create_task(self._run(connection, is_empty=is_empty))

    def resume(self) -> None:
        """Go on if there is room again."""
        if self.is_stalled and self._has_appetite():
            self._stalled.discard(self)
            self._ack()

    async def close(self) -> None:
        self._stalled.discard(self)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._channel is not None:
            await self._channel.close()

    # -- the task ---------------------------------------------------------------------------------------------------

    async def _run(self, connection: Connection, *, is_empty: bool) -> None:
        try:
            await self._keep_reading(connection, is_empty=is_empty)
        except Exception as error:
            log.exception("RabbitMQ: the reader of %s failed", self.partition)
            self._on_displaced(f"its reader failed: {error!r}")

    async def _keep_reading(self, connection: Connection, *, is_empty: bool) -> None:
        for pause_s in pauses():
            try:
                await self._read(connection, is_empty=is_empty)
            except (AmqpError, BrokerError) as error:
                if connection.is_closed:
                    return
                self._report(error)
            await asyncio.sleep(pause_s)
            is_empty = False
            with contextlib.suppress(AmqpError, BrokerError):
                if not await self._is_same_log(connection):
                    return

    async def _read(self, connection: Connection, *, is_empty: bool) -> None:
        """Until the channel ends. It is opened again when the size of the events is known."""
        while True:
            prefetch = self._window.prefetch
            offset: int | str = "first" if is_empty else self._next
            stream = names.stream(*self.partition)
            self._stalled.discard(self)
            self._window.opens()
            channel = await consuming(connection, stream, offset=offset, on_messages=self._arrived, prefetch=prefetch)
            self._channel, self.trouble = channel, ""
            either: list[asyncio.Future[Any]] = [channel.closing, self._window.resizing]
            while not (await asyncio.wait(either, timeout=_SILENT_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                if await self._is_forgotten(connection):
                    break
            if channel.closing.done():
                raise channel.closing.result()
            await channel.close()
            is_empty = False

    async def _is_forgotten(self, connection: Connection) -> bool:
        """Whether the server sends nothing though the log has more. It may happen if retention removes the segment that
        a slow reader is in."""
        heard_at = self.heard_at
        if self.is_stalled or clock.now() < heard_at + _SILENT_S:
            return False
        try:
            end = await end_of(connection, names.stream(*self.partition))
        except EmptyStream:
            return False
        if end <= self._next or self.heard_at != heard_at or self.is_stalled:
            return False
        log.warning("RabbitMQ: %s: the server has stopped sending events; they are asked for again", self.partition)
        return True

    async def _is_same_log(self, connection: Connection) -> bool:
        """After an interruption: whether the event that was read last is still in the log."""
        last = self.hold.own.trail.last
        if last is None:
            return True
        token = Token(0, 0, "", "", "", max(self._next, last.offset + 1), anchors=(last,))
        found = await checked(connection, names.stream(*self.partition), token)
        if found.verdict is LogVerdict.CUT:
            self._on_displaced(found.note)
            return False
        return True

    def _report(self, error: AmqpError | BrokerError) -> None:
        is_deleted = isinstance(error, AmqpError) and is_missing(error)
        if is_deleted:
            why = deleted(self.partition)
        else:
            why = explained(error, names.stream(*self.partition)) if isinstance(error, AmqpError) else str(error)
        if why != self.trouble:
            self.trouble = why
            level = logging.ERROR if is_deleted else logging.WARNING
            log.log(level, "RabbitMQ: %s cannot be read, trying again: %s", self.partition, why)

    # -- called by the channel --------------------------------------------------------------------------------------

    def _arrived(self, channel: Channel, messages: list[Received]) -> None:
        if channel is not self._channel and self._channel is not None and not self._channel.is_closed:
            return  # of an earlier channel
        self._channel = channel
        self.heard_at = clock.now()
        size = self._stock(messages)
        window = self._window
        if window.arrived(messages[-1].tag, len(messages), size):
            if self._has_appetite():
                self._ack()
            else:
                self._stalled.add(self)

    def _stock(self, messages: list[Received]) -> int:
        """Keep the events for the next receive. Returns the bytes of the messages."""
        hold = self.hold
        partition, epoch, fence, log_id = hold.partition, hold.epoch, hold.fence, hold.log_id
        topic, source, trail = partition.topic, str(partition), hold.own.trail
        deliveries: list[Delivery] = []
        following, size = self._next, 0
        for message in messages:
            offset, event = from_stream(message, topic, source)
            size += len(message.body) + len(message.properties)
            if offset != following and not self._passes(offset, following):
                continue
            following = offset + 1
            trail.add(offset, mark_of(message.properties, message.body))
            if event is not None:
                deliveries.append(Delivery(event, partition, offset, epoch, 1, fence, log_id))
        self._next = following
        if deliveries:
            self._holdings.stock([(hold, Chunk(deliveries, size))])
            self._holdings.bell.ring()
        return size

    def _passes(self, offset: int, following: int) -> bool:
        """Whether an offset that does not follow the last one is read. One offset is missing at the start of each
        segment of the stream; if more are missing, retention has removed events."""
        if offset < following:
            last = self.hold.own.trail.last
            if last is not None and offset <= last.offset:
                self._on_displaced("the log has lost all its events; its offsets start again")
            return False
        if offset > following + 1:
            log.error(
                "RabbitMQ: %s: about %d events were removed by retention before they were read; raise retention_s, or "
                "consume faster",
                *(self.partition, offset - following),
            )
        return True

    def _has_appetite(self) -> bool:
        hold = self.hold
        if not hold.flows:
            return hold.ahead.events < _AHEAD and hold.ahead.bytes < _ROOM_BYTES
        return self._holdings.hungry.is_set()

    def _ack(self) -> None:
        if self._channel is not None and (tag := self._window.acked()):
            self._channel.ack(tag, multiple=True)


class ReadWindow:
    """How many messages may be under way, and which of them are not acknowledged."""

    def __init__(self) -> None:
        self.prefetch = _FIRST_PREFETCH
        self.resizing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tag = 0
        self._unacked = 0
        self._count = 0
        self._bytes = 0

    def opens(self) -> None:
        """A channel is opened with this prefetch."""
        self.resizing = asyncio.get_running_loop().create_future()
        self._tag = self._unacked = self._count = self._bytes = 0

    def arrived(self, tag: int, count: int, size: int) -> bool:
        """Whether to acknowledge now."""
        self._tag = tag
        self._unacked += count
        self._count += count
        self._bytes += size
        if self._count >= self.prefetch:
            fitting = fitting_prefetch(self._bytes / self._count)
            if not self.prefetch / 2 <= fitting <= self.prefetch * 2 and not self.resizing.done():
                self.prefetch = fitting
                self.resizing.set_result(None)
            self._count = self._bytes = 0
        return self._unacked >= max(1, self.prefetch // 4)

    def acked(self) -> int:
        """The tag to acknowledge with all before it; 0: none."""
        tag, self._tag, self._unacked = self._tag, 0, 0
        return tag
