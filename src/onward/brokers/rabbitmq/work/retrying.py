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
_DAMAGED_S = 30.0  # a rung that refused a message is not used for so long
_NO_ROUTE = ": 312 "  # the code with which the server returns a message for a queue that does not exist


class WorkParcel(NamedTuple):
    """A message to send. `tier`: the tier of its queue, or SUSPECTS. `rung_ms`: the rung to wait in; None: no wait."""

    tier: str
    rung_ms: int | None
    properties: bytes
    body: bytes


class RungDeck:
    """The rungs that this process has declared. They outlive a connection."""

    def __init__(self) -> None:
        self._ready_at: dict[str, float] = {}
        self._refusals: dict[str, tuple[float, str]] = {}  # until when a rung is not used, and why

    @property
    def trouble(self) -> str:
        """Why a rung is not used, empty if all are. Any thread may ask."""
        now = clock.now()
        return next((why for until, why in self._refusals.copy().values() if now < until), "")

    def has(self, rung: str) -> bool:
        return rung in self._ready_at

    def is_ready(self, rung: str) -> bool:
        """Whether what is in this rung survives a kill of the server."""
        return clock.now() >= self._ready_at.get(rung, float("inf"))

    def declared(self, rung: str) -> None:
        self._ready_at[rung] = clock.now() + _YOUNG_S

    def stored(self, rung: str) -> None:
        self._refusals.pop(rung, None)

    def refused(self, rung: str, why: str) -> None:
        """Leave it alone for a while."""
        self._ready_at[rung] = clock.now() + _DAMAGED_S
        self._refusals[rung] = self._ready_at[rung], why

    def missing(self, rung: str, why: str) -> None:
        """It does not exist any more."""
        self._ready_at.pop(rung, None)
        self._refusals[rung] = clock.now() + _YOUNG_S, why


class WorkCourier:
    """Runs in the loop of the connection."""

    def __init__(self, connection: Connection, place: WorkPlace, deck: RungDeck) -> None:
        self._connection = connection
        self._place = place
        self._deck = deck
        self._channel: Channel | None = None
        self._lock = asyncio.Lock()

    @property
    def is_blocked(self) -> bool:
        """The server has an alarm and stores nothing."""
        return self._connection.blocked is not None

    @property
    def trouble(self) -> str:
        return self._deck.trouble

    def is_ready(self, tier: str, rung_ms: int) -> bool:
        """Whether messages can be sent to this rung. Otherwise declare it; that takes a few seconds."""
        return self._deck.is_ready(self._place.rung(tier, rung_ms))

    async def declare(self, tier: str, rung_ms: int) -> None:
        """Raises AmqpError if the connection has ended."""
        rung = self._place.rung(tier, rung_ms)
        async with self._lock:
            if self._deck.has(rung):
                return
            channel = await self._open()
            try:
                await channel.declare_queue(rung, arguments=names.rung_arguments(self._place.queues[tier], rung_ms))
            except ChannelClosed as error:
                why = f"queue {rung} cannot be declared: {error}; delete it if another program has created it"
                self._deck.refused(rung, why)
            else:
                self._deck.declared(rung)

    async def send(self, parcels: Sequence[WorkParcel]) -> list[str | None]:
        """None for each that the server has stored, otherwise why it did not. Raises AmqpError if the connection or the
        channel ended first: then any of them may be stored."""
        async with self._lock:
            answers: list[str | None] = []
            for burst in _bursts(parcels):
                answers += await self._send(burst)
            return answers

    async def _send(self, parcels: Sequence[WorkParcel]) -> list[str | None]:
        answers = await self._published([self._outbound(parcel) for parcel in parcels])
        found = [_explained(self._target(parcel), why) for parcel, why in zip(parcels, answers, strict=True)]
        for parcel, why in zip(parcels, found, strict=True):
            if parcel.rung_ms is None:
                continue
            rung = self._target(parcel)
            if why is None:
                self._deck.stored(rung)
            elif _NO_ROUTE in why:
                self._deck.missing(rung, why)
            else:
                self._deck.refused(rung, why)
        return found

    async def _published(self, messages: Sequence[Outbound]) -> Sequence[str | None]:
        """The answers of the server. A damaged queue never answers; what has no answer counts as not stored, and may be
        sent twice. During an alarm the server does not answer either, but it will."""
        channel = await self._open()
        wait = await channel.publishing(messages)
        try:
            while not wait.answered.done():
                await asyncio.wait([wait.answered], timeout=_ANSWER_S)
                if not wait.answered.done() and not self.is_blocked:
                    return wait.reasons
            wait.answered.result()
            return wait.reasons
        finally:
            if not wait.answered.done():
                wait.answered.cancel()
                self._channel = None  # a late answer must not be taken for that of another message
                with contextlib.suppress(TimeoutError, AmqpError):  # a channel with a damaged queue never closes
                    async with asyncio.timeout(_CLOSE_S):
                        await channel.close()

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
