"""Topology as code on a real server: planned, applied, and refused where the server has something else."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

import pika  # type: ignore[import-untyped]
import pytest

from onward.brokers.base import Change, Topology
from onward.brokers.rabbitmq import Binding, Exchange, Queue
from onward.brokers.rabbitmq.amqp import Connection
from onward.brokers.rabbitmq.operate.management import ManagementApi, ManagementPlace
from onward.brokers.rabbitmq.operate.topology import Declared
from onward.brokers.rabbitmq.operate.topology_server import declare
from tests.brokers.rabbitmq.abs import LITERAL, MENDED
from tests.brokers.rabbitmq.test_topology import joined
from tests.servers.rabbitmq import RabbitMQServer


class Place(NamedTuple):
    """A virtual host of a server, with the management API or without it."""

    server: RabbitMQServer
    vhost: str
    management: ManagementApi | None

    @asynccontextmanager
    async def connected(self, user: str = "guest") -> AsyncIterator[Connection]:
        connection = await Connection.open(
            self.server.host, self.server.port, vhost=self.vhost, user=user, password=user
        )
        try:
            yield connection
        finally:
            await connection.close()

    async def declare(self, *objects: object, apply: bool, user: str = "guest", **options: Any) -> list[Change]:
        async with self.connected(user) as connection:
            declared = Declared.of(Topology(own=objects))
            return await declare(connection, declared, apply=apply, management=self.management, **options)

    def plan(self, *objects: object, **options: Any) -> list[Change]:
        return asyncio.run(self.declare(*objects, apply=False, **options))

    def apply(self, *objects: object, **options: Any) -> list[Change]:
        return asyncio.run(self.declare(*objects, apply=True, **options))

    def pika(self) -> pika.BlockingConnection:
        return pika.BlockingConnection(pika.URLParameters(self.server.url_of(self.vhost)))

    def names(self) -> set[str]:
        """All queues and exchanges but those of the server."""
        exchanges = self.server.ask("GET", f"/api/exchanges/{quote(self.vhost, safe='')}")
        own = {each["name"] for each in exchanges if each["name"] and not each["name"].startswith("amq.")}
        return own | set(self.server.queues(self.vhost))


def management(server: RabbitMQServer, vhost: str) -> ManagementApi:
    return ManagementApi(ManagementPlace.of(server.management_url, vhost=vhost, user="", password=""))


@pytest.fixture(params=["over AMQP", "with the management API"])
def place(request: pytest.FixtureRequest, rabbitmq_server: RabbitMQServer) -> Iterator[Place]:
    with rabbitmq_server.vhost() as vhost:
        api = management(rabbitmq_server, vhost) if "management" in request.param else None
        yield Place(rabbitmq_server, vhost, api)


def refused(changes: Sequence[Change]) -> dict[str, str]:
    return joined([each for each in changes if each.action == "refuse"])


@pytest.mark.parametrize("objects", [MENDED, LITERAL], ids=["mended", "literal"])
def test_the_whole_seed_is_planned_applied_and_then_there_is_nothing_to_do(place: Place, objects: list[object]) -> None:
    planned = place.plan(*objects)
    assert not refused(planned)
    assert place.names() == set(), "a plan creates nothing"
    assert place.apply(*objects) == planned
    assert place.plan(*objects) == []
    assert place.apply(*objects) == []


def test_the_routes_of_the_seed_lead_to_its_queues(place: Place) -> None:
    """Each routing key leads to one queue, also comparison.retry and notification.*.critical, which led nowhere."""
    place.apply(*MENDED)
    expected = {
        ("abs.comparison", "comparison.process"): "abs.comparison.process",
        ("abs.comparison", "comparison.retry"): "abs.comparison.process",
        ("abs.notification", "notification.slack.info"): "abs.notification.slack",
        ("abs.notification", "notification.slack.critical"): "abs.notification.slack.critical",
        ("abs.notification", "notification.email.critical"): "abs.notification.email.critical",
        ("abs.stats", "anything"): "abs.stats.aggregate",
        ("abs.comparison.dlx", "comparison.failed"): "abs.comparison.dlq",
        ("abs.notification.dlx", "notification.slack.critical"): "abs.notification.dlq",
    }
    connection = place.pika()
    channel = connection.channel()
    channel.confirm_delivery()
    for exchange, key in expected:
        channel.basic_publish(exchange, key, f"{exchange} {key}".encode(), mandatory=True)
    found: dict[tuple[str, ...], str] = {}
    for queue in set(expected.values()):
        while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
            found[tuple(got[2].decode().split(" "))] = queue
    assert found == expected
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish("abs.comparison", "comparison.unknown", b"", mandatory=True)
    connection.close()


def test_a_rejected_message_reaches_the_dead_letter_queue(place: Place) -> None:
    place.apply(*MENDED)
    connection = place.pika()
    channel = connection.channel()
    channel.basic_publish("abs.comparison", "comparison.process", b"broken")
    tag = _eventually(lambda: channel.basic_get("abs.comparison.process"))[0].delivery_tag
    channel.basic_nack(tag, requeue=False)
    assert _eventually(lambda: channel.basic_get("abs.comparison.dlq", auto_ack=True))[2] == b"broken"
    connection.close()


def _eventually(get: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while (found := get())[0] is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


# -- drift ----------------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "x-message-ttl": (30_000, 60_000),
    "x-dead-letter-exchange": ("amq.fanout", "amq.topic"),
    "x-dead-letter-routing-key": ("q", "other"),
    "x-max-length": (100, 200),
    "x-max-length-bytes": (1_000, 2_000),
    "x-overflow": ("reject-publish", "drop-head"),
    "x-delivery-limit": (1_000_000_000, 5),
    "x-dead-letter-strategy": ("at-least-once", "at-most-once"),
    "x-single-active-consumer": (True, False),
    "x-expires": (3_600_000, 60_000),
}
BASE = {name: here for name, (here, _) in ARGUMENTS.items()}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("how", ["other", "absent"])
def test_each_argument_that_differs_is_named(place: Place, name: str, how: str) -> None:
    there = BASE | {name: ARGUMENTS[name][1]} if how == "other" else {k: v for k, v in BASE.items() if k != name}
    if name == "x-dead-letter-exchange" and how == "absent":  # the others need it
        there = {k: v for k, v in there.items() if not k.startswith("x-dead-letter")}
    elif name == "x-overflow":  # needed for at-least-once
        there["x-dead-letter-strategy"] = "at-most-once"
    connection = place.pika()
    connection.channel().queue_declare("q", durable=True, arguments={"x-queue-type": "quorum", **there})
    connection.close()
    wanted = [Queue("q", arguments=BASE, may_lose=True), Binding("amq.fanout", "q")]
    for found in (place.plan(*wanted), place.apply(*wanted)):
        live = "not set" if how == "absent" else str(ARGUMENTS[name][1]).lower()
        assert f"{name} is {live} there and {str(BASE[name]).lower()} here" in refused(found)["queue q"]
        assert "cannot be changed later" in refused(found)["queue q"]


def test_all_arguments_that_differ_are_named_at_once(place: Place) -> None:
    place.apply(Queue("q", max_length=5))
    detail = refused(place.plan(Queue("q", "classic", max_length=7)))["queue q"]
    for words in (
        "x-queue-type is quorum there and classic here",
        "x-max-length is 5 there and 7 here",
        "x-delivery-limit is 1000000000 there and not set here",
    ):
        assert words in detail


def test_an_exchange_of_another_kind_is_refused(place: Place) -> None:
    place.apply(Exchange("strays", "fanout"), Exchange("e", "topic", alternate="strays"))
    wanted = [Exchange("e", "direct"), Exchange("other"), Queue("q"), Binding("e", "q", "k"), Binding("other", "q")]
    found = place.apply(*wanted)
    assert set(refused(found)) == {"exchange e"}
    assert "type is topic there and direct here" in refused(found)["exchange e"]
    assert "alternate-exchange is strays there and not set here" in refused(found)["exchange e"]
    assert place.names() == {"strays", "e", "other", "q"}


def test_a_queue_that_is_not_durable_is_refused(place: Place) -> None:
    connection = place.pika()
    connection.channel().queue_declare("q", durable=False, arguments={"x-queue-type": "classic"})
    assert "durable is false there and true here" in refused(place.plan(Queue("q", "classic")))["queue q"]
    connection.close()


def test_a_missing_dead_letter_route_is_refused_and_nothing_is_made_of_it(place: Place) -> None:
    queue = Queue("q", dead_letter_exchange="dlx", dead_letter_key="failed")
    for objects in ([queue], [queue, Exchange("dlx", "direct")]):
        assert "would be lost" in refused(place.apply(*objects))["queue q"]
    assert place.names() == {"dlx"}
    assert not refused(place.apply(queue, Exchange("dlx", "direct"), Queue("dlq"), Binding("dlx", "dlq", "failed")))


def test_a_binding_to_nothing_is_refused(place: Place) -> None:
    binding = Binding("e", "nowhere")
    assert "queue nowhere does not exist" in refused(place.apply(Exchange("e"), binding))[str(binding)]


def test_a_missing_binding_is_made_again(place: Place) -> None:
    objects = [Exchange("e"), Queue("q"), Binding("e", "q", "a.*")]
    place.apply(*objects)
    connection = place.pika()
    channel = connection.channel()
    channel.queue_unbind("q", "e", "a.*")
    planned = place.plan(*objects)
    if place.management is not None:
        assert [each.what for each in planned] == [str(objects[2])]
    else:
        assert planned == [], "over AMQP nobody can know"
    place.apply(*objects)
    channel.confirm_delivery()
    channel.basic_publish("e", "a.b", b"", mandatory=True)
    connection.close()


def test_bindings_of_a_headers_exchange_differ_by_their_arguments(place: Place) -> None:
    bindings = [Binding("e", "q", arguments={"x-match": "all", "kind": kind}) for kind in ("one", "two")]
    objects = [Exchange("e", "headers"), Queue("q"), *bindings]
    assert len([each for each in place.apply(*objects) if "binding" in each.what]) == 2
    assert place.plan(*objects) == []


# -- what may not be asked ------------------------------------------------------------------------------------------


def test_without_compare_the_questions_are_passive(rabbitmq_server: RabbitMQServer) -> None:
    """So a user without the permission to configure can run the application."""
    with rabbitmq_server.vhost() as vhost:
        place = Place(rabbitmq_server, vhost, None)
        place.apply(*MENDED)
        _add_user(rabbitmq_server, vhost, "runner", configure="^$")
        try:
            assert place.plan(*MENDED, compare=False, user="runner") == []
            assert [each.what for each in place.plan(Queue("missing"), compare=False, user="runner")] == [
                "queue missing"
            ]
            assert place.plan(Queue("abs.stats.aggregate", max_length=1), compare=False, user="runner") == []
        finally:
            rabbitmq_server.ask("DELETE", "/api/users/runner")


def test_a_user_without_permission_gets_the_refusal_in_words(
    rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture
) -> None:
    with rabbitmq_server.vhost() as vhost:
        place = Place(rabbitmq_server, vhost, None)
        place.apply(Queue("there"))
        _add_user(rabbitmq_server, vhost, "runner", configure="^$")
        try:
            found = refused(place.apply(Queue("q"), user="runner"))["queue q"]
            assert "RabbitMQ refused it: ACCESS_REFUSED" in found
            assert place.plan(Queue("there", max_length=5), user="runner") == []
            assert "queue there exists; this user may not configure it" in caplog.text
        finally:
            rabbitmq_server.ask("DELETE", "/api/users/runner")


def _add_user(server: RabbitMQServer, vhost: str, name: str, *, configure: str) -> None:
    server.ask("PUT", f"/api/users/{name}", {"password": name, "tags": ""})
    rights = {"configure": configure, "write": ".*", "read": ".*"}
    server.ask("PUT", f"/api/permissions/{quote(vhost, safe='')}/{name}", rights)


def test_without_its_management_api_the_server_is_asked_over_amqp(
    rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture
) -> None:
    with rabbitmq_server.vhost() as vhost:
        nobody = ManagementPlace.of("http://127.0.0.1:1", vhost=vhost, user="", password="")
        place = Place(rabbitmq_server, vhost, ManagementApi(nobody))
        assert not refused(place.apply(*MENDED))
        assert "comparing the topology without the management API" in caplog.text
        assert place.plan(*MENDED) == []


def test_two_programs_may_apply_at_the_same_time(place: Place) -> None:
    async def both() -> None:
        found = await asyncio.gather(*[place.declare(*MENDED, apply=True) for _ in range(4)])
        assert not [each for changes in found for each in changes if each.action == "refuse"]

    asyncio.run(both())
    assert place.plan(*MENDED) == []
