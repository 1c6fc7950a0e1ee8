"""What the URL and the client settings say, and which errors they give."""

import asyncio
from pathlib import Path

import pytest

from onward import settings
from onward.brokers import open_broker
from onward.brokers.rabbitmq.address import RabbitAddress, RabbitHost
from onward.errors import BadSetting, BrokerError
from onward.testing.scenario import event
from tests.servers.rabbitmq import RabbitMQServer


def address(url: str, **client: object) -> RabbitAddress:
    loaded = settings.load(url, client=client or None)
    return RabbitAddress.of(loaded.url, loaded)


@pytest.mark.parametrize(
    ("url", "hosts", "vhost", "login"),
    [
        ("amqp://localhost", [("localhost", 5672)], "/", ("guest", "guest")),
        ("amqp://localhost/", [("localhost", 5672)], "/", ("guest", "guest")),
        ("amqps://localhost", [("localhost", 5671)], "/", ("guest", "guest")),
        ("amqp://u:p@h:1/shop", [("h", 1)], "shop", ("u", "p")),
        ("amqp://u%40x:p%2F%3A@h/%2F", [("h", 5672)], "/", ("u@x", "p/:")),
        ("amqp://u@h/a%2Fb", [("h", 5672)], "a/b", ("u", "")),
        ("amqp://a:1,b:2,c,a:1/v", [("a", 1), ("b", 2), ("c", 5672)], "v", ("guest", "guest")),
        ("amqp://[::1]:9,[::2]/v", [("::1", 9), ("::2", 5672)], "v", ("guest", "guest")),
    ],
)
def test_a_url_is_read(url: str, hosts: list[tuple[str, int]], vhost: str, login: tuple[str, str]) -> None:
    found = address(url)
    assert found.hosts == tuple(RabbitHost(*each) for each in hosts)
    assert (found.vhost, found.user, found.password) == (vhost, *login)
    assert found.is_encrypted == url.startswith("amqps")


