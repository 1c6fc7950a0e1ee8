"""Follows the stream of an aside from generation to generation, and folds it."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from onward import clock
from onward.brokers.core.bell import resolve
from onward.brokers.core.folded_aside import BodyRoom
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError, Channel, ChannelClosed, Connection, ConnectionLost, Received
from onward.brokers.rabbitmq.aside.aside_entries import AsidePlace, EntryBatch, decoded
from onward.brokers.rabbitmq.aside.aside_fold import AsideFold
from onward.brokers.rabbitmq.names import Place
from onward.brokers.rabbitmq.server_errors import explained, is_missing, lacks_replica
from onward.brokers.rabbitmq.stream_reader import close_soon, follow, offset_of
from onward.errors import BrokerError

log = logging.getLogger("onward")

STALLED_S = 10.0  # nothing was read for so long
_PREFETCH = 100  # messages of up to 64 kB
_NO_REPLICA_S = 2.0  # the server says so for a moment while another connection declares the stream
_PAUSE_S = 0.05
_CANCELLED_S = 0.5  # 3.10 ends the connection of a client that consumes a stream while it is being deleted


class Generations(Protocol):
    """The part of the registry that an aside needs."""

    def generation(self, topic: str, group: str, place: Place) -> int: ...
    def fence_floor(self, topic: str, group: str) -> int: ...
    async def catch_up(self) -> None: ...
    async def set_generation(self, topic: str, group: str, place: Place, generation: int) -> None: ...


class AsideMissing(BrokerError):
    """The stream of the aside does not exist."""


class AsideListener(Protocol):
    def arrived(self, batch: EntryBatch, place: tuple[int, int], *, effective: bool) -> None:
        """A message was applied; `place` is its generation and offset."""

    def moved_on(self, generation: int) -> None:
        """What was written into earlier generations and has not arrived has no effect, or the reader cannot know."""


class AsideSource(NamedTuple):
    """Which aside to read, and how."""

    connection: Connection
    generations: Generations
    place: AsidePlace
    room: BodyRoom
    using: asyncio.Lock  # the server ends a connection that uses a stream while another one declares it
    keeps_rows: bool = True

    def stream(self, generation: int) -> str:
        return names.aside_stream(*self.place, generation)

    def registered(self) -> int:
        return self.generations.generation(*self.place)

    def fold(self) -> AsideFold:
        return AsideFold(self.room, self.registered(), keeps_rows=self.keeps_rows)

    async def declare(self, generation: int) -> None:
        """BrokerError: the server refuses it."""
        channel = await self.connection.channel()
        try:
            await channel.declare_queue(self.stream(generation), arguments=names.LOG_ARGUMENTS)
        except ChannelClosed as error:
            raise BrokerError(f"RabbitMQ: {explained(error, f'stream {self.stream(generation)}')}") from error
        finally:
            await channel.close()

    async def delete(self, generation: int) -> None:
        """A generation that does not exist is no error."""
        if generation < 0:
            return
        channel = await self.connection.channel()
        try:
            await channel.delete_queue(self.stream(generation))
        finally:
            await channel.close()


class AsideReader:
    """Runs until it is closed or has failed. `is_owner`: a deleted stream is declared again."""

    def __init__(self, source: AsideSource, listener: AsideListener) -> None:
        self.source = source
        self.fold = source.fold()
        self.failure: BrokerError | None = None
        self.is_owner = False
        self._listener = listener
        self._waiters: list[asyncio.Future[None]] = []
        self._reading: asyncio.Task[None] | None = None
        self._channel: Channel | None = None

    @property
    def is_started(self) -> bool:
        return self._reading is not None

    async def start(self) -> None:
        """Begin with the registered generation. AsideMissing: there is none."""
        self.fold = self.source.fold()
        self._reading = asyncio.create_task(self._run(self.fold.generation, await self._consuming()))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. BrokerError: reading has failed, or nothing arrives."""
        while not condition():
            if self.failure is not None:
                raise self.failure
            try:
                await asyncio.wait_for(self._news(), STALLED_S)
            except TimeoutError:
                self._doubt()
                raise BrokerError(f"RabbitMQ: {self.source.place}: nothing was read for {STALLED_S:g} s") from None

    async def close(self) -> None:
        cause = ConnectionLost("its connection has ended") if self.source.connection.is_closed else None
        self._fail(BrokerError(f"RabbitMQ: {self.source.place} is closed"), cause)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self.fold.table.clear()

    def _doubt(self) -> None:
        """Replace the consumer. The server may have dropped it without a word, as when a node loses its copy of the
        stream. During an alarm, nothing can have arrived."""
        if self._channel is not None and self.source.connection.blocked is None:
            close_soon(self._channel)

    async def _run(self, generation: int, channel: Channel) -> None:
        """Read one generation after the other. A consumer that has ended is replaced."""
        try:
            while True:
                self._channel = channel
                try:
                    await self._ended(generation, channel)
                finally:
                    await channel.close()
                generation, channel = await self._next(generation)
        except BrokerError as error:
            self._fail(error)
        except AmqpError as error:
            self._fail(BrokerError(f"RabbitMQ: {self.source.place} can no longer be read: {error}"), error)

    async def _ended(self, generation: int, channel: Channel) -> None:
        """Wait for the end of the generation or of the channel."""
        while self.fold.generation == generation and not channel.is_closed:
            ends: list[asyncio.Future[Any]] = [self._news(), channel.closing]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    async def _next(self, last: int) -> tuple[int, Channel]:
        """Go on where the fold is. If that is not possible, begin again with the registered generation."""
        if self.fold.generation != last:
            self._moved_on(self.fold.generation)
        else:
            await asyncio.sleep(_CANCELLED_S)
            if not self.is_owner:
                self._begin_again()  # the stream may be another one of the same name
        try:
            return self.fold.generation, await self._consuming()
        except AsideMissing:
            await self.source.generations.catch_up()
            if self.source.registered() > self.fold.generation:
                self._begin_again()
            else:
                await self._declare_again()
        return self.fold.generation, await self._consuming()

    def _begin_again(self) -> None:
        self.fold.table.clear()
        self.fold = self.source.fold()
        self._moved_on(self.fold.generation + 1)

    async def _declare_again(self) -> None:
        """The current generation was deleted, and not by a rewriting. AsideMissing: it is not for us to create it."""
        fold, stream = self.fold, self.source.stream(self.fold.generation)
        if fold.base is None and not self.is_owner:
            raise AsideMissing(f"RabbitMQ: the stream {stream} was deleted")
        await self.source.declare(fold.generation)
        if fold.base is None:
            lost = fold.begin_again()
            log.error(
                "RabbitMQ: the stream %s was deleted. Its records are written again, but %d were not in memory and are "
                "lost; only Onward may delete such a stream",
                *(stream, lost),
            )
        self._moved_on(fold.generation + 1)

    async def _consuming(self) -> Channel:
        """A channel on which the current generation arrives. AsideMissing: the stream does not exist."""
        generation, end = self.fold.generation, clock.now() + _NO_REPLICA_S
        stream = self.source.stream(generation)

        def take(messages: list[Received]) -> None:
            self._take(generation, messages)

        while True:
            try:
                return await follow(
                    self.source.connection, stream, offset=self.fold.read, on_messages=take, prefetch=_PREFETCH
                )
            except ChannelClosed as error:
                if not lacks_replica(error) or clock.now() > end:
                    kind = AsideMissing if is_missing(error) else BrokerError
                    raise kind(f"RabbitMQ: {explained(error, f'stream {stream}')}") from error
            await asyncio.sleep(_PAUSE_S)

    def _take(self, generation: int, messages: Sequence[Received]) -> None:
        fold = self.fold
        for message in messages:
            if fold.generation != generation:
                break  # the rest has no effect
            offset = offset_of(message)
            try:
                batch = decoded(message.body)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                fold.skip(offset, str(error))
                continue
            effective = fold.apply(batch.entries, offset)
            self._listener.arrived(batch, (generation, offset), effective=effective)
        for offset, why in fold.faults:
            log.warning(
                "RabbitMQ: %s: the entry at offset %d is not a record of Onward and is skipped: %s",
                *(self.source.stream(generation), offset, why),
            )
        fold.faults.clear()
        self._wake()

    def _news(self) -> "asyncio.Future[None]":
        """Done when something was read, or reading has failed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def _moved_on(self, generation: int) -> None:
        self._listener.moved_on(generation)
        self._wake()

    def _fail(self, error: BrokerError, cause: AmqpError | None = None) -> None:
        if self.failure is None:
            self.failure = error
            error.__cause__ = cause or error.__cause__
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            resolve(waiter)
