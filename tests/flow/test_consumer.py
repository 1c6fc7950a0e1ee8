"""The loop around the plane, on a broker whose answers each test sets."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from onward import Event, GiveUp, Onward, Retry
from onward.brokers.base import AsideRecord, Assigned, Broker, BrokerLag, Message, Progress, State, Tries
from onward.clock import now
from onward.engines.tasks import TaskEngine
from onward.errors import AsideError, Closed
from onward.event import Delivery, Partition
from onward.flow import settling
from onward.flow.consumer import Consumer
from onward.flow.lag import total
from onward.handler import Handler
from onward.settings import Settings
from onward.testing.failure_shop import until

P = Partition("orders", 0)
Q = Partition("orders", 1)


class ScriptedBroker:
    """Broker, subscription and aside in one. It delivers what a test gives it, and records the calls."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.error: Exception | None = None  # raised by settles that carry records
        self.undelivered: Mapping[Partition, BrokerLag] = {}
        self.settles: list[tuple[Sequence[Progress], Sequence[AsideRecord]]] = []
        self.loads: list[Partition] = []
        self.gate = asyncio.Event()  # settles are answered while it is set
        self.gate.set()
        self.closed = False

    async def subscribe(self, topics: Sequence[str], **_: Any) -> "ScriptedBroker":
        return self

    def aside(self, group: str) -> "ScriptedBroker":
        return self

    async def load(self, partition: Partition, **_: Any) -> Sequence[AsideRecord]:
        self.loads.append(partition)
        return []

    async def receive(self, limit: int, max_bytes: int, wait_s: float) -> Sequence[Message]:
        if self.closed:
            raise Closed("closed")
        try:
            async with asyncio.timeout(wait_s):
                return [await self.messages.get()]
        except TimeoutError:
            return []

    async def settle(
        self, progress: Sequence[Progress], *, aside: Sequence[AsideRecord] = (), gone: Sequence[str] = ()
    ) -> Sequence[Partition]:
        self.settles.append((progress, aside))
        await self.gate.wait()
        if aside and self.error:
            raise self.error
        return []

    async def lag(self) -> Mapping[Partition, BrokerLag]:
        return self.undelivered

    def sure_until(self) -> float:
        return now() + 60

    def troubles(self) -> Sequence[str]:
        return ()

    async def pause(self, partitions: Sequence[Partition]) -> None: ...

    async def resume(self, partitions: Sequence[Partition]) -> None: ...

    async def release(self, partitions: Sequence[Partition], *, drained: bool) -> None: ...

    async def close(self) -> None:
        self.closed = True

    def deliver(self, partition: Partition, epoch: int, position: int, tries: Tries | None = None) -> None:
        event = Event(f"{partition}:{position}", partition.topic, f"k{position}", b"{}")
        self.messages.put_nowait(Delivery(event, partition, position, epoch, tries=tries))


class RecordingInbox:
    """Records the settled partitions."""

    def __init__(self) -> None:
        self.partitions: list[Partition] = []

    def settled(self, group: str, progress: Sequence[Progress]) -> None:
        self.partitions += [each.partition for each in progress]


def declared(function: Any, **options: Any) -> Handler:
    app = Onward("sqlite:///unused.db")
    app.handler("orders", group="billing", **options)(function)
    return app.handlers[0]


@asynccontextmanager
async def consuming(broker: ScriptedBroker, handler: Handler) -> AsyncIterator[Consumer]:
    engine = TaskEngine(handler.call, concurrency=handler.concurrency, timeout_s=None)
    consumer = Consumer(cast("Broker", broker), engine, handler, Settings(), member="m")
    running = asyncio.create_task(consumer.run())
    try:
        yield consumer
    finally:
        consumer.stop()
        await running


async def refuse(event: Event) -> None:
    if event.key != "k0":
        raise GiveUp("never")


def written(broker: ScriptedBroker) -> list[list[Partition]]:
    """For each settle with records: the partitions of its records."""
    return [sorted(record.partition for record in aside) for _, aside in broker.settles if aside]


async def give_up_in_both(broker: ScriptedBroker, consumer: Consumer) -> None:
    """Give up one event of each partition. Both are in one settle, because they wait for the settle before."""
    broker.gate.clear()
    for epoch, partition in enumerate((P, Q), 1):
        broker.messages.put_nowait(Assigned(partition, epoch, epoch, "log", None, False))
        broker.deliver(partition, epoch, 0)
    await until(lambda: len(broker.settles) == 1, "a first settle")
    for epoch, partition in enumerate((P, Q), 1):
        broker.deliver(partition, epoch, 1)
    await until(lambda: consumer.plane.counts.dead == 2, "both events are given up")
    broker.gate.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "ASIDE_RETRY_S", 0.1)


