"""The stream of the registry: append entries, and follow what all processes append."""

import asyncio
import contextlib
import functools
import logging
import random
import uuid
from collections.abc import Awaitable, Callable

from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import (
    AmqpError,
    ChannelClosed,
    Connection,
    ConnectionLost,
    Outbound,
    Properties,
    Received,
    encoded_properties,
    properties_of,
)
from onward.brokers.rabbitmq.connecting import reconnecting
from onward.brokers.rabbitmq.registry.registry_fold import Founded, RegistryEntry, RegistryFold, decoded, encoded
from onward.brokers.rabbitmq.server_errors import explained, is_missing, lacks_streams
from onward.brokers.rabbitmq.stream_reader import EmptyStream, end_by_writing, end_of, follow, offset_of
from onward.errors import BrokerError

log = logging.getLogger("onward")

_ANSWER_S = 10.0
_LONGEST_PAUSE_S = 0.5
_WHAT = f"the registry of topics and groups (stream {names.REGISTRY})"
CURE_WHEN_DELETED = (
    "start all applications again, with the same numbers of partitions: they create it, the topics keep their events, "
    "and ordered groups read them again"
)


class RegistryLog:
    """All of it runs in the loop of the I/O thread. `fold` may be read in any thread."""

    def __init__(self, query: Callable[[], Awaitable[Connection]]) -> None:
        self.fold = RegistryFold()
        self.on_change: list[Callable[[], None]] = []  # called when entries have arrived
        self.is_current = False  # what other processes append arrives here within moments
        self._query = query
        self._position = 0  # the next offset to read
        self._appended: dict[str, asyncio.Future[None]] = {}  # our entries that were not read back yet, by message id
        self._arrival = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._catching: asyncio.Task[None] | None = None  # a catch_up that runs
        self._next: asyncio.Task[None] | None = None  # the one after that, for all calls that have come meanwhile

    async def open(self) -> None:
        """Read the stream to its end. Raises BrokerError. A missing stream is created with the first entry, so commands
        that only look create nothing."""
        await self._start(creates=False)
        await self.catch_up()

    async def _start(self, *, creates: bool) -> bool:
        """Follow the stream. Returns whether it exists. Raises BrokerError."""
        if self._follower is None:
            try:
                exists = await reconnecting(self._found if creates else self._exists)
            except AmqpError as error:
                raise BrokerError(explained(error, _WHAT)) from error
            if not exists:
                return False
            if self._follower is None:  # another call may have been faster
                self._follower = asyncio.create_task(self._follow())
        return True

    async def catch_up(self) -> None:
        """Read everything that was appended before this call. Raises BrokerError if that is not possible. Calls at the
        same time share the work."""
        if self._next is None:
            self._next = asyncio.create_task(self._catch_up_after(self._catching))
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._next)

    async def _catch_up_after(self, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        self._catching, self._next = self._next, None
        await self._catch_up()

    async def _catch_up(self) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                if not await self._start(creates=False):
                    return  # no process has created a topic or a group
                read, end = await reconnecting(self._ends)
                if end < read:
                    self._restart(f"it ends at {end}, and we have read it up to {read}")
                while self._position < end:
                    self._arrival.clear()
                    await self._arrival.wait()
        except TimeoutError:
            raise BrokerError(f"{_WHAT} could not be read in {_ANSWER_S:g} s; check the health of RabbitMQ") from None
        except ChannelClosed as error:
            raise BrokerError(
                f"{explained(error, _WHAT)}; {CURE_WHEN_DELETED}" if is_missing(error) else str(error)
            ) from error
        except AmqpError as error:
            raise BrokerError(f"{_WHAT}: {error}") from error

    async def append(self, *entries: RegistryEntry) -> None:
        """Store the entries, and read up to them: then `fold` shows which of them took effect. Raises BrokerError; the
        entries may be stored all the same."""
        await self._start(creates=True)
        ids = [uuid.uuid4().hex for _ in entries]
        self._appended |= {id_: asyncio.get_running_loop().create_future() for id_ in ids}
        blocked: str | None = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                connection = await self._query()
                blocked = connection.blocked
                messages = [_message(*pair) for pair in zip(entries, ids, strict=True)]
                try:
                    await self._publish(connection, messages)
                except ConnectionLost:
                    await self._catch_up()
                    if not all(self._appended[id_].done() for id_ in ids):
                        await self._publish(await self._query(), messages)
                await asyncio.gather(*[self._appended[id_] for id_ in ids])
        except TimeoutError:
            alarm = f": RabbitMQ takes no messages now ({blocked}); free memory or disk there" if blocked else ""
            raise BrokerError(f"{_WHAT}: no answer in {_ANSWER_S:g} s{alarm}") from None
        except AmqpError as error:
            raise BrokerError(explained(error, _WHAT)) from error
        finally:
            for id_ in ids:
                self._appended.pop(id_).cancel()

    async def close(self) -> None:
        for task in (self._follower, self._catching, self._next):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, BrokerError):
                    await task

    async def _ends(self) -> tuple[int, int]:
        """How far we had read, and where the log ended after that. If the end is lower, the server has lost entries. A
        node that lags behind the leader of the stream looks the same, until it has what we write now."""
        read = self._position
        end = await end_of(await self._query(), names.REGISTRY)
        if end < read:
            end = await end_by_writing(await self._query(), names.REGISTRY, functools.partial(_message, Founded()))
        return read, end

    async def _publish(self, connection: Connection, messages: list[Outbound]) -> None:
        channel = await connection.channel()
        try:
            if refused := next(filter(None, await channel.publish(messages)), None):
                raise BrokerError(f"{_WHAT}: an entry was not accepted: {refused}")
        finally:
            await channel.close()

    async def _exists(self) -> bool:
        """Whether the stream exists, and its first message."""
        connection = await self._query()
        channel = await connection.channel()
        try:
            await channel.declare_queue(names.REGISTRY, passive=True)
            await channel.close()
            await end_of(connection, names.REGISTRY)
        except EmptyStream:  # the process that declared it ended before it wrote
            return False
        except ChannelClosed as error:
            if not is_missing(error):
                raise
            await _check_streams(connection)
            return False
        return True

    async def _found(self) -> bool:
        """Only a missing stream is declared, so a user without that permission can use an existing one."""
        if not await self._exists():
            connection = await self._query()
            channel = await connection.channel()
            await channel.declare_queue(names.REGISTRY, arguments=names.LOG_ARGUMENTS)
            await channel.close()
            await self._publish(connection, [_message(Founded(), "")])
        return True

    async def _follow(self) -> None:
        while True:
            try:
                channel = await follow(
                    await self._query(), names.REGISTRY, offset=self._position or "first", on_messages=self._arrived
                )
                try:
                    await self.catch_up()
                    self.is_current = True
                    await asyncio.wait([channel.closing])
                finally:
                    self.is_current = False
                    await channel.close()
            except (AmqpError, BrokerError) as error:
                log.debug("%s: %s", _WHAT, error)
            await asyncio.sleep(random.uniform(0.1, 1.0) * _LONGEST_PAUSE_S)

    def _arrived(self, messages: list[Received]) -> None:
        for message in messages:
            offset = offset_of(message)
            if offset < self._position:
                continue
            self._position = offset + 1
            if (entry := decoded(message.body)) is not None:
                self.fold.apply(entry)
            waiting = self._appended.get(properties_of(message.properties).message_id or "")
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self._arrival.set()
        for report in self.on_change:
            report()

    def _restart(self, why: str) -> None:
        """The server has lost entries, for example after a power cut. Read what is left."""
        log.error("%s has lost its last entries: %s; it is read again", _WHAT, why)
        self.fold = RegistryFold()
        self._position = 0
        if self._follower is not None:
            self._follower.cancel()
        self._follower = asyncio.create_task(self._follow())


async def _check_streams(connection: Connection) -> None:
    """Raises AmqpError if the server has no streams. It refuses a stream that is not durable, so none is created."""
    channel = await connection.channel()
    try:
        await channel.declare_queue(names.REGISTRY, durable=False, arguments=names.LOG_ARGUMENTS)
    except ChannelClosed as error:
        if lacks_streams(error):
            raise
    finally:
        await channel.close()


def _message(entry: RegistryEntry, id_: str) -> Outbound:
    properties = Properties(delivery_mode=2, message_id=id_)
    return Outbound("", names.REGISTRY, encoded_properties(properties), encoded(entry))
