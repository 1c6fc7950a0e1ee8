"""A member of a group as the contract has it, over the membership and the reader."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import OffsetSpec

from onward import clock
from onward.brokers.base import AsideRecord, BrokerLag, Message, Progress
from onward.brokers.kafka.client import explained
from onward.brokers.kafka.holdings import Hold, Holdings
from onward.brokers.kafka.membership import Membership
from onward.brokers.kafka.message import appended
from onward.brokers.kafka.origins import offsets
from onward.brokers.kafka.parting import parted
from onward.brokers.kafka.reader import Reader
from onward.brokers.kafka.warden import Warden
from onward.errors import BrokerError, Closed
from onward.event import Partition

log = logging.getLogger("onward")

T = TypeVar("T")


class KafkaSubscription:
    def __init__(
        self,
        membership: Membership,
        reader: Reader,
        warden: Warden,
        holdings: Holdings,
        admin: Any,
        *,
        timeout_s: float,
    ) -> None:
        self._membership = membership
        self._warden = warden
        self._reader = reader
        self._holdings = holdings
        self._admin = admin
        self._timeout_s = timeout_s
        self._closing: asyncio.Future[None] | None = None

    async def receive(self, limit: int, max_bytes: int, wait_s: float) -> Sequence[Message]:
        if self._holdings.closed:
            raise Closed("the subscription is closed")
        loop = asyncio.get_running_loop()
        end = clock.now() + wait_s
        while not self.is_closed:
            self._membership.polled()
            rung = self._holdings.waiter(loop)
            if self._membership.failure is not None:
                raise self._membership.failure
            now = clock.now()
            messages = self._holdings.collect(limit, max_bytes, now)
            if messages or now >= end:
                return messages
            await asyncio.wait([rung], timeout=max(0.0, min(end, self._holdings.ripe_at()) - now))
        return []

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        lost = dict.fromkeys(each.partition for each in progress if self._holdings.current(each) is None)
        holds = {hold.partition: hold for hold in self._holdings.all() if hold.announced and hold.partition not in lost}
        lost |= dict.fromkeys(record.partition for record in aside if record.partition not in holds)
        if self._holdings.closed:
            return list(lost | dict.fromkeys(each.partition for each in progress))
        records = [record for record in aside if record.partition in holds]
        if records:
            fences = {partition: hold.source.fence for partition, hold in holds.items()}
            await asyncio.to_thread(self._warden.store, records, fences)
        mine = [each for each in progress if each.partition in holds]
        if mine:
            more = await self._answer(self._membership.commit(mine))
            lost |= dict.fromkeys(more)
        if gone:
            kept = [hold for partition, hold in holds.items() if partition not in lost]
            await asyncio.to_thread(self._warden.remove, gone, kept)
        return list(lost)

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        holds = self._holdings.known(partitions)
        if holds and not self._holdings.closed:
            await self._answer(self._membership.release(holds, drained=drained))

    def troubles(self) -> Sequence[str]:
        return self._membership.troubles

    def sure_until(self) -> float:
        return self._membership.sure_until()

    async def pause(self, partitions: Sequence[Partition]) -> None:
        self._holdings.set_paused(self._holdings.known(partitions), paused=True)

    async def resume(self, partitions: Sequence[Partition]) -> None:
        self._holdings.set_paused(self._holdings.known(partitions), paused=False)

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        holds = [hold for hold in self._holdings.all() if hold.announced]
        if not holds:
            return {}
        try:
            ends = await asyncio.to_thread(
                offsets, self._admin, [hold.partition for hold in holds], OffsetSpec.latest()
            )
        except KafkaException as error:
            raise explained(error, "asking for the ends of partitions") from error
        now = time.time()
        return {hold.partition: _lag(hold, ends[hold.partition], now) for hold in holds}

    @property
    def is_closed(self) -> bool:
        return self._holdings.closed

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._holdings.closed = True
        self._holdings.nudge()
        parting = [parted(each.close) for each in (self._membership, self._reader, self._warden)]
        told, *_ = await asyncio.gather(*parting)
        if not told:
            log.warning("Kafka: nobody answers, the group was not told that we leave: it finds out by our silence")

    async def _answer(self, future: "Future[T]") -> T:
        try:
            async with asyncio.timeout(self._timeout_s + 5.0):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise BrokerError("Kafka: the group's coordinator does not answer") from None


def _lag(hold: Hold, end: int, now: float) -> BrokerLag:
    """What is read but not handed out counts as undelivered; markers at the end of the log count as read."""
    first = next((part.deliveries[0] for part in tuple(hold.queue) if not isinstance(part, int)), None)
    start = hold.out if first is not None else max(hold.out, hold.position)
    age_s = max(0.0, now - appended(first.event)) if first is not None else None
    return BrokerLag(max(0, end - start), age_s)
