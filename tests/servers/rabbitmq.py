"""RabbitMQ: one single node with its own Erlang port mapper, a listener with TLS and the management plugin."""

import base64
import http.client
import json
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit
from uuid import uuid4

import trustme

from tests.servers.needs import RABBITMQ
from tests.servers.server import PROBE_S, Server, ServerFailed, free_port, until

AMQP_0_9_1 = b"AMQP\x00\x00\x09\x01"
METHOD_FRAME = b"\x01"
ANSWER_S = 60.0
MANAGEMENT = "rabbitmq_management"
_USER = "guest"
_FIRST = "first-stream"
_LOGIN = "Basic " + base64.b64encode(f"{_USER}:{_USER}".encode()).decode()
_ALL = {"configure": ".*", "write": ".*", "read": ".*"}


class Unanswered(Exception):
    """The management API answered with an error."""


class RabbitMQServer(Server):
    name = "RabbitMQ"
    address = "amqp://guest:guest@127.0.0.1:{port}/"
    erlang_options: ClassVar[Sequence[str]] = ("-noinput", "-kernel inet_dist_use_interface {127,0,0,1}")

    def __init__(
        self,
        *,
        plugins: Sequence[str] = (MANAGEMENT,),
        config: Sequence[str] = (),
        node: str = "onward",
        epmd_port: int | None = None,
    ) -> None:
        """`config`: more lines of its rabbitmq.conf. `epmd_port`: of the port mapper that the nodes of a cluster share;
        None: the node starts one of its own."""
        super().__init__()
        self.node = f"{node}@localhost"
        self.management_port = free_port() if MANAGEMENT in plugins else 0
        self.secure_port = free_port()
        self._plugins, self._config = plugins, config
        self._dist_port, self._epmd_port = free_port(), epmd_port or free_port()

    @property
    def inside(self) -> Path:
        """Its folder, as the node sees it."""
        return self.folder

    @property
    def authority(self) -> Path:
        """The certificate by which a client checks the listener with TLS."""
        return self.folder / "cacert.pem"

    def prepare(self) -> None:
        self._make_certificates()
        lines = [
            "loopback_users = none",
            f"listeners.tcp.1 = {self.host}:{self.port}",
            f"listeners.ssl.1 = {self.host}:{self.secure_port}",
            *(f"ssl_options.{kind}file = {self.inside}/{kind}.pem" for kind in ("cacert", "cert", "key")),
            "ssl_options.verify = verify_peer",
            "ssl_options.fail_if_no_peer_cert = false",
        ]
        if self.management_port:
            lines += [
                f"management.tcp.ip = {self.host}",
                f"management.tcp.port = {self.management_port}",
                "collect_statistics_interval = 1000",
            ]
        (self.folder / "rabbitmq.conf").write_text("\n".join((*lines, *self._config, "")))
        (self.folder / "enabled_plugins").write_text(f"[{','.join(self._plugins)}].\n")
        (self.folder / "rabbitmq-env.conf").touch()

    def _make_certificates(self) -> None:
        """Also one for a client."""
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.authority)
        for who, prefix in ((self.host, ""), ("client.test", "client-")):
            issued = authority.issue_cert(who)
            issued.private_key_pem.write_to_path(self.folder / f"{prefix}key.pem")
            issued.cert_chain_pems[0].write_to_path(self.folder / f"{prefix}cert.pem")

    def environment(self) -> dict[str, str]:
        folder = self.inside
        return {
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "LANG": "C.UTF-8",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_ALLOW_INPUT": "yes",  # so that the script becomes the server, instead of its parent
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": " ".join(self.erlang_options),
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
        """Over plain sockets, because the client is async and a probe may run inside a loop."""
        with socket.create_connection((self.host, self.port), PROBE_S) as connection:
            connection.sendall(AMQP_0_9_1)
            if connection.recv(1) != METHOD_FRAME:
                raise ConnectionError("no answer to the AMQP header")
        if self.management_port:
            self.ask("GET", "/api/overview", timeout_s=PROBE_S)

    def start(self) -> None:
        first = not self.pid
        super().start()
        if first and self.management_port:
            self.declare_first_stream()

    def heal(self) -> None:
        """Return when its streams are back as well."""
        pid = self.pid
        super().heal()
        if self.management_port and self.pid != pid:
            self.until_streams_are_back()

    def until_streams_are_back(self) -> None:
        """They are back a few seconds later than the rest of the node."""
        until(self._stores, ANSWER_S, f"{self.name} does not bring its streams back", self.log)

    def declare_first_stream(self) -> None:
        """So that no test declares the first one: see until_durable."""
        arguments = {"x-queue-type": "stream"}
        self.ask("PUT", f"/api/queues/%2F/{_FIRST}", {"durable": True, "arguments": arguments})
        self.until_durable("/")

    def _stores(self) -> bool:
        message = {"properties": {}, "routing_key": _FIRST, "payload": "", "payload_encoding": "string"}
        return bool(self.ask("POST", "/api/exchanges/%2F/amq.default/publish", message, timeout_s=PROBE_S)["routed"])

    # -- what an operator does ----------------------------------------------------------------------------------------

    def until_durable(self, vhost: str) -> None:
        """Wait until all queues of the virtual host survive a kill. A node that is killed in the first second of a
        quorum queue does not know the queue's log again; in that of its first stream, it loses all its streams."""
        queues = self.queues(vhost).values()
        names = [f"{quote(vhost, safe='')}_{each['name']}" for each in queues if each["type"] == "quorum"]
        names += ["rabbit_stream_coordinator"] if any(each["type"] == "stream" for each in queues) else []

        def known() -> bool:
            saved = b"".join(path.read_bytes() for path in self.folder.glob("mnesia/*/*/*/names.dets"))
            return all(name.encode() in saved for name in names)

        until(known, ANSWER_S, f"{self.name} does not save the names of its queues", self.log)

    @property
    def management_url(self) -> str:
        return f"http://{_USER}:{_USER}@{self.host}:{self.management_port}"

    @property
    def secure_url(self) -> str:
        return f"amqps://{_USER}:{_USER}@{self.host}:{self.secure_port}/"

    def url_of(self, vhost: str, url: str | None = None) -> str:
        """The URL of the virtual host, here or at the `url` of a proxy or of another listener."""
        return f"{urlsplit(url or self.url)._replace(path='').geturl()}/{quote(vhost, safe='')}"

    @contextmanager
    def vhost(self) -> Iterator[str]:
        """The name of a new virtual host, which is deleted with everything in it: a test is alone there."""
        name = f"test-{uuid4().hex[:12]}"
        self.add_vhost(name)
        try:
            yield name
        finally:
            self.heal()
            self.ask("DELETE", f"/api/vhosts/{name}")

    def add_vhost(self, name: str, user: str = _USER) -> None:
        self.ask("PUT", f"/api/vhosts/{quote(name, safe='')}")
        self.ask("PUT", f"/api/permissions/{quote(name, safe='')}/{user}", _ALL)

    def queues(self, vhost: str) -> dict[str, dict[str, Any]]:
        """The queues of the virtual host by name, as the management API describes them."""
        found: dict[str, dict[str, Any]] = {}

        def listed() -> bool:
            """It fails while a queue is being declared or deleted."""
            found.update({each["name"]: each for each in self.ask("GET", f"/api/queues/{quote(vhost, safe='')}")})
            return True

        until(listed, ANSWER_S, f"{self.name} does not list its queues", self.log)
        return found

    def delete_queue(self, vhost: str, name: str) -> None:
        self.ask("DELETE", f"/api/queues/{quote(vhost, safe='')}/{quote(name, safe='')}")

    def close_connections(self, vhost: str) -> int:
        """Close all connections to the virtual host, as an operator does. Returns how many there were. The management
        API would not list those of the last moments."""
        count = self.ctl("list_connections", "vhost").splitlines().count(vhost)
        if count:
            self.ctl("close_all_connections", "--vhost", vhost, "closed by an operator")
        return count

    def alarm(self, *, on: bool) -> None:
        """Raise the memory alarm, or clear it. The server blocks all connections that publish while it is on."""
        self.ctl("set_vm_memory_high_watermark", "0.000001" if on else "0.4")

    @contextmanager
    def alarmed(self) -> Iterator[None]:
        self.alarm(on=True)
        try:
            yield
        finally:
            self.alarm(on=False)

    def ask(self, method: str, path: str, body: object = None, *, timeout_s: float = ANSWER_S) -> Any:
        """The decoded answer of the management API. Raises Unanswered if it is an error; 404 to DELETE is none."""
        connection = http.client.HTTPConnection(self.host, self.management_port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            headers = {"Authorization": _LOGIN, "Content-Type": "application/json"}
            connection.request(method, path, payload, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status >= 400 and (method, answer.status) != ("DELETE", 404):
            raise Unanswered(f"{method} {path}: {answer.status} {text.decode(errors='replace')}")
        return json.loads(text) if text else None

    def ctl(self, *arguments: str) -> str:
        """The output of rabbitmqctl, which takes about a second."""
        done = subprocess.run(
            [*self.tool("rabbitmqctl"), "--quiet", *arguments],
            env=os.environ | self.environment(),
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
        if done.returncode:
            raise ServerFailed(f"rabbitmqctl {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def tool(self, name: str) -> list[str]:
        """The command that runs a program of the server's package."""
        return [str(RABBITMQ.path.with_name(name))]
