"""RabbitMQ ends a connection that uses a stream while another one creates or deletes it. Such an end passes."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from onward import Onward
from onward.brokers.base import Filter
from onward.brokers.rabbitmq.amqp import Channel, ChannelClosed
from onward.brokers.rabbitmq.connecting import LoggedCauses, reconnecting
from onward.brokers.rabbitmq.work.work_session import WorkSession
from onward.errors import BrokerError
from onward.testing.failure_shop import eventually
from tests.brokers.rabbitmq.fault_shop import GROUP, TOPIC, FaultShop, some_fail
from tests.brokers.rabbitmq.stage import played, until
from tests.brokers.rabbitmq.test_work_app import Desk
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

TIMES = 4
KINDS = pytest.mark.parametrize("kind", ["ordered", "work"])


@pytest.fixture
def url(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    with rabbitmq_server.vhost() as vhost:
        yield rabbitmq_server.url_of(vhost)


@contextlib.contextmanager
def ending(part: str, times: int = TIMES) -> Iterator[list[str]]:
    """The server ends the connection of the first consumers of queues that have `part` in their names."""
    ended: list[str] = []
    consume = Channel.consume

    async def interrupted(channel: Channel, queue: str, *args: Any, **kwargs: Any) -> Any:
        if part in queue and len(ended) < times:
            ended.append(queue)
            await channel.declare_exchange("nowhere", "no-such-kind")  # an error that ends the whole connection
        return await consume(channel, queue, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "consume", interrupted)
        yield ended


@KINDS
@played
async def test_operators_read_dead_letters_all_the_same(url: str, kind: str) -> None:
    async with FaultShop(url, kind, some_fail).open() as shop:
        await shop.publish(20)
        await shop.settled()
        async with Onward(url) as operator:
            aside = operator.broker.aside(GROUP)
            with ending(".aside.") as ended:
                assert len((await aside.scan(Filter(), None, 100)).records) == 2
            assert len(ended) == TIMES
            with ending(".aside.") as ended:
                assert (await aside.count(Filter())).records == 2
            assert ended
            shop.cured = True
            with ending(".aside.") as ended:
                replayed = await operator.dead.replay(group=GROUP)
            assert (replayed.replayed, replayed.left) == (2, 0)
            assert ended


@KINDS
@played
async def test_operators_see_groups_and_members_all_the_same(url: str, kind: str) -> None:
    async with FaultShop(url, kind).open() as shop:
        await shop.publish(5)
        await shop.settled()
        async with Onward(url) as operator:
            with ending(f"onward.{TOPIC}." if kind == "ordered" else ":members.") as ended:
                (info,) = await operator.broker.groups(TOPIC)
            assert (info.group, len(info.members), len(ended)) == (GROUP, 1, TIMES)
            with ending(":members.") as ended:
                assert len(await operator.broker.owners(TOPIC, GROUP)) == 1
            assert len(ended) == TIMES


@KINDS
@played
async def test_members_go_on_all_the_same(url: str, kind: str) -> None:
    with ending(f"onward.{TOPIC}:", 6) as ended:
        async with FaultShop(url, kind, some_fail).open() as shop:
            await shop.publish(20)
    assert len(ended) == 6


@KINDS
@played
async def test_a_new_group_is_created_all_the_same(url: str, kind: str) -> None:
    async with Onward(url, partitions=2) as app:
        await app.publish(TOPIC, 0)
    with ending(f"onward.{TOPIC}.") as ended:
        async with FaultShop(url, kind).open() as shop:
            await shop.publish(5)
    assert len(ended) == TIMES


@played
async def test_a_dropped_group_is_gone_all_the_same(url: str) -> None:
    async with FaultShop(url, "ordered", some_fail).open() as shop:
        await shop.publish(20)
    async with Onward(url) as operator:
        with ending(".token") as ended:
            await operator.broker.drop_group(TOPIC, GROUP)
        assert len(ended) == TIMES
        assert not await operator.broker.groups(TOPIC)


@played
async def test_groups_of_a_topic_without_ordered_groups_reads_no_stream(url: str) -> None:
    """Another process may just be declaring them."""
    async with Desk(url).open() as desk:
        await desk.publish(range(3))
        with ending(f"onward.{TOPIC}.") as ended:
            (info,) = await desk.app.broker.groups(TOPIC)
        assert info.group == "billing"
        assert not ended


@played
async def test_groups_are_listed_while_others_create_and_drop_them(url: str) -> None:
    """The real thing: it ends the operator's connection every few rounds."""
    async with Onward(url, partitions=4) as app, Onward(url) as operator:
        await app.publish(TOPIC, 0)
        done = asyncio.Event()

        async def read() -> int:
            for rounds in range(1_000_000):
                if done.is_set():
                    return rounds
                await operator.broker.groups(TOPIC)
                await operator.broker.aside(GROUP).count(Filter())
            raise AssertionError("there are fewer rounds")

        reading = asyncio.create_task(read())
        for _ in range(6):
            async with FaultShop(url, "ordered", some_fail, partitions=4).open() as shop:
                await shop.publish(10)
            await eventually(lambda: _dropped(app), "the group is dropped")
        done.set()
        assert await reading > 6


