"""Work groups whose bindings, exchange or queue are removed at the server while members run."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.work import route_watch
from onward.errors import OnwardError
from onward.testing.failure_shop import eventually, until
from tests.brokers.rabbitmq.stage import played
from tests.brokers.rabbitmq.test_work_app import QUEUE, Desk
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

EXCHANGE = names.exchange("orders")
TIERS = {"tiers": {"critical": "urgent.*"}}


@pytest.fixture
def vhost(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    with rabbitmq_server.vhost() as vhost:
        yield vhost


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_watch, "INTERVAL_S", 0.2)


def bindings(server: RabbitMQServer, vhost: str, target: str) -> list[dict[str, Any]]:
    """Those to a queue or an exchange of the group, but not the one that the default exchange has to every queue."""
    return [
        each
        for each in server.ask("GET", f"/api/bindings/{vhost}")
        if each["destination"].startswith(target) and each["source"]
    ]


def unbind(server: RabbitMQServer, vhost: str) -> int:
    """Remove every binding of the group's work queues and tiers. Returns how many there were."""
    found = bindings(server, vhost, QUEUE)
    for each in found:
        kind = "q" if each["destination_type"] == "queue" else "e"
        ends = f"e/{quote(each['source'], safe='')}/{kind}/{quote(each['destination'], safe='')}"
        server.ask("DELETE", f"/api/bindings/{vhost}/{ends}/{quote(each['properties_key'], safe='')}")
    return len(found)


async def handled_again(desk: Desk, type_: str = "") -> None:
    """Publish until an event is handled."""
    numbers, before = itertools.count(1_000), set(desk.done)

    async def is_handled() -> bool:
        with contextlib.suppress(OnwardError):  # while the exchange is missing
            await desk.publish([next(numbers)], type_)
        return bool(set(desk.done) - before)

    await eventually(is_handled, "events are handled again")


@pytest.mark.parametrize("options", [{}, TIERS], ids=["one queue", "tiers"])
@played
async def test_bindings_that_were_removed_are_made_again(
    rabbitmq_server: RabbitMQServer, vhost: str, options: dict[str, Any]
) -> None:
    async with Desk(rabbitmq_server.url_of(vhost), declared=options).open() as desk:
        await desk.publish(range(3), "urgent.order")
        await until(lambda: len(desk.done) == 3, "all events are handled")
        before = bindings(rabbitmq_server, vhost, QUEUE)
        assert await asyncio.to_thread(unbind, rabbitmq_server, vhost) == len(before) > 0
        await handled_again(desk, "urgent.order")
        await until(lambda: bindings(rabbitmq_server, vhost, QUEUE) == before, "all bindings are there")


@played
async def test_an_exchange_that_was_deleted_is_declared_again_with_its_bindings(
    rabbitmq_server: RabbitMQServer, vhost: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Desk(rabbitmq_server.url_of(vhost), declared=TIERS).open() as desk:
        await desk.publish(range(3))
        await until(lambda: len(desk.done) == 3, "all events are handled")
        before = bindings(rabbitmq_server, vhost, QUEUE)
        with caplog.at_level(logging.WARNING, "onward"):
            for name in (EXCHANGE, f"{QUEUE}.to-bulk"):
                await asyncio.to_thread(rabbitmq_server.ask, "DELETE", f"/api/exchanges/{vhost}/{quote(name, safe='')}")
            await until(lambda: bindings(rabbitmq_server, vhost, QUEUE) == before, "all bindings are there")
        await handled_again(desk)
        assert desk.app.health().ready
    assert len([line for line in caplog.messages if f"{QUEUE}.to-bulk was missing" in line]) == 1


@played
async def test_without_auto_declare_a_missing_exchange_is_reported_and_not_created(
    rabbitmq_server: RabbitMQServer, vhost: str
) -> None:
    async with Desk(rabbitmq_server.url_of(vhost)).open() as other:  # creates the topic and the group
        await other.publish([0])
    desk = Desk(rabbitmq_server.url_of(vhost), auto_declare=False)
    async with desk.open():
        await asyncio.to_thread(rabbitmq_server.ask, "DELETE", f"/api/exchanges/{vhost}/{EXCHANGE}")
        await until(lambda: any(EXCHANGE in each for each in desk.app.health().troubles), "the exchange is named")
        assert not desk.app.health().ready
        assert EXCHANGE not in {each["name"] for each in rabbitmq_server.ask("GET", f"/api/exchanges/{vhost}")}


@played
async def test_a_token_queue_that_was_deleted_stops_no_replay(rabbitmq_server: RabbitMQServer, vhost: str) -> None:
    """It elects the member that replays. The one that stands by declares it again."""
    url, broken = rabbitmq_server.url_of(vhost), {1}
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(Desk(url, broken.__contains__).open())  # it is elected
        await first.publish([1])
        await eventually(lambda: first.has_dead(1), "the event is a dead letter")
        async with Desk(url, broken.__contains__).open() as desk:
            await asyncio.to_thread(rabbitmq_server.delete_queue, vhost, "onward.orders:billing:work.token")
            await stack.aclose()
            broken.clear()
            await desk.app.dead.replay()
            await until(lambda: desk.done == [1], "the replay is handled")


@played
async def test_a_member_makes_no_binding_that_a_later_member_has_removed(
    rabbitmq_server: RabbitMQServer, vhost: str
) -> None:
    url = rabbitmq_server.url_of(vhost)
    async with Desk(url, declared={"types": ["old"]}).open(), Desk(url, declared={"types": ["new"]}).open():
        for _ in range(3):  # rounds of both members
            await asyncio.to_thread(unbind, rabbitmq_server, vhost)
            await until(lambda: bool(bindings(rabbitmq_server, vhost, QUEUE)), "it is bound again")
            keys = {each["routing_key"] for each in bindings(rabbitmq_server, vhost, QUEUE)}
            assert len(keys) == 1
            assert keys.pop().endswith("new")


@played
async def test_a_deleted_queue_is_a_trouble_until_it_is_consumed_again(
    rabbitmq_server: RabbitMQServer, vhost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Readiness names it without a gap, and the log says that its messages are lost."""
    async with Desk(rabbitmq_server.url_of(vhost)).open() as desk:
        await desk.publish(range(3))
        await until(lambda: len(desk.done) == 3, "all events are handled")
        seen: list[tuple[str, ...]] = []

        async def watch() -> None:
            while True:
                seen.append(tuple(desk.app.health().troubles))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        with caplog.at_level(logging.WARNING, "onward"):
            await asyncio.to_thread(rabbitmq_server.delete_queue, vhost, QUEUE)
            await handled_again(desk)
        watching.cancel()
    runs = [is_named for is_named, _ in itertools.groupby(any(QUEUE in each for each in found) for found in seen)]
    assert runs == [False, True, False], "readiness named the queue once, without a gap"
    assert len([line for line in caplog.messages if f"queue {QUEUE} was missing" in line]) == 1
