"""Topics and groups whose names another program uses, and groups as operators see them."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

from onward import Onward, TopicSpec
from onward.brokers.base import GroupSpec, Topology
from onward.brokers.rabbitmq import Binding, Exchange, Queue
from onward.errors import BrokerError, PublishError
from onward.testing.failure_shop import until
from tests.brokers.rabbitmq.stage import played
from tests.brokers.rabbitmq.test_work_app import Desk
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

MAIL = GroupSpec("orders", "mail", "none", "latest")
DURABLE: dict[str, Any] = {"durable": True, "auto_delete": False}


class Place:
    """A virtual host, in which another program creates things."""

    def __init__(self, server: RabbitMQServer, vhost: str) -> None:
        self.server = server
        self.vhost = vhost
        self.url = server.url_of(vhost)

    def queue(self, name: str, kind: str) -> None:
        arguments = {"arguments": {"x-queue-type": kind}}
        self.server.ask("PUT", f"/api/queues/{self.vhost}/{quote(name, safe='')}", DURABLE | arguments)

    def exchange(self, name: str, kind: str) -> None:
        self.server.ask("PUT", f"/api/exchanges/{self.vhost}/{name}", DURABLE | {"type": kind})

    def names(self) -> set[str]:
        return {name for name in self.server.queues(self.vhost) if name != "onward.registry"}


@pytest.fixture
def place(rabbitmq_server: RabbitMQServer) -> Iterator[Place]:
    with rabbitmq_server.vhost() as vhost:
        yield Place(rabbitmq_server, vhost)


@played
async def test_an_exchange_that_was_not_declared_gets_no_topic_of_its_name(place: Place) -> None:
    """Its events would go to the topic, and not to the queues of the exchange."""
    place.exchange("notifications", "topic")
    async with Onward(place.url) as app:
        with pytest.raises(PublishError, match=r"there is no topic notifications, but an exchange.*Exchange\('notif"):
            await app.publish("notifications", 1)
        with pytest.raises(BrokerError, match="there is no topic notifications"):
            await app.broker.subscribe(["notifications"], group="g", member="m", ordering="key", start="earliest")
        wanted = Topology([TopicSpec("notifications", 2)])
        for apply in (False, True):
            (change,) = await app.broker.declare(wanted, apply=apply)
            assert (change.what, change.action) == ("topic notifications", "refuse")
            assert "there is no topic notifications" in change.detail
    assert not place.names()


CONFLICTS: dict[str, tuple[Callable[[Place], None], Topology, str]] = {
    "work queue": (
        lambda place: place.queue("onward.orders:mail:work", "classic"),
        Topology(groups=[MAIL]),
        "queue onward.orders:mail:work",
    ),
    "token queue": (
        lambda place: place.queue("onward.orders:billing:1.token", "classic"),
        Topology(groups=[GroupSpec("orders", "billing")]),
        "queue onward.orders:billing:1.token",
    ),
    "stream": (
        lambda place: place.queue("onward.new.1", "quorum"),
        Topology([TopicSpec("new", 2)]),
        "queue onward.new.1",
    ),
    "exchange": (
        lambda place: place.exchange("onward.new", "fanout"),
        Topology([TopicSpec("new", 2)]),
        "exchange onward.new",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS)
@played
async def test_a_plan_refuses_what_apply_would_refuse(place: Place, case: str) -> None:
    create, wanted, what = CONFLICTS[case]
    async with Onward(place.url, partitions=2) as app:
        await app.publish("orders", 1)  # creates the topic
        create(place)
        before = place.names()
        (change,) = await app.broker.declare(wanted, apply=False)
        assert change.action == "refuse"
        assert what in change.detail
        assert "delete it at the server, or use another name" in change.detail
        assert place.names() == before, "a plan creates nothing"


@played
async def test_a_plan_refuses_a_handler_that_no_member_could_run(place: Place) -> None:
    asks = MAIL.asks.__class__(timeout_s=None)
    async with Onward(place.url) as app:
        (change,) = await app.broker.declare(
            Topology(groups=[GroupSpec("orders", "mail", "none", "latest", asks)]), apply=False
        )
    assert change.action == "refuse"
    assert "timeout_s=None" in change.detail


@played
async def test_operators_see_how_many_events_of_a_work_group_wait(place: Place) -> None:
    async with Desk(place.url, declared={"tiers": {"critical": "urgent.*"}}).open():
        pass
    async with Onward(place.url) as app:
        for n, type_ in enumerate(["urgent.a", "urgent.b", "plain"]):
            await app.publish("orders", {"n": n}, type=type_)
        (info,) = await app.broker.groups("orders")
        assert [(each.watermark, each.end) for each in info.partitions.values()] == [(0, 3)]
    async with Desk(place.url, declared={"tiers": {"critical": "urgent.*"}}).open() as desk:
        await until(lambda: len(desk.done) == 3, "all are handled")
    async with Onward(place.url) as app:
        (info,) = await app.broker.groups("orders")
        assert [(each.watermark, each.end) for each in info.partitions.values()] == [(0, 0)]


@played
async def test_every_tier_has_a_depth(place: Place) -> None:
    async with Desk(place.url, declared={"tiers": {"critical": "urgent.*"}}).open() as desk:
        queues = {f'queue="onward.orders:billing:work{tier}"' for tier in ("", ".critical")}

        def are_known() -> bool:
            lines = [each for each in desk.app.metrics().splitlines() if each.startswith("onward_queue_depth{")]
            return queues <= {line.partition("{")[2].partition("}")[0] for line in lines}

        await until(are_known, "all depths are known")


@played
async def test_a_declared_queue_that_was_deleted_is_declared_again_with_its_binding(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    app = Onward(place.url, drain_timeout_s=5.0)
    app.topology(Exchange("shop", "topic"), Queue("billing"), Binding("shop", "billing", "#"))
    done: list[int] = []

    @app.handler("shop", group="billing", ordering="none")
    async def bill(n: int) -> None:
        done.append(n)

    async with app.running():
        await app.publish("shop", 1, type="placed")
        await until(lambda: done == [1], "the event is handled")
        await asyncio.to_thread(place.server.delete_queue, place.vhost, "billing")
        await until(lambda: not app.health().ready, "readiness ends")
        await until(lambda: app.health().ready, "readiness is back")
        await app.publish("shop", 2, type="placed")
        await until(lambda: done == [1, 2], "the event is handled")
    assert "queue billing was missing and is declared again" in caplog.text
