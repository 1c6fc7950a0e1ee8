"""The HTTP API of the management plugin: what is read from it, and its errors in words."""

import asyncio
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import pytest

from onward import settings
from onward.brokers.rabbitmq import Binding
from onward.brokers.rabbitmq.address import RabbitAddress
from onward.brokers.rabbitmq.operate.management import ManagementApi, ManagementError, ManagementPlace
from onward.errors import BadSetting
from tests.servers.rabbitmq import RabbitMQServer


def api(url: str, vhost: str = "/", timeout_s: float = 5.0) -> ManagementApi:
    return ManagementApi(ManagementPlace.of(url, vhost=vhost, user="guest", password="guest"), timeout_s)


@pytest.mark.parametrize("vhost", ["/", "a/b %ä"])
def test_what_the_api_says(rabbitmq_server: RabbitMQServer, vhost: str) -> None:
    async def scene() -> None:
        found = api(rabbitmq_server.management_url, vhost)
        assert (await found.overview())["product_name"] == "RabbitMQ"
        (node,) = await found.nodes()
        assert node["name"] == rabbitmq_server.node
        assert (await found.feature_flags())["stream_queue"] == "enabled"
        assert {"amq.topic", "e/ é"} <= (await found.exchanges()).keys()
        queue = await found.queue("q/ é")
        assert queue is not None
        assert queue["type"] == "quorum"
        assert await found.queue("missing") is None
        assert {"name": "q/ é", "durable": True} in await found.queues(["name", "durable"])
        assert Binding("e/ é", "q/ é", "a.*") in await found.bindings()
        assert [each["name"] for each in await found.policies()] == ["limits"]
        assert [each["name"] for each in await found.operator_policies()] == ["most"]

    place = quote(vhost, safe="")
    exchange, queue = quote("e/ é", safe=""), quote("q/ é", safe="")
    if vhost != "/":
        rabbitmq_server.add_vhost(vhost)
    paths = {
        f"/api/exchanges/{place}/{exchange}": {"type": "topic", "durable": True},
        f"/api/queues/{place}/{queue}": {"durable": True, "arguments": {"x-queue-type": "quorum"}},
        f"/api/policies/{place}/limits": {"pattern": "^none$", "definition": {"max-length": 5}},
        f"/api/operator-policies/{place}/most": {"pattern": "^none$", "definition": {"max-length": 5}},
    }
    try:
        for path, body in paths.items():
            rabbitmq_server.ask("PUT", path, body)
        rabbitmq_server.ask("POST", f"/api/bindings/{place}/e/{exchange}/q/{queue}", {"routing_key": "a.*"})
        asyncio.run(scene())
    finally:
        for path in paths:
            rabbitmq_server.ask("DELETE", path)
        if vhost != "/":
            rabbitmq_server.ask("DELETE", f"/api/vhosts/{place}")


def test_all_pages_of_queues_are_read(rabbitmq_server: RabbitMQServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.brokers.rabbitmq.operate.management._PAGE", 2)
    with rabbitmq_server.vhost() as vhost:
        assert asyncio.run(api(rabbitmq_server.management_url, vhost).queues(["name"])) == []
        for number in range(5):
            rabbitmq_server.ask("PUT", f"/api/queues/{vhost}/q{number}", {"durable": True})
        found = asyncio.run(api(rabbitmq_server.management_url, vhost).queues(["name"]))
        assert sorted(each["name"] for each in found) == [f"q{number}" for number in range(5)]


# -- errors ---------------------------------------------------------------------------------------------------------


def error(found: ManagementApi) -> str:
    with pytest.raises(ManagementError) as raised:
        asyncio.run(found.nodes())
    assert "secret" not in str(raised.value)
    return str(raised.value)


def test_a_wrong_password_and_a_user_without_the_tag_are_named(rabbitmq_server: RabbitMQServer) -> None:
    place = f"{rabbitmq_server.host}:{rabbitmq_server.management_port}"
    why = error(api(f"http://guest:secret@{place}"))
    assert "refuses the user" in why
    assert "set_user_tags USER monitoring" in why
    rabbitmq_server.ask("PUT", "/api/users/plain", {"password": "secret", "tags": ""})
    try:
        assert "refuses the user" in error(api(f"http://plain:secret@{place}"))
    finally:
        rabbitmq_server.ask("DELETE", "/api/users/plain")


def test_a_server_without_the_plugin_is_named_with_the_cure() -> None:
    why = error(api("http://guest:secret@127.0.0.1:1"))
    assert "the management API at http://127.0.0.1:1 does not answer" in why
    assert "rabbitmq-plugins enable rabbitmq_management" in why


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server that gives every request this answer."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Print nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_another_server_is_not_mistaken_for_it() -> None:
    with answering(200, b"<html>") as url:
        assert "does not answer in JSON; does management_url name another server?" in error(api(url))
    with answering(500, b"{}") as url:
        assert "answers 500 to /api/nodes" in error(api(url))
    with answering(301, b"") as url:
        assert "answers 301" in error(api(url))


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.brokers.rabbitmq.operate.management._LARGEST_BYTES", 100)
    with answering(200, b"[" + b" " * 1_000 + b"]") as url:
        assert "answers with over 100 bytes" in error(api(url))


def test_a_server_that_is_silent_costs_only_the_timeout(rabbitmq_server: RabbitMQServer) -> None:
    found = api(rabbitmq_server.management_url, timeout_s=0.3)
    rabbitmq_server.pause()
    try:
        assert "does not answer: timed out" in error(found)
    finally:
        rabbitmq_server.resume()


# -- the URL --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["ftp://host", "http://", "host:15672", "http://host:port"])
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(BadSetting, match="management_url"):
        api(url)


def test_user_and_password_come_from_the_broker_unless_the_url_has_them() -> None:
    def place(management_url: str) -> ManagementPlace | None:
        client = {"management_url": management_url}
        found = ManagementApi.of(RabbitAddress.of("amqp://anna:a%2Fb@host/v", settings.load(None, client=client)))
        return None if found is None else found.place

    own, given = place("http://host"), place("https://bob:b%20c@other:1234/prefix/")
    assert own is not None
    assert given is not None
    assert (own.port, own.vhost, own.login) == (15_672, "v", "Basic YW5uYTphL2I=")
    assert own.context is None
    assert (given.host, given.port, given.path, given.login) == ("other", 1234, "/prefix", "Basic Ym9iOmIgYw==")
    assert given.context is not None
    assert given.name == "https://other:1234"
    assert ManagementApi.of(RabbitAddress.of("amqp://host", settings.load(None))) is None
