"""Who is in a group: members report to each other, and any process can ask them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from onward.brokers.rabbitmq import presence
from onward.brokers.rabbitmq.amqp import Connection, Outbound
from onward.brokers.rabbitmq.presence import Presence, PresencePlace, PresenceSelf
from onward.clock import now
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


@played
async def test_nothing_is_left_after_a_drop(harness: RabbitHarness) -> None:
    async with connected(harness) as connection:
        async with present(harness, "one"):
            pass
        channel = await connection.channel()
        await presence.delete(channel, *PLACE)
        await presence.delete(channel, *PLACE)
        assert not [name for name in harness.server.queues(harness.vhost) if "members" in name]