async def _dropped(app: Onward) -> bool:
    await app.broker.drop_group(TOPIC, GROUP)
    return not await app.broker.groups(TOPIC)


# -- what lasts -------------------------------------------------------------------------------------------------------


@played
async def test_a_refused_member_pauses_ever_longer_and_logs_the_cause_once(
    url: str, rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user may use the queues of the group, and not those by which members find each other."""
    vhost = urlsplit(url).path[1:]
    async with Desk(url).open():
        pass
    rabbitmq_server.ask("PUT", "/api/users/limited", {"password": "limited", "tags": ""})
    allowed = r"^onward\.(?!.*members\.).*|amq\.default"
    permissions = {"configure": allowed, "write": allowed, "read": allowed}
    rabbitmq_server.ask("PUT", f"/api/permissions/{vhost}/limited", permissions)
    opened: list[float] = []
    open_ = WorkSession.open

    async def counted(*args: Any) -> Any:
        opened.append(asyncio.get_running_loop().time())
        return await open_(*args)

    monkeypatch.setattr(WorkSession, "open", counted)
    limited = Desk(url.replace("guest:guest", "limited:limited"))
    async with limited.app:
        with caplog.at_level(logging.WARNING, "onward"):
            running = asyncio.create_task(limited.app.run())
            await until(lambda: len(opened) >= 6)
            limited.app.stop()
            await running
    lines = [each.message for each in caplog.records if "trying again" in each.message]
    assert len(lines) == 1
    assert "ACCESS_REFUSED" in lines[0]
    gaps = [later - earlier for earlier, later in itertools.pairwise(opened)]
    assert gaps[4] > 0.4
    assert gaps[4] > 2 * gaps[1]


def test_a_call_on_a_queue_that_is_just_starting_is_done_again() -> None:
    tries: list[int] = []

    async def work() -> str:
        tries.append(1)
        if len(tries) == 1:
            late = "NOT_FOUND - home node 'a@b' of durable queue 'q' in vhost '/' is down or inaccessible"
            raise BrokerError("group g: not there") from ChannelClosed(late, code=404, text=late)
        return "done"

    assert asyncio.run(reconnecting(work)) == "done"
    assert len(tries) == 2


def test_a_cause_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    causes = LoggedCauses()
    with caplog.at_level(logging.WARNING, "onward"):
        for name in ("a" * 32, "b" * 32):
            causes.report(f"queue {name}: refused")
        causes.report("queue x: refused")
        causes.clear()
        causes.report("queue x: refused")
    assert [each.message for each in caplog.records] == [f"queue {'a' * 32}: refused", *["queue x: refused"] * 2]
