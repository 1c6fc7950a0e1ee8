"""Helpers for the scenarios of shared partitions: members that hold one, and the records that they store."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from onward.brokers.base import AsideRecord, Broker, State, Tries
from onward.event import Delivery
from onward.testing.aside import GROUP, make_record
from onward.testing.scenario import Kit, Member

DUE_S = 0.8  # how long a retry waits
TRIES = Tries(failed=2, started=2, crashes=1)


async def shared_broker(kit: Kit, *, processes: bool = False) -> Broker:
    broker = await kit.broker()
    if not broker.features.shared:
        pytest.skip("this broker has no shared partitions")
    harness: Any = kit.harness
    if processes and harness.in_process:
        pytest.skip("this broker exists only in the memory of one process")
    return broker


async def with_aside(kit: Kit) -> tuple[Broker, Broker]:
    broker = await shared_broker(kit)
    if not broker.features.aside:
        pytest.skip("this broker cannot browse its records")
    return broker, await kit.broker()


async def joined(kit: Kit, broker: Broker, group: str = GROUP) -> Member:
    """A member that has joined and holds the shared partition."""
    member = await kit.member(broker, group, ordering="none", start="latest")
    await member.until(lambda: bool(member.assigned))
    return member


async def take_exactly(member: Member, count: int) -> list[Delivery]:
    """Receive until it has got this many events, and check that no more follow."""
    await member.take(count)
    await member.quiet()
    assert len(member.deliveries) == count, "delivered twice, or to two members"
    return member.deliveries


async def receive_until(members: Sequence[Member], condition: Callable[[], bool], limit: int = 1_000) -> None:
    deadline = time.monotonic() + 40.0
    while not condition():
        assert time.monotonic() < deadline, [len(member.deliveries) for member in members]
        await asyncio.gather(*(member.receive(limit=limit, wait_s=0.1) for member in members))


async def received(members: Sequence[Member], count: int) -> None:
    """Receive a few events at a time until the members together have got this many."""
    await receive_until(members, lambda: sum(len(member.deliveries) for member in members) >= count, limit=10)


def numbered(member: Member, numbers: Iterable[int]) -> list[Delivery]:
    """The deliveries with these values. Without ordering, events arrive in any order."""
    values = set(numbers)
    return [each for each in member.deliveries if int(each.event.value or b"") in values]


def waiting(delivery: Delivery, due: float, **fields: Any) -> AsideRecord:
    defaults = {"due": due, "wait_s": due - time.time(), "tries": TRIES}
    return make_record(delivery, delivery.log_id, State.WAITING, **(defaults | fields))


def dead(delivery: Delivery) -> AsideRecord:
    return make_record(delivery, delivery.log_id, State.DEAD)


async def set_aside(member: Member, records: Sequence[AsideRecord]) -> None:
    """Store the records and settle their deliveries as done."""
    places = {(record.partition, record.position) for record in records}
    done = [each for each in member.deliveries if (each.partition, each.position) in places]
    assert not await member.subscription.settle(member.progress(done), aside=records)
