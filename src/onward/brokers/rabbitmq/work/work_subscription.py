"""Implements the subscription of the broker contract for work groups. Each topic is one shared partition."""

import asyncio
from collections.abc import Mapping, Sequence

from onward.brokers.base import AsideRecord, BrokerLag, Progress
from onward.brokers.core.holdings import Chunk
from onward.brokers.core.subscription import SubscriptionShell
from onward.brokers.rabbitmq.amqp import AmqpError
from onward.brokers.rabbitmq.io_thread import IoThread
from onward.brokers.rabbitmq.work.work_member import WorkHold, WorkHoldings, WorkMember, WorkOwnership
from onward.errors import AsideError, BrokerError, OnwardError
from onward.event import Partition


class WorkMembers:
    """The members of one subscription, one for each topic."""

    def __init__(self, group: str, members: Mapping[str, WorkMember]) -> None:
        self.group = group
        self.by_topic = members

    @property
    def sure_until(self) -> float:
        return min(member.sure_until for member in self.by_topic.values())

    @property
    def failure(self) -> OnwardError | None:
        return next((member.failure for member in self.by_topic.values() if member.failure is not None), None)

    @property
    def troubles(self) -> Sequence[str]:
        return [each for member in self.by_topic.values() for each in member.troubles]

    def polled(self) -> None:
        for member in self.by_topic.values():
            member.polled()


class WorkSubscription(SubscriptionShell[WorkOwnership]):
    def __init__(self, members: WorkMembers, holdings: WorkHoldings, io: IoThread, *, timeout_s: float) -> None:
        super().__init__(members, holdings)
        self._members = members
        self._io = io
        self._timeout_s = timeout_s

    @property
    def own_queues(self) -> set[str]:
        """The queues that Onward declares for its members, those of all tiers."""
        places = [member.place for member in self._members.by_topic.values()]
        return {queue for place in places if place.is_own for queue in place.queues.values()}

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        """`gone` is ignored: a retry is a message, and a dead letter is removed only by operators."""
        holds, lost = self._holdings.settleable(progress, aside)
        if self.is_closed:
            return list(lost | dict.fromkeys(each.partition for each in progress))
        named = dict.fromkeys([*(each.partition for each in progress), *(record.partition for record in aside)])
        refused: dict[Partition, str] = {}
        for partition in (each for each in named if each in holds and each not in lost):
            own = [each for each in progress if each.partition == partition]
            records = [each for each in aside if each.partition == partition]
            why = await self._settle(holds[partition], own[0] if own else None, records)
            if self._holdings.held.get(partition) is not holds[partition]:
                lost[partition] = None
            elif why is not None:
                refused[partition] = why
        if refused:
            partition, why = next(iter(refused.items()))
            raise AsideError(
                f"records of {partition} could not be set aside: {why}", partitions=list(refused), lost=list(lost)
            )
        return list(lost)

    async def _settle(self, hold: WorkHold, progress: Progress | None, records: Sequence[AsideRecord]) -> str | None:
        """Why records were refused; None: none was. If the connection ends, the ownership is lost."""
        try:
            async with asyncio.timeout(self._timeout_s):
                refused = await self._io.run(hold.own.settling.settle(progress, records))
        except TimeoutError:
            raise BrokerError(
                f"RabbitMQ did not answer a settle of {hold.partition} within {self._timeout_s:g} s"
            ) from None
        except AmqpError as error:
            self._io.post(hold.own.session.end, str(error))
            raise BrokerError(f"RabbitMQ: the settle of {hold.partition} was interrupted: {error}") from error
        return next(iter(refused.values()), None)

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None:
        for hold in self._holdings.known(partitions):
            await self._io.run(self._members.by_topic[hold.partition.topic].release())

    async def pause(self, partitions: Sequence[Partition]) -> None:
        await super().pause(partitions)
        await self._look(partitions)

    async def resume(self, partitions: Sequence[Partition]) -> None:
        await super().resume(partitions)
        await self._look(partitions)

    async def _look(self, partitions: Sequence[Partition]) -> None:
        for hold in self._holdings.known(partitions):
            self._io.spawn(self._members.by_topic[hold.partition.topic].wake())

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        return {hold.partition: await self._lag(hold) for hold in self._holdings.announced()}

    async def _lag(self, hold: WorkHold) -> BrokerLag:
        try:
            async with asyncio.timeout(self._timeout_s):
                depth = await self._io.run(hold.own.session.depth())
        except (AmqpError, TimeoutError) as error:
            raise BrokerError(
                f"RabbitMQ did not report the depth of the queues of {hold.partition}: {error}"
            ) from error
        return BrokerLag(depth + len(hold.own.work.buffers) + hold.ahead.events, None)

    async def _read(self, limit: int, max_bytes: int) -> None:
        for hold in self._holdings.flowing():
            wanted = limit - hold.ahead.events
            if wanted <= 0 or not len(hold.own.work.buffers):
                continue
            deliveries = hold.own.work.take(wanted, hold.partition, hold.epoch, hold.log_id)
            if deliveries:
                size = sum([delivery.event.size for delivery in deliveries])
                self._holdings.stock([(hold, Chunk(deliveries, size))])

    async def _leave(self) -> None:
        await asyncio.gather(*(self._io.run(member.close()) for member in self._members.by_topic.values()))
