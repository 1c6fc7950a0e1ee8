"""Members of ordered groups at a real server: missing tokens, cut logs, lost connections, dropped groups."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from onward.brokers.base import AsideRecord, Assigned, Fenced, Supervised
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import Outbound
from onward.brokers.rabbitmq.aside import aside_entries
from onward.brokers.rabbitmq.ordered import group_start
from onward.brokers.rabbitmq.ordered.membership import OrderedMembership, SeatDesk
from onward.brokers.rabbitmq.ordered.seat import TokenSeat
from onward.brokers.rabbitmq.ordered.seat_trouble import SeatTrouble
from onward.brokers.rabbitmq.ordered.token import Anchor, Awaited, Token
from onward.brokers.rabbitmq.ordered.token_search import TokenSearch
from onward.clock import now
from onward.errors import BrokerError, GroupDropped
from onward.event import Partition
from onward.testing.scenario import Member
from onward.testing.shared_members import dead, set_aside
from tests.brokers.rabbitmq.harness import RabbitHarness, harness
from tests.brokers.rabbitmq.stage import played
from tests.brokers.rabbitmq.token_stage import (
    LEASE_S,
    PERSISTENT,
    brokers,
    connected,
    emptied,
    event,
    joined,
    peeked,
    write,
)

__all__ = ["harness"]

pytestmark = pytest.mark.servers

QUEUE = names.token_queue("orders", 0, "group")


async def taken(broker: Any, count: int) -> Member:
    """A member of a new group that has got this many events and settled all but the last two."""
    await broker.publish([event("orders", n) for n in range(count)])
    member = await joined(broker)
    await member.take(count)
    await member.settle(member.deliveries[: count - 2])
    return member


# -- the token --------------------------------------------------------------------------------------------------------


@played
async def test_an_owner_names_itself_and_a_drained_release_names_nobody(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        member = await taken(await opened(), 5)
        await member.subscription.close()
        ended = await peeked(connection)
        assert ended is not None
        assert ended.awaits is not None
        assert ended.awaits.lease_s == 0.0, "a member that closed is still waited for"
        member = await joined(await opened())
        assert member.assigned[next(iter(member.assigned))].unclean
        await member.release(list(member.assigned), drained=True)
        await member.subscription.close()
        clean = await peeked(connection)
        assert clean is not None
        assert clean.is_clean
        assert clean.fence == ended.fence + 1
        assert clean.watermark == ended.watermark


@played
async def test_a_new_owner_waits_for_the_lease_in_the_token_not_for_its_own(harness: RabbitHarness) -> None:
    """The last owner had a longer lease. It may still start events."""
    async with brokers(harness) as opened, connected(harness) as connection:
        member = await taken(await opened(), 5)
        await member.release(list(member.assigned), drained=True)
        await member.subscription.close()
        newest = await peeked(connection)
        assert newest is not None
        await write(connection, _by(newest, Awaited("x:1", "x", 5.0)))
        started = now()
        await joined(await opened())
        assert now() - started > 5.0


@played
async def test_nobody_waits_for_a_member_that_is_gone(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        member = await taken(await opened(), 5)
        await member.release(list(member.assigned), drained=True)
        await member.subscription.close()
        newest = await peeked(connection)
        assert newest is not None
        await write(connection, _by(newest, Awaited("x:1", "x", 60.0)))
        again = await joined(await opened(), supervised=Supervised("slot", "y", frozenset({"x"})))
        assert next(iter(again.assigned.values())).unclean


@played
async def test_a_token_with_an_impossible_lease_is_a_trouble_and_its_wait_is_bounded(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        member = await taken(await opened(), 5)
        await member.release(list(member.assigned), drained=True)
        await member.subscription.close()
        newest = await peeked(connection)
        assert newest is not None
        await write(connection, _by(newest, Awaited("x:1", "x", 1e9)))
        again = await Member.join(await opened(), "orders", "group")
        await again.until(lambda: "lease of 1e+09 s" in "".join(again.subscription.troubles()))
        assert "waits up to 3,636 s" in "".join(again.subscription.troubles())


@pytest.mark.parametrize("part", [(TokenSearch, "real"), (OrderedMembership, "_session")])
@played
async def test_an_unexpected_error_is_a_trouble_and_is_tried_again(
    harness: RabbitHarness, part: tuple[type, str]
) -> None:
    broken = True
    method = getattr(*part)

    async def failing(*args: Any) -> Any:
        if broken:
            raise KeyError("surprise")
        return await method(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*part, failing)
        async with brokers(harness) as opened:
            broker = await opened()
            await broker.publish([event("orders", 0)])
            member = await Member.join(broker, "orders", "group")
            await member.until(lambda: "KeyError('surprise')" in "".join(member.subscription.troubles()))
            broken = False
            await member.hold(1)
            await member.take(1)
            assert not member.subscription.troubles()


@played
async def test_a_token_of_a_later_version_is_a_trouble_that_names_its_queue(
    harness: RabbitHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        broker = await opened()
        await (await joined(broker)).subscription.close()
        channel = await connection.channel()
        await channel.confirm_select()
        later = msgspec.msgpack.encode({"onward": "later"})
        assert await channel.publish([Outbound("", QUEUE, PERSISTENT, later)]) == [None]
        member = await Member.join(broker, "orders", "group")
        await member.until(lambda: f"queue {QUEUE} has a token of a later version" in _troubles(member))
        assert "Upgrade this member" in _troubles(member)
        assert "Upgrade this member" in caplog.text
        harness.server.delete_queue(harness.vhost, QUEUE)
        await member.hold(1)


@played
async def test_a_partition_whose_token_queue_another_program_consumes_is_a_trouble(
    harness: RabbitHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        broker = await opened()
        await (await joined(broker)).subscription.close()
        channel = await connection.channel()
        await channel.consume(QUEUE, lambda messages: None)
        member = await Member.join(broker, "orders", "group")
        await member.until(lambda: "list_consumers" in _troubles(member))
        assert f"stands by at queue {QUEUE}" in _troubles(member)
        await channel.close()
        await member.hold(1)
        await member.until(lambda: not member.subscription.troubles())
        assert caplog.text.count("list_consumers") == 1


@pytest.mark.parametrize(
    ("is_claimed", "is_busy", "standing", "is_sure", "is_trouble"),
    [
        (False, False, None, True, True),
        (False, True, None, True, True),  # it tries, and does not become the owner
        (False, True, (1, 0), True, False),  # the owner, or the next one, which waits for the last one
        (True, False, None, True, False),
        (False, False, None, False, False),
    ],
)
def test_a_partition_without_an_owner_for_several_leases_is_a_trouble(
    is_claimed: bool, is_busy: bool, standing: tuple[int, int] | None, is_sure: bool, is_trouble: bool
) -> None:
    office: Any = SimpleNamespace(is_claimed_elsewhere=lambda partition: is_claimed)
    parts: Any = SimpleNamespace(group="group", settings=SimpleNamespace(lease_s=LEASE_S))
    seat = TokenSeat(Partition("orders", 0), office, parts)
    seat._is_taking = is_busy
    tenancy: Any = SimpleNamespace(standing=standing)
    seat.tenancy = tenancy
    seat.look(0.0, is_sure=is_sure)
    seat.look(2 * LEASE_S, is_sure=is_sure)
    assert not seat.trouble.why
    seat.look(4 * LEASE_S, is_sure=is_sure)
    assert bool(seat.trouble.why) is is_trouble


def test_a_partition_whose_fault_is_known_is_not_reported_twice(caplog: pytest.LogCaptureFixture) -> None:
    trouble = SeatTrouble(Partition("orders", 0), "group", LEASE_S)
    trouble.vacant(0.0, QUEUE)
    trouble.fault("it is broken")
    trouble.vacant(4 * LEASE_S, QUEUE)
    assert len(caplog.records) == 1
    trouble.clear()
    trouble.vacant(5 * LEASE_S, QUEUE)
    assert "list_consumers" in trouble.why
    trouble.occupied()
    assert not trouble.why


def _troubles(member: Member) -> str:
    return "".join(member.subscription.troubles())


@played
async def test_what_failed_is_no_trouble_once_another_member_has_the_partition(harness: RabbitHarness) -> None:
    failing: list[TokenSearch] = []
    real = TokenSearch.real

    async def first_fails(search: TokenSearch, *args: Any) -> Any:
        if not failing:
            failing.append(search)
        if search is failing[0]:
            raise KeyError("surprise")
        return await real(search, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenSearch, "real", first_fails)
        async with brokers(harness) as opened:
            one = await Member.join(await opened(), "orders", "group")
            await one.until(lambda: "KeyError('surprise')" in "".join(one.subscription.troubles()))
            two = await joined(await opened())
            await one.until(lambda: not one.subscription.troubles())
            assert not two.subscription.troubles()


def _by(token: Token, awaits: Awaited) -> Token:
    return msgspec.structs.replace(token, fence=token.fence + 1, tenure="x:1", awaits=awaits)


@played
async def test_a_higher_token_of_another_member_fences_the_owner(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        member = await taken(await opened(), 5)
        first = next(iter(member.assigned.values()))
        other = Token(50, 0, "x:1", first.log_id, first.log_id, 2, awaits=Awaited("x:1", "x", 1.0))
        await write(connection, other)
        await member.until(lambda: any(isinstance(each, Fenced) for each in member.history))
        await member.hold(1)
        again = next(iter(member.assigned.values()))
        assert again.fence is not None
        assert again.fence > 50
        assert again.unclean


@played
async def test_a_late_lower_token_does_not_disturb_the_owner(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        member = await taken(await opened(), 5)
        for number in range(60):
            await write(connection, Token(0, number, "x:1", "t", "t", 99))
        assert not await member.settle()
        await member.quiet(LEASE_S)
        assert not [each for each in member.history if isinstance(each, Fenced)]


# -- a missing token --------------------------------------------------------------------------------------------------


@played
async def test_a_token_queue_that_is_deleted_while_it_is_consumed_costs_repeats_and_no_event(
    harness: RabbitHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async with brokers(harness) as opened:
        broker = await opened()
        member = await taken(broker, 6)
        fence = next(iter(member.assigned.values())).fence or 0
        harness.server.delete_queue(harness.vhost, QUEUE)
        await member.until(lambda: any(isinstance(each, Fenced) for each in member.history))
        await broker.publish([event("orders", n) for n in (6, 7)])
        missed = now()
        await member.until(lambda: "token is not in its queue" in "".join(member.subscription.troubles()))
        await member.hold(1)
        assert now() - missed > 2 * LEASE_S, "the token was not looked for"
        assert caplog.text.count("token is not in its queue") == 1, "the same problem is logged more than once"
        again = next(iter(member.assigned.values()))
        assert again.unclean
        assert (again.fence or 0) > fence
        await member.until(lambda: {4, 5, 6, 7} <= set(member.values[6:]))
        assert not member.subscription.troubles()


@played
async def test_a_token_that_is_gone_when_a_member_starts_is_replaced_by_the_last_note(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        broker = await opened()
        member = await taken(broker, 6)
        await member.release(list(member.assigned), drained=True)
        await member.subscription.close()
        assert await emptied(connection) == 1
        again = await joined(broker)
        assigned = next(iter(again.assigned.values()))
        assert assigned.unclean or assigned.stored is not None
        await again.until(lambda: {4, 5} <= set(again.values))


@played
async def test_an_older_token_does_not_count_if_an_owner_has_noted_a_higher_fence(harness: RabbitHarness) -> None:
    """The real token was deleted, and a late one of a former owner is left."""
    async with brokers(harness) as opened, connected(harness) as connection:
        broker = await opened()
        fences = []
        for _ in range(3):
            member = await joined(broker)
            fences.append(next(iter(member.assigned.values())).fence or 0)
            await member.subscription.close()
        newest = await peeked(connection)
        assert newest is not None
        await emptied(connection)
        await write(connection, msgspec.structs.replace(newest, fence=1, number=900, awaits=None))
        member = await joined(broker)
        assert (next(iter(member.assigned.values())).fence or 0) > max(fences)


@played
async def test_a_group_whose_first_token_is_gone_starts_where_it_should(harness: RabbitHarness) -> None:
    """No owner was ever there, so nobody has to be waited for."""
    async with brokers(harness) as opened, connected(harness) as connection:
        broker = await opened()
        await broker.publish([event("orders", n) for n in range(3)])
        member = await Member.join(broker, "orders", "group")
        await member.subscription.close()  # it may have claimed or not
        await broker.drop_group("orders", "group")
        await _created(broker, connection)
        again = await joined(broker)
        await again.take(3)
        assert again.values == [0, 1, 2]


@pytest.mark.parametrize("fence", [(1 << 62) - 1, 1 << 62, (1 << 64) - 1])
@played
async def test_a_forged_fence_in_the_aside_stops_no_partition(harness: RabbitHarness, fence: int) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        broker = await opened()
        member = await taken(broker, 4)
        await member.subscription.close()
        channel = await connection.channel()
        await channel.confirm_select()
        stream = names.aside_stream("orders", "group", 0, 0)
        forged = aside_entries.encoded("evil", 0, [aside_entries.fence_entry(fence)])
        assert await channel.publish([Outbound("", stream, PERSISTENT, forged)]) == [None]
        for n in (4, 5):  # two owners, one after the other
            await broker.publish([event("orders", n)])
            await _owned_once(broker, n)


async def _owned_once(broker: Any, n: int) -> None:
    member = await joined(broker)
    await member.until(lambda: n in member.values)
    await member.subscription.close()


@played
async def test_an_aside_whose_name_another_program_took_for_a_while_is_created_again(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        broker = await opened()
        await broker.publish([event("orders", n) for n in range(3)])
        member = await joined(broker)
        await member.take(3)
        await set_aside(member, [dead(member.deliveries[0])])
        stream = names.aside_stream("orders", "group", 0, 0)
        harness.server.delete_queue(harness.vhost, stream)
        channel = await connection.channel()
        await channel.declare_queue(stream)
        second = dead(member.deliveries[1])
        with pytest.raises(BrokerError, match="is no stream"):
            await _stored_again(member, second)
        await member.until(lambda: "another program uses this name: delete it" in _troubles(member))
        await channel.delete_queue(stream)
        await member.hold(1)
        await member.until(lambda: len(member.deliveries) >= 5)
        await set_aside(member, [dead(member.deliveries[-1])])
        assert not member.subscription.troubles()


async def _stored_again(member: Member, record: AsideRecord) -> None:
    while True:
        await member.subscription.settle([], aside=[record])
        await member.receive(wait_s=0.1)


async def _created(broker: Any, connection: Any) -> None:
    """A group that another process has created, without its first token."""
    ground = broker._ground

    async def create() -> None:
        channel = await connection.channel()
        await channel.declare_queue(QUEUE, arguments=names.TOKEN_ARGUMENTS)
        await channel.close()

    await create()
    await ground.io.run(ground.registry.add_group("orders", "group", "ordered"))


@pytest.mark.parametrize(
    ("others", "is_claimed", "may"),
    [({}, False, True), ({"c": ""}, False, True), ({"a": "", "c": ""}, False, False), ({}, True, False)],
)
def test_one_member_replaces_a_silent_token_queue_and_only_if_nobody_has_the_partition(
    others: dict[str, str], is_claimed: bool, may: bool
) -> None:
    share = SimpleNamespace(
        presence=SimpleNamespace(owner="b", live=lambda: others), is_claimed=lambda index: is_claimed
    )
    desk: Any = SeatDesk(SimpleNamespace(share_of=lambda partition: share))  # type: ignore[arg-type]
    assert desk.may_replace(Partition("orders", 0)) is may


# -- the exchange of the members --------------------------------------------------------------------------------------


@played
async def test_partitions_are_shared_again_after_the_exchange_of_the_members_was_deleted(
    harness: RabbitHarness,
) -> None:
    async with brokers(harness, partitions=4) as opened, connected(harness) as connection:
        one = await (await Member.join(await opened(), "orders", "group")).hold(4)
        channel = await connection.channel()
        await channel.delete_exchange(names.members_exchange("orders", "group"))
        two = await Member.join(await opened(), "orders", "group")
        while not len(one.assigned) == len(two.assigned) == 2:
            await asyncio.gather(one.receive(), two.receive())
        while one.subscription.troubles():
            await one.receive()


@played
async def test_a_member_whose_exchange_belongs_to_another_program_is_not_ready(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        member = await joined(await opened())
        channel = await connection.channel()
        exchange = names.members_exchange("orders", "group")
        await channel.delete_exchange(exchange)
        await channel.declare_exchange(exchange, "direct")
        await member.until(lambda: exchange in "".join(member.subscription.troubles()))
        await channel.delete_exchange(exchange)
        await member.until(lambda: not member.subscription.troubles())
        assert len(member.assigned) == 1


# -- the log ----------------------------------------------------------------------------------------------------------


async def _beyond(opened: Callable[[], Any], connection: Any, anchors: tuple[Anchor, ...]) -> tuple[Member, str]:
    """A member of a group whose progress is beyond the end of the log, as after a power cut."""
    broker = await opened()
    member = await taken(broker, 6)
    first = next(iter(member.assigned.values()))
    await member.release(list(member.assigned), drained=True)
    await member.subscription.close()
    newest = await peeked(connection)
    assert newest is not None
    valid = newest.anchors
    cut = msgspec.structs.replace(newest, number=newest.number + 1, watermark=1_000, anchors=(*anchors, *valid))
    await write(connection, cut)
    return await joined(broker), first.log_id


@pytest.mark.parametrize("anchors", [(Anchor(999, 5),), (Anchor(999, 5), Anchor(5, 0))])
@played
async def test_a_log_that_has_lost_its_end_has_a_new_id_and_skips_no_event(
    harness: RabbitHarness, anchors: tuple[Anchor, ...]
) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        member, log_id = await _beyond(opened, connection, anchors)
        assigned = next(iter(member.assigned.values()))
        assert assigned.log_id != log_id
        assert assigned.unclean
        await member.until(lambda: {4, 5} <= set(member.values))
        assert 0 not in member.values, "it went back farther than to the newest anchor that is left"
        await member.settle()
        await member.subscription.close()
        again = await joined(await opened())
        assert next(iter(again.assigned.values())).log_id == assigned.log_id, "the new id was not stored"
        await again.quiet(0.5)


@played
async def test_a_log_without_any_valid_anchor_is_read_from_its_beginning(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        broker = await opened()
        member = await taken(broker, 6)
        await member.subscription.close()
        newest = await peeked(connection)
        assert newest is not None
        wrong = (Anchor(5, 1), Anchor(3, 2))
        await write(connection, msgspec.structs.replace(newest, number=newest.number + 1, anchors=wrong))
        again = await joined(broker)
        await again.take(6)
        assert again.values == [0, 1, 2, 3, 4, 5]


# -- connections and processes ----------------------------------------------------------------------------------------


@played
async def test_a_closed_connection_fences_and_the_member_comes_back(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened:
        broker = await opened()
        member = await taken(broker, 6)
        await asyncio.to_thread(_close_connections, harness)
        await member.until(lambda: any(isinstance(each, Fenced) for each in member.history))
        await member.hold(1)
        await member.until(lambda: {4, 5} <= set(member.values[6:]))
        assert not await member.settle()


@played
async def test_a_member_that_takes_a_partition_whose_stream_was_deleted_names_the_stream(
    harness: RabbitHarness,
) -> None:
    async with brokers(harness) as opened:
        member = await taken(await opened(), 3)
        stream = names.stream("orders", 0)
        harness.server.delete_queue(harness.vhost, stream)
        await asyncio.to_thread(_close_connections, harness)
        await member.until(lambda: any(isinstance(each, Fenced) for each in member.history))
        await member.until(lambda: f"stream {stream} does not exist: it was deleted" in _troubles(member))


def _close_connections(harness: RabbitHarness) -> None:
    deadline = time.monotonic() + 20
    while not harness.server.close_connections(harness.vhost):
        assert time.monotonic() < deadline, "the server lists no connection"
        time.sleep(0.2)


@played
async def test_a_member_that_was_away_while_its_group_was_dropped_gets_group_dropped(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened:
        one, two = await opened(), await opened()
        member = await taken(one, 6)
        with pytest.raises(BrokerError, match="in use"):
            await two.drop_group("orders", "group")
        harness.server.delete_queue(harness.vhost, QUEUE)
        await two._ground.io.run(two._ground.registry.drop_group("orders", "group", 9))
        with pytest.raises(GroupDropped):
            await member.until(lambda: False)
        assert member.subscription.troubles()


@played
async def test_a_group_that_was_dropped_begins_with_a_higher_fence(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened:
        broker = await opened()
        member = await taken(broker, 6)
        fence = next(iter(member.assigned.values())).fence or 0
        await member.subscription.close()
        await broker.drop_group("orders", "group")
        assert not [name for name in harness.server.queues(harness.vhost) if ":group:" in name]
        again = await joined(broker)
        assert (next(iter(again.assigned.values())).fence or 0) > fence
        await again.take(6)


@played
async def test_two_members_that_create_a_group_at_once_start_it_once(harness: RabbitHarness) -> None:
    async with brokers(harness, partitions=4) as opened:
        many = [await opened() for _ in range(3)]
        await many[0].publish([event("orders", n) for n in range(5)])
        members = await asyncio.gather(*[Member.join(each, "orders", "group") for each in many])

        while sum(len(each.assigned) for each in members) < 4 or not any(each.deliveries for each in members):
            await asyncio.gather(*[each.receive() for each in members])  # each may have to release a partition
        assigned = [each for member in members for each in member.history if isinstance(each, Assigned)]
        assert all(not each.unclean for each in assigned)


def test_a_token_queue_that_refuses_its_first_token_gets_it_again() -> None:
    """As a quorum queue does that another process declares at the same moment."""
    answers: list[list[str | None]] = [[None, "nack", "nack"], ["nack", None], [None]]
    published: list[Sequence[int]] = []

    class Refusing:
        async def publish(self, messages: Sequence[int]) -> list[str | None]:
            published.append(messages)
            return answers[len(published) - 1]

    assert asyncio.run(group_start.stored(Refusing(), [1, 2, 3])) is None  # type: ignore[arg-type, list-item]
    assert published == [[1, 2, 3], [2, 3], [2]]


@played
async def test_a_passing_group_leaves_nothing_behind(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened:
        broker = await opened()
        await broker.publish([event("orders", n) for n in range(3)])
        before = set(harness.server.queues(harness.vhost))
        member = await joined(broker, "onward-passing.tail.1")
        await member.take(3)
        assert not await member.settle()
        assert not list(await broker.groups("orders"))
        assert set(harness.server.queues(harness.vhost)) == before
        await member.subscription.close()
        await broker.drop_group("orders", "onward-passing.tail.1")


@played
async def test_operators_who_look_at_a_group_leave_nothing_in_its_token_queues(harness: RabbitHarness) -> None:
    async with brokers(harness) as opened, connected(harness) as connection:
        broker = await opened()
        member = await taken(broker, 5)
        await member.subscription.close()
        channel = await connection.channel()
        for _ in range(3):
            (info,) = await broker.groups("orders")
            assert info.partitions[0].watermark
        assert (await channel.declare_queue(QUEUE, passive=True)).messages <= 2


@played
async def test_operators_get_an_answer_during_a_memory_alarm(harness: RabbitHarness) -> None:
    """The server answers nothing on a connection that has sent messages. The next question uses another one."""
    async with brokers(harness) as opened:
        broker = await opened()
        member = await taken(broker, 3)
        with harness.server.alarmed():
            with contextlib.suppress(BrokerError):
                await broker.groups("orders")
            assert [each.name for each in await broker.topics()] == ["orders"]
        await member.subscription.close()
