"""Tokens at a real server: standing by, taking over, writing, and every way to lose a token."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import ChannelClosed, Connection, ConnectionLost
from onward.brokers.rabbitmq.ordered import group_start
from onward.brokers.rabbitmq.ordered.token import Awaited, Probe, Token
from onward.brokers.rabbitmq.ordered.token_channel import TokenChannel, TokenLost, TokenRefused
from onward.clock import now
from onward.errors import BrokerError
from tests.brokers.rabbitmq.harness import RabbitHarness, harness
from tests.brokers.rabbitmq.stage import played, until
from tests.brokers.rabbitmq.token_stage import connected, emptied, peeked, write

__all__ = ["harness"]

pytestmark = pytest.mark.servers

QUEUE = names.token_queue("orders", 0, "group")
FIRST = Token(0, 0, "first", "topic", "topic", 0, is_seed=True)


@asynccontextmanager
async def queue(harness: RabbitHarness, *, first: bool = True) -> AsyncIterator[Connection]:
    """A token queue with a first token."""
    async with connected(harness) as connection:
        channel = await connection.channel()
        await channel.declare_queue(QUEUE, arguments=names.TOKEN_ARGUMENTS)
        if first:
            await write(connection, FIRST)
        yield connection


async def stand_by(connection: Connection, tenure: str = "me:1", lease_s: float = 5.0) -> TokenChannel:
    return await TokenChannel.open(connection, QUEUE, tenure=tenure, lease_s=lease_s)


async def own(connection: Connection, tenure: str = "me:1") -> TokenChannel:
    desk = await stand_by(connection, tenure)
    newest = await desk.newest()
    assert newest is not None
    await desk.write(newest.claimed(tenure))
    return desk


def settled(desk: TokenChannel, watermark: int) -> Token:
    return msgspec.structs.replace(desk.held.next(), watermark=watermark)


@played
async def test_an_owner_writes_tokens_and_the_next_one_finds_the_newest(harness: RabbitHarness) -> None:
    async with queue(harness) as connection:
        desk = await own(connection)
        for watermark in range(1, 40):
            await desk.write(settled(desk, watermark))
        await desk.close()
        newest = await peeked(connection)
        assert newest is not None
        assert (newest.fence, newest.number, newest.watermark) == (1, 39, 39)
        assert await emptied(connection) == 1, "replaced tokens are still in the queue"


@played
async def test_the_next_member_becomes_active_only_when_the_owner_is_gone(harness: RabbitHarness) -> None:
    async with queue(harness) as connection, connected(harness) as other:
        desk = await own(connection)
        waiting = await stand_by(other, "next:1")
        await desk.write(settled(desk, 5))
        assert not waiting.is_active
        finding = asyncio.ensure_future(waiting.newest())
        await desk.write(settled(desk, 6))
        assert not finding.done()
        await desk.close()
        newest = await finding
        assert newest is not None
        assert newest.watermark == 6
        await waiting.close()


@played
async def test_a_closed_connection_is_a_loss_at_once_and_the_token_stays(harness: RabbitHarness) -> None:
    async with queue(harness) as connection, connected(harness) as other:
        desk = await own(other)
        await desk.write(settled(desk, 7))
        lost: list[str] = []
        desk.on_lost = lost.append
        await other.close()
        assert lost
        assert desk.sure_until == 0.0
        with pytest.raises(TokenLost):
            await desk.write(settled(desk, 8))
        newest = await peeked(connection)
        assert newest is not None
        assert newest.watermark == 7


@pytest.mark.parametrize("order", [(1, 1), (1, 9), (2, 0)])
@played
async def test_an_equal_or_higher_token_of_another_member_ends_the_ownership(
    harness: RabbitHarness, order: tuple[int, int]
) -> None:
    async with queue(harness) as connection:
        desk = await own(connection)
        await desk.write(settled(desk, 7))
        await write(connection, msgspec.structs.replace(FIRST, fence=order[0], number=order[1], tenure="other:1"))
        async with asyncio.timeout(10):
            await asyncio.wait([desk.lost])
        with pytest.raises(TokenLost, match="another member"):
            await desk.write(settled(desk, 8))
        await desk.close()
        newest = await peeked(connection)
        assert newest is not None
        assert newest.order == max(order, (1, 1))


@pytest.mark.parametrize("order", [(0, 0), (0, 99), (1, 0)])
@played
async def test_a_late_lower_token_of_a_former_owner_changes_nothing(
    harness: RabbitHarness, order: tuple[int, int]
) -> None:
    async with queue(harness) as connection:
        desk = await own(connection)
        await desk.write(settled(desk, 7))
        await write(connection, msgspec.structs.replace(FIRST, fence=order[0], number=order[1], tenure="former:1"))
        await write(connection, Probe("of a member that stands by"))
        await desk.write(settled(desk, 8))
        assert not desk.lost.done()
        await desk.close()
        newest = await peeked(connection)
        assert newest is not None
        assert newest.watermark == 8


@played
async def test_a_token_that_the_server_refuses_is_a_loss_of_its_own_kind(harness: RabbitHarness) -> None:
    async with queue(harness) as connection:
        desk = await own(connection)
        desk.queue = "onward.nowhere"  # the server returns what is sent there
        with pytest.raises(TokenRefused, match="did not store"):
            await desk.write(settled(desk, 8))
        with pytest.raises(TokenRefused):
            await desk.write(settled(desk, 9))
        await desk.close()


@played
async def test_a_token_whose_fate_is_unknown_because_its_connection_ended_is_not_refused(
    harness: RabbitHarness,
) -> None:
    async with queue(harness), connected(harness) as other:
        desk = await own(other)
        harness.server.pause()
        try:
            writing = asyncio.ensure_future(desk.write(settled(desk, 7)))
            await until(lambda: desk.tenure is not None and desk.tenure.sent is not None)
            other.abandon("the peer is silent")
            with pytest.raises(TokenLost) as raised:
                await writing
            assert not isinstance(raised.value, TokenRefused)
        finally:
            harness.server.resume()


@played
async def test_a_deleted_queue_is_a_loss(harness: RabbitHarness) -> None:
    async with queue(harness) as connection:
        desk = await own(connection)
        harness.server.delete_queue(harness.vhost, QUEUE)
        async with asyncio.timeout(10):
            await asyncio.wait([desk.lost])
        with pytest.raises(ChannelClosed) as raised:
            await stand_by(connection, "me:2")
        assert raised.value.code == 404


@played
async def test_a_token_that_does_not_come_back_in_a_lease_is_a_loss(harness: RabbitHarness) -> None:
    async with queue(harness) as connection:
        desk = await stand_by(connection, lease_s=1.0)
        newest = await desk.newest()
        assert newest is not None
        await desk.write(newest.claimed("me:1"))
        harness.server.pause()
        try:
            with pytest.raises(TokenLost, match="did not come back"):
                await desk.write(settled(desk, 1))
        finally:
            harness.server.resume()


@played
async def test_a_nudge_shows_that_a_queue_has_no_token(harness: RabbitHarness) -> None:
    async with queue(harness, first=False) as connection:
        desk = await stand_by(connection)
        assert not desk.is_active
        desk.nudge()
        assert await desk.newest() is None
        await desk.close()


@played
async def test_a_nudge_does_not_disturb_an_owner(harness: RabbitHarness) -> None:
    async with queue(harness) as connection, connected(harness) as other:
        desk = await own(connection)
        waiting = await stand_by(other, "next:1")
        for _ in range(60):
            waiting.nudge()
        await desk.write(settled(desk, 1))
        assert not desk.lost.done()
        await waiting.close()
        await desk.close()
        assert await emptied(connection) == 1


@played
async def test_a_queue_that_does_not_answer_a_nudge_in_a_lease_is_silent_until_it_answers(
    harness: RabbitHarness,
) -> None:
    async with queue(harness) as connection, connected(harness) as other:
        await own(connection)
        waiting = await stand_by(other, "next:1", lease_s=1.0)
        harness.server.pause()
        try:
            waiting.nudge()
            await until(lambda: waiting.is_silent)
        finally:
            harness.server.resume()
        await until(lambda: waiting.has_answered)
        assert not waiting.is_silent
        assert not waiting.is_active, "only a confirm came"


@played
async def test_during_an_alarm_no_queue_counts_as_silent(harness: RabbitHarness) -> None:
    async with queue(harness) as connection, connected(harness) as other:
        await own(connection)
        waiting = await stand_by(other, "next:1", lease_s=1.0)
        with harness.server.alarmed():
            waiting.nudge()
            await until(lambda: other.blocked is not None)
            over = now() + 2.0
            while now() < over:
                assert not waiting.is_silent
                await asyncio.sleep(0.05)


@played
async def test_a_queue_is_not_deleted_while_a_new_one_does_not_work_either(harness: RabbitHarness) -> None:
    """Its nodes may be down and come back."""
    async with queue(harness) as connection, connected(harness) as other:
        with pytest.MonkeyPatch.context() as patch, harness.server.alarmed():
            patch.setattr(group_start, "_CHECK_S", 1.0)
            with pytest.raises(BrokerError, match="a new queue does not work either"):
                await group_start.delete_silent(other, QUEUE)
        newest = await peeked(connection)
        assert newest == FIRST


@played
async def test_a_deleted_queue_leaves_no_other_one_behind(harness: RabbitHarness) -> None:
    async with queue(harness) as connection:
        await group_start.delete_silent(connection, QUEUE)
        assert not harness.server.queues(harness.vhost)


@played
async def test_many_leftovers_do_not_stop_a_takeover(harness: RabbitHarness) -> None:
    """More than the server delivers at once."""
    async with queue(harness) as connection:
        for number in range(1, 180):
            await write(connection, msgspec.structs.replace(FIRST, fence=1, number=(number * 7) % 180, tenure="x:1"))
        desk = await stand_by(connection)
        newest = await desk.newest()
        assert newest is not None
        assert newest.order == (1, 179)
        await desk.write(newest.claimed("me:1"))
        await desk.close()
        assert await emptied(connection) == 1


@played
async def test_certainty_counts_from_the_sending_of_the_last_token_that_came_back(harness: RabbitHarness) -> None:
    async with queue(harness) as connection:
        desk = await own(connection)
        first = desk.sure_until
        await asyncio.sleep(0.3)
        assert desk.sure_until == first
        await desk.write(settled(desk, 1))
        assert first + 0.2 < desk.sure_until < first + 5.0
        await desk.close()


@played
async def test_a_killed_chain_of_members_loses_no_token(harness: RabbitHarness) -> None:
    """Each member takes over and is cut off in the middle of a write."""
    async with queue(harness) as connection:
        stored = 0
        for turn in range(25):
            async with connected(harness) as member:
                desk = await own(member, f"m{turn}:1")
                assert desk.held.watermark >= stored, "an older token was taken"
                for _ in range(turn % 4):
                    await desk.write(settled(desk, desk.held.watermark + 1))
                    stored = desk.held.watermark
                writing = asyncio.ensure_future(desk.write(settled(desk, desk.held.watermark + 1)))
                await asyncio.sleep(0.001 * (turn % 7))
                await member.close()
                await asyncio.wait([writing])
                if writing.exception() is None:
                    stored = desk.held.watermark
        newest = await peeked(connection)
        assert newest is not None
        assert newest.watermark >= stored
        assert newest.fence == 25


@played
async def test_an_unclean_token_names_the_owner_that_is_waited_for(harness: RabbitHarness) -> None:
    async with queue(harness) as connection:
        desk = await own(connection)
        me = Awaited("me:1", "web-1", 15.0)
        await desk.write(msgspec.structs.replace(desk.held.next(), awaits=me))
        await desk.close()
        newest = await peeked(connection)
        assert newest is not None
        assert newest.awaits == me
        assert newest.claimed("next:1").awaits == me
        await until(lambda: True)


@pytest.mark.parametrize("cancels", [1, 2])
@played
async def test_a_call_that_fails_while_it_is_cancelled_is_not_reported_as_forgotten(
    harness: RabbitHarness, cancels: int
) -> None:
    """A broker that closes during a takeover cancels the claim of the aside, whose connection ends at the same time."""
    forgotten: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
    fails = asyncio.Event()

    async def claim() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await fails.wait()
            raise ConnectionLost("closed by us") from None

    async with queue(harness) as connection:
        desk = await stand_by(connection)
        taking = asyncio.ensure_future(desk.unless_lost(claim()))
        await asyncio.sleep(0)
        for _ in range(cancels):
            taking.cancel()
            await asyncio.sleep(0.01)
        fails.set()
        await asyncio.wait([taking])
        assert taking.cancelled()
        await desk.close()
    await asyncio.sleep(0.01)
    del taking
    gc.collect()
    assert not forgotten
