"""The RabbitMQ servers of the tests do what the tests ask of them: one node, newer versions, a cluster of three."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from aiormq.exceptions import AMQPError, ChannelNotFoundEntity

from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.rabbitmq_cluster import RabbitMQCluster
from tests.servers.server import until

QUORUM = {"x-queue-type": "quorum"}
STREAM = {"x-queue-type": "stream"}


@asynccontextmanager
async def channel(url: str, **options: Any) -> AsyncIterator[AbstractChannel]:
    async with asyncio.timeout(60), await aio_pika.connect(url, **options) as connection:
        yield await connection.channel()


async def put(at: AbstractChannel, queue: str, arguments: dict[str, Any]) -> None:
    await at.declare_queue(queue, durable=True, arguments=arguments)
    message = aio_pika.Message(b"x", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await at.default_exchange.publish(message, queue)


def put_both(url: str) -> None:
    async def scene() -> None:
        async with channel(url) as at:
            await put(at, "queue", QUORUM)
            await put(at, "stream", STREAM)

    asyncio.run(scene())


def has_both(url: str) -> bool:
    """Whether both have their message. A stream that is not back yet is not found."""

    async def counted() -> list[int | None]:
        counts = []
        async with channel(url) as at:
            for name in ("queue", "stream"):
                queue = await at.declare_queue(name, passive=True)
                counts.append(queue.declaration_result.message_count)
        return counts

    try:
        return asyncio.run(counted()) == [1, 1]
    except ChannelNotFoundEntity:
        return False


@pytest.mark.more
@pytest.mark.servers
@pytest.mark.parametrize("fixture", ["rabbitmq_server", "newer_rabbitmq_server", "newest_rabbitmq_server"])
def test_what_is_durable_survives_a_kill(fixture: str, request: pytest.FixtureRequest) -> None:
    server: RabbitMQServer = request.getfixturevalue(fixture)
    with server.vhost() as vhost:
        url = server.url_of(vhost)
        put_both(url)
        server.until_durable(vhost)
        server.restart()
        until(lambda: has_both(url), 60, "not both are back", server.log)


def test_a_virtual_host_is_alone_and_goes_with_its_queues(rabbitmq_server: RabbitMQServer) -> None:
    with rabbitmq_server.vhost() as one, rabbitmq_server.vhost() as other:
        put_both(rabbitmq_server.url_of(one))
        assert list(rabbitmq_server.queues(one)) == ["queue", "stream"]
        assert not rabbitmq_server.queues(other)
        rabbitmq_server.delete_queue(one, "queue")
        assert list(rabbitmq_server.queues(one)) == ["stream"]
    with pytest.raises(AMQPError):
        put_both(rabbitmq_server.url_of(one))


def test_an_alarm_blocks_publishers_until_it_ends(rabbitmq_server: RabbitMQServer) -> None:
    async def scene() -> None:
        async with channel(rabbitmq_server.url) as at:
            with rabbitmq_server.alarmed():
                publishing = asyncio.create_task(put(at, "alarmed", {}))
                assert not (await asyncio.wait([publishing], timeout=1.0))[0]
            await publishing
            await at.queue_delete("alarmed")

    asyncio.run(scene())


def test_tls_is_checked_by_the_authority_of_the_server(rabbitmq_server: RabbitMQServer) -> None:
    async def scene(context: ssl.SSLContext) -> None:
        async with channel(rabbitmq_server.secure_url, ssl_context=context):
            pass

    asyncio.run(scene(ssl.create_default_context(cafile=rabbitmq_server.authority)))
    with pytest.raises(AMQPError):
        asyncio.run(scene(ssl.create_default_context()))


def test_an_operator_closes_connections(rabbitmq_server: RabbitMQServer) -> None:
    async def scene(vhost: str) -> None:
        ended = asyncio.Event()
        async with channel(rabbitmq_server.url_of(vhost)) as at:
            at.close_callbacks.add(lambda *_: ended.set())
            until(lambda: rabbitmq_server.close_connections(vhost) == 1, 30, "no connection", rabbitmq_server.log)
            await ended.wait()

    with rabbitmq_server.vhost() as vhost:
        asyncio.run(scene(vhost))


@pytest.mark.more
@pytest.mark.servers
@pytest.mark.parametrize(("fixture", "least"), [("newer_rabbitmq_server", (4, 0)), ("newest_rabbitmq_server", (4, 3))])
def test_the_version_of_a_newer_server(fixture: str, least: tuple[int, int], request: pytest.FixtureRequest) -> None:
    server: RabbitMQServer = request.getfixturevalue(fixture)
    version = tuple(map(int, server.ctl("version").strip().split(".")))
    assert version >= least


@pytest.mark.more
def test_another_node_leads_when_the_leader_is_killed(rabbitmq_cluster: RabbitMQCluster) -> None:
    with rabbitmq_cluster.vhost() as vhost:
        put_both(rabbitmq_cluster.nodes[0].url_of(vhost))
        former = rabbitmq_cluster.leader(vhost, "queue")
        former.kill()
        other = next(node for node in rabbitmq_cluster.nodes if node is not former)
        until(lambda: has_both(other.url_of(vhost)), 60, "the others do not have both", other.log)
        until(lambda: rabbitmq_cluster.leader(vhost, "queue") is not former, 60, "no other leader", other.log)


@pytest.mark.more
def test_a_node_that_was_paused_is_in_the_cluster_again(rabbitmq_cluster: RabbitMQCluster) -> None:
    node = rabbitmq_cluster.nodes[2]
    node.pause()
    until(lambda: "not responding" in rabbitmq_cluster.nodes[0].log.read_text(), 60, "not missed", node.log)
    rabbitmq_cluster.heal()
    assert all(len(each.ask("GET", "/api/nodes")) == 3 for each in rabbitmq_cluster.nodes)
