"""What an operator or another program can do wrong: each is an error, or a trouble, with the thing, the cause and the
cure.

Other files have the rest of the list: a wrong user, password or virtual host, and a node that is away
(`test_address.py`); no management plugin (`test_management.py`, `test_topology_server.py`, `test_figures.py`); declared
queues and exchanges that differ, and a binding to nothing (`test_topology_server.py`); messages that are no events
(`test_message.py`); rungs of another program (`test_work_queue.py`).
"""

import asyncio
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from onward import Event, GiveUp, Onward
from onward.brokers.base import Filter, State
from onward.brokers.rabbitmq.amqp import (
    ChannelClosed,
    Connection,
    ConnectionLost,
    Outbound,
    Properties,
    encoded_properties,
)
from onward.brokers.rabbitmq.server_errors import explained, is_interrupted
from onward.errors import BrokerError
from onward.testing.failure_shop import eventually, until
from tests.brokers.rabbitmq.stage import played
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.servers, pytest.mark.timeout(120)]

CLASSIC: dict[str, Any] = {"durable": True, "arguments": {}}
STREAM: dict[str, Any] = {"durable": True, "arguments": {"x-queue-type": "stream", "x-max-age": "7s"}}
QUORUM: dict[str, Any] = {"durable": True, "arguments": {"x-queue-type": "quorum"}}
FANOUT: dict[str, Any] = {"type": "fanout", "durable": True}
DIRECT: dict[str, Any] = {"type": "direct", "durable": True}


@pytest.fixture
def vhost(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    with rabbitmq_server.vhost() as vhost:
        yield vhost


def shop(url: str, **options: Any) -> Onward:
    """An application whose handler gives up on each event, so that it needs all its queues."""
    app = Onward(url, partitions=1, lease_s=2.0, drain_timeout_s=2.0)

    @app.handler("orders", group="billing", **options)
    async def bill(event: Event) -> None:
        raise GiveUp("no stock")

    return app


async def complaint(app: Onward, name: str) -> str:
    """What the application reports about the thing of this name: an error, or troubles while it is not ready."""
    try:
        async with app.running():
            await app.publish("orders", {"n": 1}, key="k")
            await until(lambda: any(name in each for each in app.health().troubles), f"{name} is a trouble")
            return "; ".join(each for each in app.health().troubles if name in each)
    except BrokerError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "body", "ordering", "cause"),
    [
        ("onward.registry", CLASSIC, "key", "it exists and is no stream"),
        ("onward.orders", FANOUT, "key", "type is fanout there and topic here"),
        ("onward.orders.0", CLASSIC, "key", "x-queue-type is classic there and stream here"),
        ("onward.orders.0", STREAM, "key", "x-max-age is 7s there and 604800s here"),
        ("onward.orders:billing:members", DIRECT, "key", "type is direct there and fanout here"),
        ("onward.orders:billing:members", DIRECT, "none", "type is direct there and fanout here"),
        ("onward.orders:billing:0.token", CLASSIC, "key", "x-single-active-consumer is not set there and true here"),
        ("onward.orders:billing:0.token", QUORUM, "key", "x-single-active-consumer is not set there and true here"),
        ("onward.orders:billing:0.aside.0", CLASSIC, "key", "it exists and is no stream"),
        ("onward.orders:billing:work", CLASSIC, "none", "x-queue-type is classic there and quorum here"),
        ("onward.orders:billing:work", QUORUM, "none", "x-delivery-limit is not set there and 1000000000 here"),
        ("onward.orders:billing:suspects", CLASSIC, "none", "x-queue-type is classic there and quorum here"),
        ("onward.orders:billing:suspects.starts", CLASSIC, "none", "x-queue-type is classic there and stream here"),
        ("onward.orders:billing:work.aside.0", CLASSIC, "none", "it exists and is no stream"),
    ],
)
@played
async def test_a_thing_of_another_kind_under_our_name_is_named_with_the_cure(
    rabbitmq_server: RabbitMQServer, vhost: str, name: str, body: dict[str, Any], ordering: Any, cause: str
) -> None:
    kind = "exchanges" if "type" in body else "queues"
    await asyncio.to_thread(rabbitmq_server.ask, "PUT", f"/api/{kind}/{vhost}/{quote(name, safe='')}", body)
    said = await complaint(shop(rabbitmq_server.url_of(vhost), ordering=ordering), name)
    assert name in said
    assert cause in said
    assert "delete it at the server, or use another name or virtual host" in said


