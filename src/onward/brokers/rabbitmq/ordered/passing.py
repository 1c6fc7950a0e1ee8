"""Members of temporary groups, such as those of `onward tail`. Each has its group for itself, and nothing of it is
stored: no tokens, no registry entry, and the records are in memory."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from onward import clock
from onward.brokers.base import AsideRecord, Assigned, Progress
from onward.brokers.core.holdings import Hold
from onward.brokers.rabbitmq.amqp import AmqpError, Connection
from onward.brokers.rabbitmq.aside.passing_aside import PassingAside
from onward.brokers.rabbitmq.connecting import pauses
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.ordered.group_start import FirstTokens
from onward.brokers.rabbitmq.ordered.log_anchors import AnchorTrail
from onward.brokers.rabbitmq.ordered.log_reader import PartitionReader
from onward.brokers.rabbitmq.ordered.ordered_hold import OrderedHold, OrderedHoldings, OrderedOwn
from onward.errors import BrokerError, OnwardError
from onward.event import Partition

log = logging.getLogger("onward")

_FENCE = 1


class PassingParts(NamedTuple):
    group: str
    lease_s: float
    holdings: OrderedHoldings
    asides: dict[Partition, PassingAside]
    stalled: set[PartitionReader]
    epochs: Iterator[int]


class PassingMembership:
    """Owns every partition, from the given tokens on."""

    def __init__(self, ground: RabbitGround, parts: PassingParts, tokens: FirstTokens) -> None:
        self.failure: OnwardError | None = None
        self._ground = ground
        self._parts = parts
        self._tokens = tokens
        self._progress: dict[Partition, Progress] = {}
        self._readers: dict[Partition, PartitionReader] = {}
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def group(self) -> str:
        return self._parts.group

    @property
    def sure_until(self) -> float:
        return clock.now() + self._parts.lease_s

    @property
    def troubles(self) -> Sequence[str]:
        found = [f"{reader.partition}: {reader.trouble}" for reader in list(self._readers.values()) if reader.trouble]
        return [*filter(None, [self._trouble]), *found]

    def polled(self) -> None:
        pass

    def kick(self) -> None:
        for reader in tuple(self._parts.stalled):
            reader.resume()

    def reader_of(self, hold: OrderedHold) -> PartitionReader | None:
        reader = self._readers.get(hold.partition)
        return reader if reader is not None and reader.hold is hold else None

    async def settle(self, hold: OrderedHold, progress: Progress) -> bool:
        self._progress[hold.partition] = progress
        return True

    async def store(self, hold: OrderedHold, records: Sequence[AsideRecord]) -> str | None:
        return await self._parts.asides[hold.partition].store(records, _FENCE)

    async def remove(self, hold: OrderedHold, ids: Sequence[str]) -> None:
        await self._parts.asides[hold.partition].remove(ids, _FENCE)

    async def release(self, holds: Collection[OrderedHold], *, drained: bool) -> None:
        self._parts.holdings.drop(list(holds), fenced=False)

    async def leave(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        for pause_s in pauses():
            connection = await self._ground.connect(f"group {self.group}", report=self._unreachable)
            try:
                await self._session(connection)
            except (AmqpError, BrokerError) as error:
                self._trouble = str(error)
                log.warning("RabbitMQ: group %s begins again: %s", self.group, error)
            finally:
                for reader in self._readers.values():
                    await reader.close()
                self._parts.holdings.drop(self._parts.holdings.all(), fenced=True)
                await connection.close()
            await asyncio.sleep(pause_s)

    def _unreachable(self, why: str) -> None:
        self._trouble = why

    async def _session(self, connection: Connection) -> None:
        for partition in self._tokens:
            self._hold(connection, partition)
        self._trouble = ""
        await asyncio.wait([connection.closing])
        raise connection.closing.result()

    def _hold(self, connection: Connection, partition: Partition) -> None:
        token, progress, parts = self._tokens[partition], self._progress.get(partition), self._parts
        assigned = Assigned(partition, next(parts.epochs), _FENCE, token.log_id, progress, unclean=False)
        own = OrderedOwn(AnchorTrail(token.anchors), float("inf"))
        hold = Hold(assigned, own, position=token.watermark if progress is None else progress.watermark)
        reader = PartitionReader(hold, parts.holdings, parts.stalled, lambda _: None)
        self._readers[partition] = reader
        reader.start(connection, is_empty=False)
        parts.holdings.add(hold)
