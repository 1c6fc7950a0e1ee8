"""RabbitMQ: one single node, with its own Erlang port mapper."""

import socket

from tests.servers.needs import RABBITMQ
from tests.servers.server import PROBE_S, Server, free_port

AMQP_0_9_1 = b"AMQP\x00\x00\x09\x01"
METHOD_FRAME = b"\x01"


class RabbitMQServer(Server):
    name = "RabbitMQ"
    address = "amqp://guest:guest@127.0.0.1:{port}/"

    def __init__(self) -> None:
        super().__init__()
        self._dist_port, self._epmd_port = free_port(), free_port()

    def prepare(self) -> None:
        (self.folder / "rabbitmq.conf").write_text(
            f"loopback_users = none\nlisteners.tcp.1 = {self.host}:{self.port}\n"
        )
        (self.folder / "enabled_plugins").write_text("[].\n")
        (self.folder / "rabbitmq-env.conf").touch()

    def environment(self) -> dict[str, str]:
        folder = self.folder
        return {
            **super().environment(),
            "RABBITMQ_NODENAME": "onward@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_ALLOW_INPUT": "yes",  # so that the script becomes the server, instead of its parent
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput -kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": self.host,
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
        }

    def command(self) -> list[str]:
        return [str(RABBITMQ.path)]

    def probe(self) -> None:
        """Over a plain socket, because the client is async and a probe may run inside a loop."""
        with socket.create_connection((self.host, self.port), PROBE_S) as connection:
            connection.sendall(AMQP_0_9_1)
            if connection.recv(1) != METHOD_FRAME:
                raise ConnectionError("no answer to the AMQP header")
