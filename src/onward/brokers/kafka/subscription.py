"""Implements the subscription of the broker contract with the membership, the reader and the owner of asides."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import OffsetSpec

from onward.brokers.base import AsideRecord, BrokerLag, Progress
from onward.brokers.core.subscription import SubscriptionShell
from onward.brokers.kafka.aside_owner import AsideOwner
from onward.brokers.kafka.client import explained
from onward.brokers.kafka.closing import close_in_time
from onward.brokers.kafka.hold import KafkaHold, KafkaHoldings, KafkaOwn
from onward.brokers.kafka.log_offsets import offsets
from onward.brokers.kafka.membership import Membership
from onward.brokers.kafka.message import appended
from onward.brokers.kafka.reader import LogReader
from onward.errors import AsideError, BrokerError
from onward.event import Partition

log = logging.getLogger("onward")

T = TypeVar("T")


class KafkaSubscription(SubscriptionShell[KafkaOwn]):
    def __init__(
        self,
        membership: Membership,
        reader: LogReader,
        aside: AsideOwner,
        holdings: KafkaHoldings,
        admin: Any,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(membership, holdings)
        self._membership = membership
        self._reader = reader
        self._aside = aside
        self._admin = admin
        self._timeout_s = timeout_s

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        holds, lost = self._holdings.settleable(progress, aside)
        if self.is_closed:
            return list(lost | dict.fromkeys(each.partition for each in progress))
        refused: dict[Partition, str] = {}
        records = [record for record in aside if record.partition in holds]
        if records:
            fences = {partition: hold.fence for partition, hold in holds.items()}
            refused = await asyncio.to_thread(self._aside.store, records, fences)
        mine = [each for each in progress if each.partition in holds and each.partition not in refused]
        if mine:
            more = await self._answer(self._membership.settle(mine))
            lost |= dict.fromkeys(more)
        if gone:
            kept = [hold for partition, hold in holds.items() if partition not in lost and partition not in refused]
            await asyncio.to_thread(self._aside.remove, gone, kept)
        if refused:
            partition, why = next(iter(refused.items()))
            raise AsideError(
                f"records of {partition} could not be set aside: {why}", partitions=list(refused), lost=list(lost)
            )
        return list(lost)

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        holds = self._holdings.known(partitions)
        if holds and not self.is_closed:
            await self._answer(self._membership.release(holds, drained=drained))

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        holds = self._holdings.announced()
        if not holds:
            return {}
        partitions = [hold.partition for hold in holds]
        try:
            ends = await asyncio.to_thread(offsets, self._admin, partitions, OffsetSpec.latest())
        except KafkaException as error:
            raise explained(error, "reading the ends of partitions") from error
        now = time.time()
        return {hold.partition: _lag(hold, ends[hold.partition], now) for hold in holds}

    async def _leave(self) -> None:
        closing = [close_in_time(each.close) for each in (self._membership, self._reader, self._aside)]
        has_left, *_ = await asyncio.gather(*closing)
        if not has_left:
            log.warning("Kafka: could not leave group %s; its coordinator will expire our session", self._keeper.group)

    async def _answer(self, future: "Future[T]") -> T:
        try:
            async with asyncio.timeout(self._timeout_s + 5.0):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise BrokerError("Kafka: the coordinator of the group does not answer; is the cluster healthy?") from None


def _lag(hold: KafkaHold, end: int, now: float) -> BrokerLag:
    """Events that were read but not received count as undelivered. Markers at the end of the log count as read."""
    ahead = hold.ahead
    first = next((chunk.deliveries[0] for chunk in tuple(ahead.chunks) if not isinstance(chunk, int)), None)
    start = ahead.next_out if first is not None else max(ahead.next_out, ahead.position)
    age_s = max(0.0, now - appended(first.event)) if first is not None else None
    return BrokerLag(max(0, end - start), age_s)
