"""Three RabbitMQ nodes in a cluster. Streams and quorum queues have a replica on each of them."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from tests.servers.needs import EPMD
from tests.servers.proxy import HOST
from tests.servers.rabbitmq import MANAGEMENT, RabbitMQServer
from tests.servers.server import PROBE_S, READY_S, Server, together, until

NODES = 3
TICK_S = 4  # a node that is silent for so long counts as lost
_COOKIE = "onward"


class PortMapper(Server):
    """The process that tells Erlang nodes each other's ports. It has to outlive each of the nodes."""

    name = "RabbitMQ"
    address = "epmd://127.0.0.1:{port}"

    def command(self) -> list[str]:
        return [str(EPMD.path), "-port", str(self.port), "-address", self.host]

    def probe(self) -> None:
        socket.create_connection((self.host, self.port), PROBE_S).close()


class ClusterNode(RabbitMQServer):
    erlang_options = (*RabbitMQServer.erlang_options, f"-kernel net_ticktime {TICK_S}")

    def __init__(self, number: int, mapper: PortMapper) -> None:
        peers = [f"cluster_formation.classic_config.nodes.{n} = node{n}@localhost" for n in range(1, NODES + 1)]
        config = [
            "cluster_formation.peer_discovery_backend = classic_config",
            "cluster_formation.randomized_startup_delay_range.min = 0",
            "cluster_formation.randomized_startup_delay_range.max = 1",
            "cluster_partition_handling = pause_minority",
            *peers,
        ]
        super().__init__(plugins=(MANAGEMENT,), config=config, node=f"node{number}", epmd_port=mapper.port)

    def prepare(self) -> None:
        super().prepare()
        cookie = self.folder / ".erlang.cookie"
        cookie.write_text(_COOKIE)
        cookie.chmod(0o400)

    def declare_first_stream(self) -> None:
        """Not yet: the node is still alone."""


class RabbitMQCluster:
    """Three nodes. Each can be killed, paused and restarted by its own methods."""

    def __init__(self) -> None:
        self.mapper = PortMapper()
        self.nodes = [ClusterNode(n, self.mapper) for n in range(1, NODES + 1)]

    @property
    def url(self) -> str:
        return self.url_of("/")

    def url_of(self, vhost: str, *first: ClusterNode) -> str:
        """The URL of the virtual host with the hosts of all nodes; the `first` ones are tried first."""
        nodes = [*first, *(node for node in self.nodes if node not in first)]
        hosts = ",".join(f"{HOST}:{node.port}" for node in nodes)
        return f"amqp://guest:guest@{hosts}/{quote(vhost, safe='')}"

    def start(self) -> None:
        self.mapper.start()
        together(self.nodes, ClusterNode.start)
        until(self._is_whole, READY_S, "the nodes do not form a cluster", self.nodes[0].log)
        RabbitMQServer.declare_first_stream(self.nodes[0])

    def heal(self) -> None:
        """Bring back what a test left dead or paused, and return when all nodes are in the cluster again."""
        self.mapper.heal()
        together(self.nodes, ClusterNode.heal)
        until(self._is_mended, READY_S, "the nodes do not form a cluster again", self.nodes[0].log)

    def close(self) -> None:
        for server in (*self.nodes, self.mapper):
            server.close()

    @contextmanager
    def vhost(self) -> Iterator[str]:
        """The name of a new virtual host, which is deleted with everything in it."""
        with self.nodes[0].vhost() as name:
            yield name
            self.heal()

    def leader(self, vhost: str, queue: str) -> ClusterNode:
        """The node with the leader of a stream or a quorum queue. The API knows it about a second later."""
        alive = next(node for node in self.nodes if node.running and not node.paused)
        names: set[str] = set()

        def known() -> bool:
            found = alive.queues(vhost)[queue]
            names.update({found.get("leader") or found.get("node", "")} - {""})
            return bool(names)

        until(known, READY_S, f"{queue} has no leader", alive.log)
        return next(node for node in self.nodes if node.node in names)

    def _is_whole(self) -> bool:
        views = [view for node in self.nodes for view in node.ask("GET", "/api/nodes")]
        return len(views) == NODES * NODES and all(view.get("partitions") == [] for view in views)

    def _is_mended(self) -> bool:
        """Whether all is well. A node that was paused, and which the others had given up, has to start again."""
        if self._is_whole():
            return True
        for node in self.nodes:
            (own,) = (view for view in node.ask("GET", "/api/nodes") if view["name"] == node.node)
            if len(own.get("partitions", ())) == NODES - 1:
                node.restart()
        return False
