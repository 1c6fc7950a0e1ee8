"""Sends messages of a work group on: to a rung, back to their queue, or to the suspects.

A message is acknowledged only after the server has confirmed its copy. If this process dies in between, the event is
delivered twice. The other order could lose it.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onward import clock
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError, Channel, ChannelClosed, Connection, Outbound
from onward.brokers.rabbitmq.work.work_place import SUSPECTS, WorkPlace

_BURST = 1_000  # messages that are sent before their confirms are awaited
_BURST_BYTES = 4 << 20
_ANSWER_S = 10.0
_CLOSE_S = 1.0
_YOUNG_S = 3.0  # the server may forget a queue that is younger than this when it is killed


class WorkParcel(NamedTuple):
    """A message to send. `tier`: the tier of its queue, or SUSPECTS. `rung_ms`: the rung to wait in; None: no wait."""

    tier: str
    rung_ms: int | None
    properties: bytes
    body: bytes


class RungDeck:
    """The rungs that this process has declared, and when. They outlive a connection."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def has(self, rung: str) -> bool:
        return rung in self._since

    def add(self, rung: str) -> None:
        self._since[rung] = clock.now()

    def forget(self, rung: str) -> None:
        self._since.pop(rung, None)

    def safe_at(self, rung: str) -> float:
        """When what is in this rung surely survives a kill of the server."""
        return self._since.get(rung, 0.0) + _YOUNG_S


class WorkCourier:
    """Runs in the loop of the connection."""

    def __init__(self, connection: Connection, place: WorkPlace, deck: RungDeck) -> None:
        self._connection = connection
        self._place = place
        self._deck = deck
        self._channel: Channel | None = None
        self._lock = asyncio.Lock()

    async def send(self, parcels: Sequence[WorkParcel]) -> list[str | None]:
        """None for each that the server has stored, otherwise why it did not. Raises AmqpError if the connection or the
        channel ended first: then any of them may be stored."""
        async with self._lock:
            answers: list[str | None] = []
            for burst in _bursts(parcels):
                answers += await self._send(burst)
            return answers

    def safe_at(self, parcel: WorkParcel) -> float:
        """When the message that this one replaces can be acknowledged. Later than now only while its rung is new."""
        return 0.0 if parcel.rung_ms is None else self._deck.safe_at(self._place.rung(parcel.tier, parcel.rung_ms))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _send(self, parcels: Sequence[WorkParcel]) -> list[str | None]:
        answers = await self._tried(parcels)
        lost = [at for at, parcel in enumerate(parcels) if answers[at] is not None and parcel.rung_ms is not None]
        if not lost:
            return answers
        again = [parcels[at] for at in lost]
        for rung in {self._target(parcel) for parcel in again}:
            self._deck.forget(rung)  # it may have been deleted: declare it again
        for at, answer in zip(lost, await self._tried(again), strict=True):
            answers[at] = answer
        return answers

    async def _tried(self, parcels: Sequence[WorkParcel]) -> list[str | None]:
        refused: dict[str, str] = {}
        for parcel in self._missing(parcels):
            if (why := await self._declare(parcel)) is not None:
                refused[self._target(parcel)] = why
        chosen = [parcel for parcel in parcels if self._target(parcel) not in refused]
        sent = iter(await self._published([self._outbound(parcel) for parcel in chosen]))
        return [
            refused[target] if (target := self._target(parcel)) in refused else _explained(target, next(sent))
            for parcel in parcels
        ]

    async def _published(self, messages: Sequence[Outbound]) -> Sequence[str | None]:
        """The answers of the server. A damaged queue never answers; then all of these count as not stored, and may be
        sent twice. During an alarm the server does not answer either, but it will."""
        channel = await self._open()
        publishing = asyncio.ensure_future(channel.publish(messages))
        try:
            while not publishing.done():
                await asyncio.wait([publishing], timeout=_ANSWER_S)
                if not publishing.done() and self._connection.blocked is None:
                    return [f"no answer in {_ANSWER_S:g} s"] * len(messages)
            return publishing.result()
        finally:
            if not publishing.done():
                publishing.cancel()
                await asyncio.wait([publishing])
                self._channel = None  # a late answer must not be taken for that of another message
                with contextlib.suppress(TimeoutError, AmqpError):  # a channel with a damaged queue never closes
                    async with asyncio.timeout(_CLOSE_S):
                        await channel.close()

    def _missing(self, parcels: Iterable[WorkParcel]) -> list[WorkParcel]:
        """One parcel for each rung that is not declared yet."""
        rungs = {self._target(parcel): parcel for parcel in parcels if parcel.rung_ms is not None}
        return [parcel for rung, parcel in rungs.items() if not self._deck.has(rung)]

    async def _declare(self, parcel: WorkParcel) -> str | None:
        """Declare a rung. Returns why the server refuses it."""
        assert parcel.rung_ms is not None, "only rungs are declared here"
        rung, queue = self._target(parcel), self._place.queues[parcel.tier]
        channel = await self._open()
        try:
            await channel.declare_queue(rung, arguments=names.rung_arguments(queue, parcel.rung_ms))
        except ChannelClosed as error:
            return f"queue {rung} cannot be declared: {error}; delete it if another program has created it"
        self._deck.add(rung)
        return None

    async def _open(self) -> Channel:
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._connection.channel()
        return self._channel

    def _outbound(self, parcel: WorkParcel) -> Outbound:
        return Outbound("", self._target(parcel), parcel.properties, parcel.body)

    def _target(self, parcel: WorkParcel) -> str:
        if parcel.rung_ms is not None:
            return self._place.rung(parcel.tier, parcel.rung_ms)
        return self._place.suspects if parcel.tier == SUSPECTS else self._place.queues[parcel.tier]


def _bursts(parcels: Sequence[WorkParcel]) -> Iterable[Sequence[WorkParcel]]:
    burst: list[WorkParcel] = []
    size = 0
    for parcel in parcels:
        burst.append(parcel)
        size += len(parcel.body) + len(parcel.properties)
        if len(burst) >= _BURST or size >= _BURST_BYTES:
            yield burst
            burst, size = [], 0
    if burst:
        yield burst


def _explained(queue: str, why: str | None) -> str | None:
    if why is None:
        return None
    return f"queue {queue} did not store a message: {why}; if this lasts, the queue is damaged: delete it"
