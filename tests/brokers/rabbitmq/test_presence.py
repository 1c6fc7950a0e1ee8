"""Who is in a group: members report to each other, and any process can ask them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from onward.brokers.rabbitmq import presence
from onward.brokers.rabbitmq.amqp import Channel, ChannelClosed, Connection, Outbound
from onward.brokers.rabbitmq.presence import Presence, PresencePlace, PresenceSelf
from onward.clock import now
from onward.errors import BrokerError
from tests.brokers.rabbitmq.harness import RabbitHarness, harness
from tests.brokers.rabbitmq.stage import played, until
from tests.brokers.rabbitmq.token_stage import connected

__all__ = ["harness"]

pytestmark = pytest.mark.servers

PLACE = PresencePlace("orders", "group")


@asynccontextmanager
async def present(harness: RabbitHarness, name: str, **options: Any) -> AsyncIterator[tuple[Presence, Connection]]:
    gone = options.pop("gone", frozenset())
    me = PresenceSelf(f"owner-{name}", name, options.pop("lease_s", 30.0), gone)
    async with connected(harness) as connection:
        member = Presence(PLACE, me, **options)
        await member.open(connection)
        yield member, connection


@played
async def test_members_know_each_other_and_what_they_hold(harness: RabbitHarness) -> None:
    held = {0: (3, 17)}
    async with present(harness, "one", held=lambda: held) as (one, _), present(harness, "two") as (two, _):
        await until(lambda: one.live() == {"owner-two": "two"} and two.live() == {"owner-one": "one"})
        assert two.notes()["owner-one"].held == {0: (3, 17)}
        held[1] = (4, 0)
        one.announce()
        await until(lambda: two.notes()["owner-one"].held == held)


@played
async def test_a_member_that_leaves_is_known_at_once_and_a_silent_one_after_its_lease(harness: RabbitHarness) -> None:
    async with (
        present(harness, "one") as (one, _),
        present(harness, "two") as (two, _),
        present(harness, "three", lease_s=1.0) as (three, _),
    ):
        await until(lambda: len(one.live()) == 2)
        two.announce(leaving=True)
        await until(lambda: set(one.live()) == {"owner-three"})
        three.close()
        silent = now()
        await until(lambda: not one.live())
        assert now() - silent > 0.5


@played
async def test_the_names_of_gone_members_reach_everybody(harness: RabbitHarness) -> None:
    changes: list[int] = []
    async with (
        present(harness, "one", on_change=lambda: changes.append(1)) as (one, _),
        present(harness, "two", gone=frozenset({"dead"})),
    ):
        await until(lambda: one.gone == {"dead"})
        assert changes
        async with present(harness, "three") as (three, _):
            await until(lambda: three.gone == {"dead"})


@played
async def test_a_member_that_is_known_to_be_gone_counts_no_longer(harness: RabbitHarness) -> None:
    """A supervisor knows that the process has ended before its lease, or the server, says so. If it still counted, its
    successor would be one member too many, and the others would give partitions back."""
    async with (
        present(harness, "other") as (other, _),
        present(harness, "first@127.0.0.1:1#key") as (first, _),
    ):
        await until(lambda: len(other.live()) == 1)
        async with present(harness, "second", gone=frozenset({"first"})) as (second, _):
            await until(lambda: set(other.live()) == {"owner-second"})
            first.announce()  # as if it had been under way
            second.announce()
            await until(lambda: other.notes()["owner-second"].beat > 1)
            assert set(other.live()) == {"owner-second"}
            assert set(second.live()) == {"owner-other"}


@played
async def test_a_member_that_is_forgotten_counts_again_when_it_is_heard(harness: RabbitHarness) -> None:
    async with present(harness, "one") as (one, _), present(harness, "two") as (two, _):
        await until(lambda: one.live())
        one.forget("owner-two")
        assert not one.live()
        two.announce()
        await until(lambda: one.live())


@played
async def test_any_process_can_ask_for_the_members(harness: RabbitHarness) -> None:
    async with connected(harness) as operator:
        assert await presence.asked(operator, *PLACE) == []
        assert await presence.counted(operator, *PLACE) == 0
        async with present(harness, "one", held=lambda: {2: (5, 6)}), present(harness, "two"):
            started = now()
            notes = await presence.asked(operator, *PLACE)
            assert now() - started < presence.ANSWER_S, "it waited although everybody had answered"
            assert {note.member: note.held for note in notes} == {"one": {2: (5, 6)}, "two": {}}
            assert await presence.counted(operator, *PLACE) == 2
        assert await presence.asked(operator, *PLACE) == []


@played
async def test_a_member_that_does_not_answer_delays_the_answer_by_a_bounded_time(harness: RabbitHarness) -> None:
    async with connected(harness) as operator, present(harness, "one"), present(harness, "two") as (two, _):
        two.close()
        notes = await presence.asked(operator, *PLACE, within_s=0.5)
        assert [note.member for note in notes] == ["one"]


@played
async def test_messages_of_other_programs_are_ignored(harness: RabbitHarness) -> None:
    async with present(harness, "one") as (one, connection), present(harness, "two"):
        channel = await connection.channel()
        for body in (b"", b"hello", b"\xff", b"\x81\xa6onward\xa4note"):
            channel.send([Outbound(PLACE.exchange, "", b"\0\0", body, mandatory=False)])
        await until(lambda: one.live() == {"owner-two": "two"})
        assert not connection.is_closed


@asynccontextmanager
async def staying(harness: RabbitHarness, name: str, **options: Any) -> AsyncIterator[tuple[Presence, Connection]]:
    """A member that joins again, with a short lease."""
    async with present(harness, name, lease_s=1.0, **options) as (member, connection):
        work = asyncio.create_task(member.stay(connection))
        try:
            yield member, connection
        finally:
            work.cancel()
            await asyncio.wait([work])


def hear_each_other(one: Presence, two: Presence) -> bool:
    for each in (one, two):
        each.announce()
    return one.live() == {"owner-two": "two"} and two.live() == {"owner-one": "one"}


async def drop_exchange(channel: Channel, _: RabbitHarness) -> None:
    await channel.delete_exchange(PLACE.exchange)


async def drop_roll(channel: Channel, _: RabbitHarness) -> None:
    await channel.delete_queue(PLACE.roll)


async def drop_own_queue(channel: Channel, harness: RabbitHarness) -> None:
    """Of the member whose connection it is. The server lets no other one do that."""
    for name in await asyncio.to_thread(harness.server.queues, harness.vhost):
        if name.startswith(f"{PLACE.exchange}."):
            with suppress(ChannelClosed):
                await (await channel.connection.channel()).delete_queue(name)


async def drop_bindings(channel: Channel, _: RabbitHarness) -> None:
    """As when another member creates the exchange again before this one notices that it was deleted."""
    await channel.delete_exchange(PLACE.exchange)
    await channel.declare_exchange(PLACE.exchange, "fanout")


@pytest.mark.parametrize("drop", [drop_exchange, drop_roll, drop_own_queue, drop_bindings])
@played
async def test_members_join_again_when_something_of_theirs_is_deleted(harness: RabbitHarness, drop: Any) -> None:
    async with (
        staying(harness, "one") as (one, connection),
        staying(harness, "two") as (two, _),
        connected(harness) as operator,
    ):
        await until(lambda: hear_each_other(one, two))
        await drop(await connection.channel(), harness)
        await until(lambda: hear_each_other(one, two) and not one.trouble)
        ends = now() + 2.0  # longer than a lease
        await until(lambda: now() > ends and hear_each_other(one, two))
        assert len(await presence.asked(operator, *PLACE)) == 2
        assert await presence.counted(operator, *PLACE) == 2


async def take_exchange(connection: Connection) -> Channel:
    """Another program has the exchange's name now."""
    channel = await connection.channel()
    await channel.delete_exchange(PLACE.exchange)
    await channel.declare_exchange(PLACE.exchange, "direct")
    return channel


