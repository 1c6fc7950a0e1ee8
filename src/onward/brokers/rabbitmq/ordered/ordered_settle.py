"""One call to settle, over all its partitions: records first, then the tokens, then the removed records."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from onward.brokers.base import AsideRecord, Progress
from onward.brokers.rabbitmq.aside.aside_log import AsideLost
from onward.brokers.rabbitmq.ordered.ordered_hold import OrderedHold
from onward.errors import AsideError
from onward.event import Partition


class SettlesPartitions(Protocol):
    async def settle(self, hold: OrderedHold, progress: Progress) -> bool: ...
    async def store(self, hold: OrderedHold, records: Sequence[AsideRecord]) -> str | None: ...
    async def remove(self, hold: OrderedHold, ids: Sequence[str]) -> None: ...


class OrderedSettle:
    """`holds`: what this member owns. `lost`: the partitions of the call that it does not own."""

    def __init__(
        self, members: SettlesPartitions, holds: Mapping[Partition, OrderedHold], lost: dict[Partition, None]
    ) -> None:
        self._members = members
        self._holds = holds
        self._lost = lost
        self._refused: dict[Partition, str] = {}

    async def run(
        self, progress: Sequence[Progress], aside: Sequence[AsideRecord], gone: Sequence[str]
    ) -> list[Partition]:
        """Returns the lost partitions. Raises as Subscription.settle does."""
        if aside:
            await _all([self._store(hold, records) for hold, records in self._by_hold(aside)])
        await _all([self._settle(each) for each in progress if self._goes_on(each.partition)])
        if gone:
            await _all([self._remove(hold, ids) for hold, ids in self._gone(gone)])
        if self._refused:
            partition, why = next(iter(self._refused.items()))
            raise AsideError(
                f"records of {partition} could not be set aside: {why}",
                partitions=list(self._refused),
                lost=list(self._lost),
            )
        return list(self._lost)

    def _goes_on(self, partition: Partition) -> bool:
        return partition in self._holds and partition not in self._refused and partition not in self._lost

    def _by_hold(self, records: Sequence[AsideRecord]) -> list[tuple[OrderedHold, list[AsideRecord]]]:
        found: dict[Partition, list[AsideRecord]] = {}
        for record in records:
            if record.partition in self._holds:
                found.setdefault(record.partition, []).append(record)
        return [(self._holds[partition], mine) for partition, mine in found.items()]

    def _gone(self, ids: Sequence[str]) -> list[tuple[OrderedHold, list[str]]]:
        """The ids by partition, as far as they belong to one that goes on."""
        by_log = {f"{hold.log_id}:{each.index}": hold for each, hold in self._holds.items() if self._goes_on(each)}
        found: dict[OrderedHold, list[str]] = {}
        for name in ids:
            hold = by_log.get(":".join(name.rsplit(":", 3)[1:3]))
            if hold is not None:
                found.setdefault(hold, []).append(name)
        return list(found.items())

    async def _store(self, hold: OrderedHold, records: Sequence[AsideRecord]) -> None:
        try:
            why = await self._members.store(hold, records)
        except AsideLost:
            self._lost[hold.partition] = None
            return
        if why is not None:
            self._refused[hold.partition] = why

    async def _settle(self, progress: Progress) -> None:
        if not await self._members.settle(self._holds[progress.partition], progress):
            self._lost[progress.partition] = None

    async def _remove(self, hold: OrderedHold, ids: Sequence[str]) -> None:
        try:
            await self._members.remove(hold, ids)
        except AsideLost:
            self._lost[hold.partition] = None


async def _all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all of them to their end, then raise the first error."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
