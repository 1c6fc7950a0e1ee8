"""Partitions of a killed member on SQLite: when its replacement has joined, every member takes its share at once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from onward.brokers.base import Assigned, Broker, Subscription, Supervised
from onward.brokers.sqlite import open_broker
from onward.event import Event, Partition, new_id
from onward.settings import Settings

LONG = Settings(partitions=4, lease_s=600.0, takeover_grace_s=600.0)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Broker]:
    broker = open_broker(f"sqlite:///{path}", LONG)
    try:
        yield broker
    finally:
        await broker.close()


async def join(broker: Broker, name: str, *gone: str) -> Subscription:
    return await broker.subscribe(
        ["orders"],
        group="billing",
        member=name,
        ordering="key",
        start="earliest",
        supervised=Supervised(f"slot-of-{name}", name, frozenset(gone)),
    )


async def assigned(members: Sequence[Subscription], count: int) -> dict[Partition, Assigned]:
    """Receive with all members until together they own this many partitions."""
    found: dict[Partition, Assigned] = {}

    async def receive(member: Subscription) -> None:
        while len(found) < count:
            messages = await member.receive(100, 1 << 20, 0.2)
            found.update({each.partition: each for each in messages if isinstance(each, Assigned)})

    async with asyncio.timeout(30):
        await asyncio.gather(*map(receive, members))
    return found


async def start(broker: Broker) -> None:
    """Join with a member that then owns all partitions."""
    await broker.publish([Event(new_id(), "orders", "k", b"1")])
    await assigned([await join(broker, "first")], 4)


def test_members_take_their_shares_without_waiting_for_the_lease_or_the_grace(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as killed, opened(path) as others, opened(path) as broker:
            await start(killed)
            other = await join(others, "other")
            successor = await join(broker, "second", "first")
            found = await assigned([other, successor], 4)
            assert all(each.unclean for each in found.values()), "the events may have run"
            (group,) = await broker.groups("orders")
            assert {member.name for member in group.members} == {"other", "second"}

    asyncio.run(scenario())


def test_a_lease_renewed_before_the_first_receive_needs_no_grace_later(tmp_path: Path) -> None:
    """A renewal between the claim and the first receive once marked the owner as one that waits for a grace."""

    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as killed, opened(path) as broker:
            await broker.publish([Event(new_id(), "orders", "k", b"1")])
            first = await join(killed, "first")
            await first._manager._next_turn()  # type: ignore[attr-defined]
            await assigned([first], 4)
            found = await assigned([await join(broker, "second", "first")], 4)
            assert all(each.unclean for each in found.values()), "the events may have run"

    asyncio.run(scenario())


def test_partitions_of_a_replacement_that_left_before_it_began_need_no_grace(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as killed, opened(path) as broker:
            await start(killed)
            await (await join(broker, "second", "first")).close()
            found = await assigned([await join(broker, "other")], 4)
            assert all(each.unclean for each in found.values())

    asyncio.run(scenario())


def test_partitions_of_a_replacement_that_had_begun_need_the_grace_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "shop.db"
        async with opened(path) as killed, opened(path) as broker:
            await start(killed)
            successor = await join(broker, "second", "first")
            await assigned([successor], 4)
            await successor.close()  # it has not drained
            other = await join(broker, "other")
            (group,) = await broker.groups("orders")
            assert {each.owner for each in group.partitions.values()} == {"other"}
            assert not await other.receive(100, 1 << 20, 0.5)

    asyncio.run(scenario())