@played
async def test_a_member_that_cannot_join_again_says_why_until_it_can(harness: RabbitHarness) -> None:
    async with staying(harness, "one") as (one, _), connected(harness) as operator:

        def is_in_trouble() -> bool:
            one.announce()
            return "differs" in one.trouble

        channel = await take_exchange(operator)
        await until(is_in_trouble)
        await channel.delete_exchange(PLACE.exchange)
        await until(lambda: not one.trouble)


@played
async def test_a_member_gives_up_to_join_again_when_its_patience_ends(harness: RabbitHarness) -> None:
    async with present(harness, "one", lease_s=0.1) as (one, connection), connected(harness) as operator:
        await take_exchange(operator)
        staying = asyncio.create_task(one.stay(connection, patience_s=0.5))

        def has_ended() -> bool:
            one.announce()
            return staying.done()

        await until(has_ended)
        with pytest.raises(BrokerError, match="differs"):
            await staying


@played
async def test_nothing_is_left_after_a_drop(harness: RabbitHarness) -> None:
    async with connected(harness) as connection:
        async with present(harness, "one"):
            pass
        channel = await connection.channel()
        await presence.delete(channel, *PLACE)
        await presence.delete(channel, *PLACE)
        assert not [name for name in harness.server.queues(harness.vhost) if "members" in name]
