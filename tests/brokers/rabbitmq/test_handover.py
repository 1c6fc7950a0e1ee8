"""How a partition of an ordered group goes from one member to another, at the moments when receive and the I/O thread
meet."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from onward.brokers.base import Assigned, Message, Revoked
from onward.brokers.rabbitmq.ordered import tenancy
from onward.brokers.rabbitmq.ordered.log_start import LogStart, checked
from onward.clock import now
from onward.event import Partition
from onward.testing.scenario import Member
from tests.brokers.rabbitmq.harness import RabbitHarness, harness
from tests.brokers.rabbitmq.stage import played, until
from tests.brokers.rabbitmq.token_stage import brokers

__all__ = ["harness"]

pytestmark = pytest.mark.servers


class HastyMember:
    """A member whose receive returns ownerships at the very moment of `call`, which is a method of its holdings."""

    def __init__(self, member: Member, call: str, *, before: bool) -> None:
        self.member = member
        self.seen: list[Message] = []
        self.holdings: Any = member.subscription._holdings  # type: ignore[attr-defined]
        self._call: Callable[..., Any] = getattr(self.holdings, call)
        self._before = before
        setattr(self.holdings, call, self._called)

    def _called(self, *args: Any) -> Any:
        if self._before:
            self._collect()
        result = self._call(*args)
        if not self._before:
            self._collect()
        return result

    def _collect(self) -> None:
        self.seen.extend(self.holdings.collect(0, 1, now(), sure=True))

    async def go_on(self) -> None:
        """Handle what was received so far, then receive as members do."""
        seen, self.seen = self.seen, []
        for message in seen:
            await self.member._note(message)
        await self.member.receive()


async def _shared_out(one: HastyMember, two: Member, count: int) -> None:
    """Both receive until each owns its half."""
    while (len(one.member.assigned), len(two.assigned)) != (count // 2, count // 2):
        await one.go_on()
        await two.receive()
        common = set(one.member.assigned) & set(two.assigned)
        assert not common, f"both members own {common}"


def _reported(member: Member) -> tuple[set[Partition], set[Partition]]:
    """The partitions that were assigned, and those that were revoked."""
    assigned = {each.partition for each in member.history if isinstance(each, Assigned)}
    return assigned, {index for each in member.history if isinstance(each, Revoked) for index in each.partitions}


@played
async def test_a_partition_that_is_reported_while_it_is_given_back_is_revoked_first(harness: RabbitHarness) -> None:
    async with brokers(harness, partitions=4) as opened:
        one = await Member.join(await opened(), "orders", "group")
        hasty = HastyMember(one, "withhold", before=True)
        await until(lambda: len(hasty.holdings.held) == 4)
        two = await Member.join(await opened(), "orders", "group")
        async with asyncio.timeout(60):
            await _shared_out(hasty, two, 4)
        assigned, revoked = _reported(one)
        assert assigned - set(one.assigned) == revoked, "a partition was lost without Revoked"
        assert all(not each.unclean for each in two.assigned.values())


@played
async def test_a_partition_that_shall_be_given_back_before_it_is_held_is_never_reported(
    harness: RabbitHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second member joins while the first one still checks the logs."""
    may_end = threading.Event()

    async def slow(*args: Any) -> LogStart:
        start = await checked(*args)
        await asyncio.to_thread(may_end.wait, 60.0)
        return start

    monkeypatch.setattr(tenancy, "checked", slow)
    async with brokers(harness, partitions=4) as opened:
        one = await Member.join(await opened(), "orders", "group")
        hasty = HastyMember(one, "add", before=False)
        seats = one.subscription._members._seats.values()  # type: ignore[attr-defined]
        await until(lambda: all(seat.tenancy is not None for seat in seats))
        two = await Member.join(await opened(), "orders", "group")
        await until(lambda: sum(seat.tenancy is not None and seat.tenancy.is_ending for seat in seats) == 2)
        may_end.set()
        async with asyncio.timeout(60):
            await _shared_out(hasty, two, 4)
        assigned, revoked = _reported(one)
        assert assigned - set(one.assigned) == revoked, "a partition was lost without Revoked"


@played
async def test_the_members_of_a_group_share_its_partitions_while_both_receive(harness: RabbitHarness) -> None:
    """Receive runs in both members all the time, so it meets every step of the I/O threads."""
    async with brokers(harness, partitions=4) as opened:
        members = [await Member.join(await opened(), "orders", "group") for _ in range(2)]

        def common() -> set[Partition]:
            return set(members[0].assigned) & set(members[1].assigned)

        async def receive(member: Member) -> None:
            while any(len(each.assigned) != 2 for each in members):
                await member.receive(wait_s=0.05)

        async with asyncio.timeout(60):
            await asyncio.gather(*map(receive, members))
        assert not common()