def test_no_secret_is_shown() -> None:
    found = address("amqp://user:secret@host/v", management_url="http://user:secret@host:15672")
    assert "secret" not in f"{found!r} {found.name} {found}"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("amqp://", "write amqp://user"),
        ("amqp://host:port", "'host:port' is no host and port"),
        ("amqp://host:0", "no host and port"),
        ("amqp://host:70000", "no host and port"),
        ("amqp://a,,b", "no host and port"),
        ("amqp://host/a/b", "'/a/b' is no virtual host.*%2F"),
        ("amqp://host//", "for the virtual host / write no path"),
        ("amqp://host?heartbeat=3", r"a setting of the client library is written client\.heartbeat="),
    ],
)
def test_a_url_that_is_wrong_is_explained(url: str, words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        address(url)


@pytest.mark.parametrize(
    ("client", "words"),
    [
        ({"heartbeat": 1}, r"'heartbeat'.*did you mean 'heartbeat_s'"),
        ({"xyz": 1}, r"'xyz'.*use one of heartbeat_s, connect_timeout_s"),
        ({"heartbeat_s": "often"}, "^client heartbeat_s='often': use a number of seconds$"),
        ({"verify": "maybe"}, "^client verify='maybe': use true or false$"),
        ({"cluster_nodes": "x"}, "^client cluster_nodes='x': use a whole number$"),
        ({"cafile": 5}, "^client cafile=5: use text$"),
        ({"heartbeat_s": 1}, "use 2 to 600"),
        ({"connect_timeout_s": 0}, "more than 0"),
        ({"cafile": "x"}, "amqps://"),
        ({"verify": "false"}, "amqps://"),
        ({"cluster_nodes": 0}, "1 or more"),
        ({"management_url": "host:15672"}, "http://"),
    ],
)
def test_a_client_setting_that_is_wrong_is_explained(client: dict[str, object], words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        address("amqp://host", **client)


def test_client_settings_can_be_in_the_url() -> None:
    client = address("amqps://h?client.heartbeat_s=9&client.verify=false&client.certfile=a&client.keyfile=b").client
    assert (client.heartbeat_s, client.verify, client.certfile, client.keyfile) == (9.0, False, "a", "b")
    with pytest.raises(BadSetting, match="certfile"):
        address("amqps://h", keyfile="b")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"nothing\.pem"):
        asyncio.run(open_broker(settings.load("amqps://h", client={"cafile": str(tmp_path / "nothing.pem")})))


def opened(url: str, **options: object) -> None:
    async def both() -> None:
        broker = await open_broker(settings.load(url, **options))
        await broker.close()

    asyncio.run(both())


def published(url: str) -> None:
    async def both() -> None:
        broker = await open_broker(settings.load(url))
        try:
            await broker.publish([event("orders", "key", 1)])
        finally:
            await broker.close()

    asyncio.run(both())


@pytest.mark.servers
class TestOnAServer:
    def test_a_wrong_password_is_explained(self, rabbitmq_server: RabbitMQServer) -> None:
        with pytest.raises(BrokerError, match=r"ACCESS_REFUSED.*correct the user \(guest\) and the password") as raised:
            opened(rabbitmq_server.url.replace("guest:guest", "guest:wrong"))
        assert "wrong" not in str(raised.value)

    def test_a_missing_virtual_host_is_explained(self, rabbitmq_server: RabbitMQServer) -> None:
        with pytest.raises(BrokerError, match=r"nowhere.*rabbitmqctl add_vhost nowhere"):
            opened(rabbitmq_server.url_of("nowhere"))

    def test_a_user_without_access_to_the_virtual_host_is_explained(self, rabbitmq_server: RabbitMQServer) -> None:
        rabbitmq_server.ask("PUT", "/api/users/stranger", {"password": "p", "tags": ""})
        try:
            with pytest.raises(BrokerError, match=r"stranger.*rabbitmqctl set_permissions -p / stranger"):
                opened(rabbitmq_server.url.replace("guest:guest", "stranger:p"))
        finally:
            rabbitmq_server.ask("DELETE", "/api/users/stranger")

    def test_a_user_that_may_not_declare_is_explained(self, rabbitmq_server: RabbitMQServer) -> None:
        rabbitmq_server.ask("PUT", "/api/users/reader", {"password": "p", "tags": ""})
        with rabbitmq_server.vhost() as vhost:
            rights = {"configure": "", "write": "", "read": ".*"}
            rabbitmq_server.ask("PUT", f"/api/permissions/{vhost}/reader", rights)
            url = rabbitmq_server.url_of(vhost).replace("guest:guest", "reader:p")
            try:
                with pytest.raises(
                    BrokerError, match=r"onward\.registry.*ACCESS_REFUSED.*set_permissions.*docs/rabbitmq"
                ):
                    published(url)
            finally:
                rabbitmq_server.ask("DELETE", "/api/users/reader")

    def test_a_server_that_is_away_is_explained(self) -> None:
        with pytest.raises(BrokerError, match=r"cannot be reached.*start RabbitMQ"):
            opened("amqp://127.0.0.1:1", publish_timeout_s=0.5)

    def test_another_host_is_tried(self, rabbitmq_server: RabbitMQServer) -> None:
        with rabbitmq_server.vhost() as vhost:
            url = rabbitmq_server.url_of(vhost)
            opened(url.replace("@", "@127.0.0.1:1,"))

    def test_tls_is_checked(self, rabbitmq_server: RabbitMQServer) -> None:
        opened(rabbitmq_server.secure_url, client={"cafile": str(rabbitmq_server.authority)})
        opened(rabbitmq_server.secure_url, client={"verify": False})
        with pytest.raises(BrokerError, match="certificate"):
            opened(rabbitmq_server.secure_url, publish_timeout_s=0.5)
        with pytest.raises(BrokerError, match="amqp://, if the server has no TLS"):
            opened(rabbitmq_server.url.replace("amqp:", "amqps:"), publish_timeout_s=0.5)
