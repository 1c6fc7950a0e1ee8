"""What happens to the server, or to what Onward has there, while an application runs: nothing that was accepted is
lost, and what cannot go on says why."""

import asyncio
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from onward.brokers.rabbitmq.ordered import seat
from tests.brokers.rabbitmq.fault_shop import GROUP, KEYS, KINDS, TOPIC, FaultShop, some_fail, until
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

kinds = pytest.mark.parametrize("kind", KINDS)
WORK_QUEUE = f"onward.{TOPIC}:{GROUP}:work"
RUNGS = (50, 100, 200)  # which the retries of the shop use


@pytest.fixture
def vhost(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    with rabbitmq_server.vhost() as name:
        yield name


@pytest.fixture
def url(rabbitmq_server: RabbitMQServer, vhost: str) -> str:
    return rabbitmq_server.url_of(vhost)


def troubles(shop: FaultShop) -> str:
    return " ".join(shop.app.health().troubles)


# -- the node ---------------------------------------------------------------------------------------------------------


@kinds
def test_a_node_that_is_killed_under_load_loses_nothing(
    rabbitmq_server: RabbitMQServer, vhost: str, url: str, kind: str
) -> None:
    async def scene() -> None:
        async with FaultShop(url, kind, some_fail).open() as shop:
            await shop.publish(100)
            await shop.settled()
            while kind == "work" and not {f"{WORK_QUEUE}.rung.{ms}" for ms in RUNGS} <= {
                *rabbitmq_server.queues(vhost)
            }:
                await shop.publish(10)
            await asyncio.to_thread(rabbitmq_server.until_durable, vhost)
            publishing = asyncio.create_task(published(shop))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(rabbitmq_server.kill)
            await until(lambda: not shop.app.health().ready, "readiness ends", shop)
            await asyncio.to_thread(rabbitmq_server.start)
            await publishing
            await until(lambda: shop.app.health().ready, "readiness is back", shop)
            await shop.publish(100)

    asyncio.run(scene())


async def published(shop: FaultShop) -> None:
    for _ in range(20):
        await shop.publish(50)
        await asyncio.sleep(0.05)


@kinds
def test_a_node_that_stops_for_a_while_is_noticed_and_nothing_is_lost(
    rabbitmq_server: RabbitMQServer, url: str, kind: str
) -> None:
    """The connections stay open and nothing answers, until the heartbeats are missed."""

    async def scene() -> None:
        async with FaultShop(url, kind, publish_timeout_s=3.0).open() as shop:
            await shop.publish(50)
            await shop.settled()
            await asyncio.to_thread(rabbitmq_server.pause)
            began = time.monotonic()
            await shop.publish(5)
            assert time.monotonic() - began < 8, "publish does not end"
            assert shop.unknown or len(shop.accepted) == 50
            await until(lambda: not shop.app.health().ready, "readiness ends", shop, 20)
            await asyncio.to_thread(rabbitmq_server.resume)
            await until(lambda: shop.app.health().ready, "readiness is back", shop)
            await shop.publish(50)

    asyncio.run(scene())


@kinds
def test_under_a_memory_alarm_an_application_waits_and_says_so(
    rabbitmq_server: RabbitMQServer, url: str, kind: str
) -> None:
    """Neither an event nor a token is stored meanwhile, so an owner stops when its lease is over."""

    async def scene() -> None:
        async with FaultShop(url, kind, publish_timeout_s=3.0).open() as shop:
            await shop.publish(50)
            await shop.settled()
            await asyncio.to_thread(rabbitmq_server.alarm, on=True)
            try:
                await shop.publish(5)
                assert len(shop.accepted) == 50, "accepted under an alarm"
                await until(lambda: "alarm" in troubles(shop), "the alarm is named", shop, 20)
                assert not shop.app.health().ready
            finally:
                await asyncio.to_thread(rabbitmq_server.alarm, on=False)
            await until(lambda: shop.app.health().ready, "readiness is back", shop)
            await shop.publish(50)
            assert len(shop.accepted) >= 100

    asyncio.run(scene())


def test_a_token_queue_that_the_server_forgets_is_named_and_created_again(
    rabbitmq_server: RabbitMQServer, vhost: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is killed right after a group was created does not know the newest quorum queue again: the queue
    exists, but it delivers and confirms nothing."""
    token = f"onward.{TOPIC}:{GROUP}:1.token"
    monkeypatch.setattr(seat, "_SILENT_S", 6.0)

    async def scene() -> None:
        shop = FaultShop(url, "ordered")
        async with shop.app:
            running = asyncio.create_task(shop.app.run())
            await until(lambda: shop.app.health().ready, "the application is ready", shop)
            await shop.publish(50)
            await shop.settled()
            await asyncio.to_thread(rabbitmq_server.until_durable, vhost)
            await asyncio.to_thread(rabbitmq_server.kill)
            await asyncio.to_thread(forget, rabbitmq_server, vhost, token)
            await asyncio.to_thread(rabbitmq_server.start)
            await until(lambda: f"queue {token} does not answer" in troubles(shop), "the queue is named", shop)
            assert not shop.app.health().ready
            await until(lambda: shop.app.health().ready, "readiness is back", shop)
            await shop.publish(50)
            await shop.settled()
            shop.app.stop()
            await running

    asyncio.run(scene())


def forget(server: RabbitMQServer, vhost: str, queue: str) -> None:
    """What a kill does to a queue of the last seconds: the node that is down now does not know the queue's log."""
    name = f"{vhost}_{queue}".encode()
    for path in server.folder.glob("mnesia/*/*/*/names.dets"):
        path.write_bytes(path.read_bytes().replace(name, b"x" * len(name)))


# -- what is deleted --------------------------------------------------------------------------------------------------


def test_a_token_queue_that_is_deleted_is_created_again_and_no_event_is_skipped(
    rabbitmq_server: RabbitMQServer, vhost: str, url: str
) -> None:
    async def scene() -> None:
        async with FaultShop(url, "ordered").open() as shop:
            for _ in range(3):
                await shop.publish(50)
                await shop.settled()
                for index in range(2):
                    token = f"onward.{TOPIC}:{GROUP}:{index}.token"
                    await asyncio.to_thread(rabbitmq_server.delete_queue, vhost, token)
                await shop.publish(50)
                await shop.settled()

    asyncio.run(scene())


@kinds
def test_an_exchange_of_the_members_that_is_deleted_comes_back_and_no_event_runs_twice(
    rabbitmq_server: RabbitMQServer, vhost: str, url: str, kind: str
) -> None:
    name = f"onward.{TOPIC}:{GROUP}:members"

    def is_bound() -> bool:
        bound = rabbitmq_server.ask("GET", f"/api/bindings/{vhost}")
        return any(each["source"] == name for each in bound)

    async def scene() -> None:
        async with FaultShop(url, kind).open() as shop:
            await shop.publish(50)
            await shop.settled()
            await asyncio.to_thread(rabbitmq_server.ask, "DELETE", f"/api/exchanges/{vhost}/{quote(name, safe='')}")
            assert not is_bound()
            await until(is_bound, "the member joins again", shop)
            await shop.publish(50)
            await shop.settled()
            assert len(shop.runs) == 100

    asyncio.run(scene())


def test_a_stream_that_is_deleted_refuses_its_events_and_is_named(
    rabbitmq_server: RabbitMQServer, vhost: str, url: str
) -> None:
    """It is never created again by itself: its events are gone, and that must be seen."""

    async def scene() -> None:
        shop = FaultShop(url, "ordered")
        async with shop.app:
            running = asyncio.create_task(shop.app.run())
            await until(lambda: shop.app.health().ready, "the application is ready", shop)
            await shop.publish(50)
            await shop.settled()
            await asyncio.sleep(6.0)  # for so long a new topic is completed
            await asyncio.to_thread(rabbitmq_server.delete_queue, vhost, f"onward.{TOPIC}.0")
            await until(lambda: f"onward.{TOPIC}.0" in troubles(shop), "the stream is named", shop)
            deadline, before, count = time.monotonic() + 20, 0, KEYS
            while count == KEYS:
                before = len(shop.accepted)
                await shop.publish(KEYS)
                count = len(shop.accepted) - before
                assert time.monotonic() < deadline, "events for a missing stream are accepted"
            assert count == 3, "key-0, key-3 and key-4 are in the other partition"
            shop.app.stop()
            await running

    asyncio.run(scene())


def test_a_work_queue_that_is_deleted_is_named_and_comes_back_with_its_bindings(
    rabbitmq_server: RabbitMQServer, vhost: str, url: str
) -> None:
    async def scene() -> None:
        async with FaultShop(url, "work").open() as shop:
            await shop.publish(50)
            await shop.settled()
            await asyncio.to_thread(rabbitmq_server.delete_queue, vhost, WORK_QUEUE)
            await until(lambda: WORK_QUEUE in rabbitmq_server.queues(vhost), "the queue is declared again", shop)
            await until(lambda: shop.app.health().ready, "readiness is back", shop)
            await shop.publish(50)

    asyncio.run(scene())


def test_an_aside_that_is_deleted_is_written_again_by_its_owner(
    rabbitmq_server: RabbitMQServer, vhost: str, url: str
) -> None:
    async def scene() -> None:
        async with FaultShop(url, "ordered", some_fail).open() as shop:
            await shop.publish(50)
            await shop.settled()
            for name in [name for name in rabbitmq_server.queues(vhost) if ".aside." in name]:
                await asyncio.to_thread(rabbitmq_server.delete_queue, vhost, name)
            await shop.publish(50)

    asyncio.run(scene())