def test_if_records_of_one_partition_are_refused_the_others_are_settled() -> None:
    async def main() -> None:
        broker, inbox = ScriptedBroker(), RecordingInbox()
        handler = msgspec.structs.replace(declared(refuse), inbox=cast("Any", inbox))
        broker.error = AsideError("no room", partitions=[P])
        async with consuming(broker, handler) as consumer:
            await give_up_in_both(broker, consumer)
            await until(lambda: consumer.troubles == ["no room"], "the refusal is reported")
            assert Q in inbox.partitions
            await until(lambda: written(broker).count([P]) >= 2, "the refused record is tried again")
            broker.error = None
            await until(lambda: not consumer.plane.open and not consumer.troubles, "everything is stored")
        of_q = [aside for aside in written(broker) if Q in aside]
        assert len(of_q) == 1, "a stored record was stored again"
        assert (broker.settles[-1][0][-1].watermark, P in inbox.partitions) == (2, True)
        assert written(broker)[0] == [P, Q]

    asyncio.run(main())


def test_a_partition_that_is_lost_when_another_is_refused_is_forgotten() -> None:
    async def main() -> None:
        broker = ScriptedBroker()
        async with consuming(broker, declared(refuse)) as consumer:
            broker.error = AsideError("no room", partitions=[P], lost=[Q])
            await give_up_in_both(broker, consumer)
            await until(lambda: consumer.plane.held == [P], "only P is held")
            broker.error = None
            await until(lambda: not consumer.plane.open, "everything is stored")
        assert written(broker)[0] == [P, Q]
        assert Q not in written(broker)[-1]

    asyncio.run(main())


def test_the_lag_combines_undelivered_and_open_events() -> None:
    async def main() -> None:
        broker, go = ScriptedBroker(), asyncio.Event()
        broker.undelivered = {P: BrokerLag(7, 30.0)}

        async def slow(event: Event) -> None:
            if event.key == "k0":
                await go.wait()

        async with consuming(broker, declared(slow)) as consumer:
            for epoch, partition in enumerate((P, Q), 1):
                broker.messages.put_nowait(Assigned(partition, epoch, epoch, "log", None, False))
            for position in (0, 1_000_000, 2_000_000):
                broker.deliver(P, 1, position)
            await until(lambda: consumer.plane.counts.done == 2, "two events are done")
            lags = consumer.lags()
            assert (lags[P].local.open, lags[P].local.gap, lags[P].broker.undelivered, lags[P].events) == (1, 2, 7, 10)
            assert (lags[Q].local.open, lags[Q].broker.undelivered, lags[Q].events) == (0, None, None)
            blocking = lags[P].local.blocking
            assert blocking is not None
            assert (blocking.position, blocking.key, blocking.state) == (0, "k0", "running")
            await until(
                lambda: (each := consumer.lags()[P].local.blocking) is not None and each.for_s > 0.05,
                "the partition is blocked",
            )
            behind = total(consumer.lags().values(), time.time())
            assert (behind.undelivered, behind.undelivered_oldest_s, behind.open, behind.gap) == (7, 30.0, 1, 2)
            go.set()
            await until(lambda: consumer.plane.counts.done == 3, "all are done")
            assert consumer.lags()[P].local.blocking is None

    asyncio.run(main())


def test_in_a_shared_partition_a_retry_goes_to_the_broker_with_its_tries() -> None:
    async def main() -> None:
        broker = ScriptedBroker()

        async def flaky(event: Event) -> None:
            raise ValueError("not yet")

        handler = declared(flaky, ordering="none", retry=Retry(attempts=5, immediate=4))
        async with consuming(broker, handler) as consumer:
            broker.messages.put_nowait(Assigned(P, 1, None, "channel", None, False, shared=True))
            broker.deliver(P, 1, 1, Tries(2))
            await until(lambda: bool(written(broker)), "a record is stored")
            _, (record,) = next(each for each in broker.settles if each[1])
            assert (record.state, record.position, record.tries) == (State.WAITING, 1, Tries(3))
            await until(lambda: not consumer.plane.open, "nothing is open")
        assert broker.loads == []
        assert [position for progress, _ in broker.settles for each in progress for position in each.fresh] == [1]

    asyncio.run(main())