class ServerWithoutStreams(RabbitMQServer):
    """As a node is that was upgraded from a version before streams: the feature flag is off. It has no plugins."""

    def environment(self) -> dict[str, str]:
        return super().environment() | {"RABBITMQ_FEATURE_FLAGS": "quorum_queue,implicit_default_bindings"}


def test_a_server_without_streams_is_named_at_once_with_the_cure() -> None:
    async def opened(url: str) -> None:
        async with Onward(url):
            pass

    server = ServerWithoutStreams(plugins=())
    try:
        server.start()
        with pytest.raises(BrokerError, match=r"this server has no streams; .*enable_feature_flag stream_queue"):
            asyncio.run(opened(server.url))
    finally:
        server.close()


@pytest.mark.parametrize(
    "text",
    [
        "PRECONDITION_FAILED - invalid arg 'x-queue-type' for queue 'q': \"unsupported queue type 'stream'\"",
        "INTERNAL_ERROR - Cannot declare a queue of type 'rabbit_stream_queue': the feature flag is disabled",
    ],
)
def test_versions_say_in_different_words_that_they_have_no_streams(text: str) -> None:
    for error in (ChannelClosed("closed", code=406, text=text), ConnectionLost("closed", code=541, text=text)):
        assert "stream q: this server has no streams; upgrade it" in explained(error, "stream q")
        assert not is_interrupted(error), "to connect again does not help"


def test_a_refusal_for_another_reason_is_not_explained_as_a_difference() -> None:
    late = "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value used: 1800000 ms"
    assert explained(ChannelClosed("closed", code=406, text=late), "queue q") == f"queue q: {late}"


ODD = {
    "plain": Outbound("", "", encoded_properties(Properties()), b'{"n": 1}'),
    "typed": Outbound(
        "",
        "",
        encoded_properties(Properties(headers={"n": 7, "deep": {"a": [1, None]}, "ce_id": 5, "onward-expires": b"x"})),
        b'{"n": 2}',
    ),
    "binary": Outbound(
        "", "", encoded_properties(Properties(headers={"ce_id": "\u00e9", "x": b"\xff\xfe"})), b"\xff\xfe"
    ),
    "wrong": Outbound("", "", encoded_properties(Properties(content_type="text/plain")), b"no order"),
    "empty": Outbound("", "", encoded_properties(Properties()), b""),
}


@pytest.mark.parametrize(("ordering", "queue"), [("key", "onward.orders.0"), ("none", "onward.orders:billing:work")])
@played
async def test_messages_that_are_no_events_are_handled_or_become_dead_letters(
    rabbitmq_server: RabbitMQServer, vhost: str, ordering: Any, queue: str
) -> None:
    """Each has its original bytes, none stops the others, and none comes twice."""
    app = Onward(rabbitmq_server.url_of(vhost), partitions=1, lease_s=2.0, drain_timeout_s=2.0)
    seen: list[tuple[int, dict[str, str]]] = []

    @app.handler("orders", group="billing", ordering=ordering)
    async def bill(order: dict[str, int], event: Event) -> None:
        seen.append((order["n"], dict(event.headers)))

    async with app.running():
        await app.publish("orders", {"n": 0}, key="k")
        connection = await Connection.open(rabbitmq_server.host, rabbitmq_server.port, vhost=vhost)
        channel = await connection.channel()
        assert not any(await channel.publish([each._replace(routing_key=queue) for each in ODD.values()]))
        await connection.close()
        await app.publish("orders", {"n": 9}, key="k")
        await until(lambda: {n for n, _ in seen} == {0, 1, 2, 9}, "what fits is handled")

        async def found() -> dict[bytes, str]:
            page = await app.broker.aside("billing").scan(Filter(states=frozenset({State.DEAD})), None, 100)
            return {each.event.value or b"": each.failure.reason for each in page.records if each.failure}

        async def are_dead() -> bool:
            return await found() == dict.fromkeys((b"\xff\xfe", b"no order", b""), "undecodable")

        await eventually(are_dead, "what does not fit is a dead letter, with its own bytes")
    assert sorted(n for n, _ in seen) == [0, 1, 2, 9]
    headers = next(headers for n, headers in seen if n == 2)
    assert headers["n"] == "7"
