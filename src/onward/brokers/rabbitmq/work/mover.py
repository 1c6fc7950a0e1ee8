"""Replays dead letters of a work group: publishes the event to the group's own queue, and then removes the record.

One member does it. A token queue elects it: the server delivers the queue to one consumer at a time, and gives it to
the next one when that consumer's connection ends. For a moment two members may replay the same record. Then the event
is delivered twice; it is never lost.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from onward.brokers.base import AsideRecord, State
from onward.brokers.core.folded_aside import AsideRow
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import (
    AmqpError,
    Channel,
    Outbound,
    Properties,
    Received,
    encoded_properties,
)
from onward.brokers.rabbitmq.aside.aside import RabbitAsides
from onward.brokers.rabbitmq.aside.aside_entries import AsidePlace
from onward.brokers.rabbitmq.aside.aside_log import AsideStream
from onward.brokers.rabbitmq.connecting import LoggedCauses
from onward.brokers.rabbitmq.message import packed
from onward.brokers.rabbitmq.stream_reader import close_soon
from onward.brokers.rabbitmq.work.retrying import WorkParcel
from onward.brokers.rabbitmq.work.rungs import headers_of, retrying
from onward.brokers.rabbitmq.work.work_message import replayed
from onward.brokers.rabbitmq.work.work_session import WorkSession
from onward.errors import BrokerError, PayloadError
from onward.event import Tries

log = logging.getLogger("onward")

_STEP = 200  # records that are replayed together
_LOOK_S = 5.0
_AGAIN_S = 1.0
_TOKEN = encoded_properties(Properties(delivery_mode=2))


class Mover:
    """Runs in the I/O thread as a part of the session. It holds `lock` from the publish to the removal, so that a
    letter of the same event that this member stores comes after it."""

    def __init__(self, session: WorkSession, asides: RabbitAsides, lock: asyncio.Lock) -> None:
        self._session = session
        self._asides = asides
        self._lock = lock
        self._causes = LoggedCauses()

    async def run(self) -> None:
        """Stand by, and move records while this member is elected. Raises AmqpError if the connection ends."""
        while True:
            elected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            channel = await self._stand(elected)
            await _first(elected, channel.closing)
            if elected.done():
                with contextlib.suppress(BrokerError):
                    await self._move_while(channel)
            await channel.close()
            await asyncio.sleep(_AGAIN_S)

    async def _stand(self, elected: "asyncio.Future[None]") -> Channel:
        """Consume the token queue. The member that gets its message is elected, and keeps it unacknowledged."""
        place = self._session.place
        queue = names.token_queue(place.topic, "work", place.group)
        channel = await self._session.links.sending.channel()
        state = await channel.declare_queue(queue, arguments=names.TOKEN_ARGUMENTS)
        if not state.messages and not state.consumers:
            await channel.publish([Outbound("", queue, _TOKEN, b"")])

        def arrived(messages: list[Received]) -> None:
            for message in messages:
                if elected.done():  # members that joined at the same time have each written one
                    channel.ack(message.tag)
                else:
                    elected.set_result(None)

        await channel.qos(10)
        await channel.consume(queue, arrived, on_cancel=lambda: close_soon(channel))
        return channel

    async def _move_while(self, channel: Channel) -> None:
        place = self._session.place
        stream = self._asides.owned(self._session.links.sending, AsidePlace(place.topic, place.group, "work"))
        moving = asyncio.ensure_future(self._move(stream))
        try:
            await _first(moving, channel.closing)
            if moving.done():
                moving.result()
        except BrokerError as error:
            log.warning("%s: dead letters cannot be replayed: %s; trying again", place, error)
            raise
        finally:
            moving.cancel()
            await asyncio.wait([moving])
            await stream.close()

    async def _move(self, stream: AsideStream) -> None:
        moved = asyncio.Event()
        stream.on_moves = lambda _: moved.set()
        await stream.claim(0)
        compacting: asyncio.Task[None] | None = None
        try:
            while True:
                rows = [row for row in list(stream.table.rows.values()) if row.state is not State.DEAD][:_STEP]
                if rows:
                    await self._replay(stream, rows)
                    continue
                if compacting is None or compacting.done():
                    compacting = asyncio.create_task(self._compact(stream))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await moved.wait()
                moved.clear()
        finally:
            if compacting is not None:
                compacting.cancel()
                await asyncio.wait([compacting])

    async def _compact(self, stream: AsideStream) -> None:
        try:
            await stream.compact_if_long(0)
        except (AmqpError, BrokerError) as error:
            log.warning("%s: its aside cannot be rewritten: %s; trying again", self._session.place, error)

    async def _replay(self, stream: AsideStream, rows: Sequence[AsideRow]) -> None:
        async with self._lock:
            wall = time.time()
            parcels = [(record, self._parcel(record, wall)) for record in await stream.records(rows)]
            sent = [(record, parcel) for record, parcel in parcels if parcel is not None]
            answers = await self._session.courier.send([parcel for _, parcel in sent])
            stored = [record.id for (record, _), why in zip(sent, answers, strict=True) if why is None]
            if stored:
                await stream.remove(stored, 0)
            if unfit := [record for record, parcel in parcels if parcel is None]:
                await stream.store([msgspec.structs.replace(each, state=State.DEAD, due=None) for each in unfit])
        if why := next((each for each in answers if each is not None), None):
            self._causes.report(f"{self._session.place}: a dead letter cannot be replayed: {why}; trying again")
            await asyncio.sleep(_AGAIN_S)
        else:
            self._causes.clear()

    def _parcel(self, record: AsideRecord, wall: float) -> WorkParcel | None:
        """None: its event cannot be a message, so it stays a dead letter."""
        try:
            return self._packed(record, wall)
        except PayloadError as error:
            log.error("%s: dead letter %s cannot be replayed: %s", self._session.place, record.id, error)
            return None

    def _packed(self, record: AsideRecord, wall: float) -> WorkParcel:
        event = record.event
        state = retrying(Tries(), record.due, None, wall, None)
        waits, tier = state.waits_ms(wall) > 0, self._session.place.tier(event.type)
        if (again := replayed(event, state if waits else None)) is not None:
            return WorkParcel(tier, None, *again)
        made = packed(event, headers_of(state) if waits else None)
        return WorkParcel(tier, None, made.properties(int(wall * 1_000)), made.body)


async def _first(*futures: "asyncio.Future[Any]") -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
