"""A Redis Cluster: three masters, each with a replica."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis.cluster import RedisCluster as ClusterClient

from tests.servers.proxy import HOST
from tests.servers.redis import RedisServer
from tests.servers.server import READY_S, free_port, together, until

SLOTS = 16_384
MASTERS = 3
NODE_TIMEOUT_MS = 1_500
MIGRATE_MS = 5_000
KEYS_AT_ONCE = 100


class RedisNode(RedisServer):
    """One node of a cluster."""

    def __init__(self) -> None:
        bus_port = free_port()
        super().__init__(
            *("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
            *("--cluster-port", str(bus_port), "--cluster-allow-replica-migration", "no"),
            *("--repl-diskless-sync-delay", "0"),
        )
        self.bus_port = bus_port

    @property
    def id(self) -> str:
        return str(self.cluster("MYID").decode())

    def cluster(self, *words: object) -> Any:
        """The answer to the command CLUSTER with these words."""
        with self.client() as client:
            return client.execute_command("CLUSTER", *words)

    def sees(self) -> "View":
        """The cluster as this node sees it."""
        with self.client() as client:
            nodes: Any = client.cluster("NODES")
            info: Any = client.cluster("INFO")
            replication: Any = client.info("replication")
        return View(nodes, is_ok=info["cluster_state"] == "ok", link=replication.get("master_link_status", "up"))


@dataclass(frozen=True)
class View:
    """What one node knows: the nodes by address, whether it serves requests, and the link to its master."""

    nodes: dict[str, Any]
    is_ok: bool
    link: str

    def slots(self) -> list[tuple[int, int, int]]:
        """The first slot, the last slot and the owner's port, of each run of slots."""
        runs = [(*run, port_of(address)) for address, node in self.nodes.items() for run in node["slots"]]
        return sorted((int(first), int((last or [first])[0]), port) for first, *last, port in runs)

    def owner(self, slot: int) -> int:
        """The port of the slot's master."""
        return next(port for first, last, port in self.slots() if first <= slot <= last)

    def masters(self) -> set[int]:
        """The ports of the masters that have slots."""
        return {port for _, _, port in self.slots()}

    def replicas(self) -> dict[int, int]:
        """The port of each replica's master, by the port of the replica."""
        ports = {node["node_id"]: port_of(address) for address, node in self.nodes.items()}
        return {
            ports[node["node_id"]]: ports.get(node["master_id"], 0)
            for node in self.nodes.values()
            if "slave" in node["flags"].split(",")
        }

    def knows(self, count: int) -> bool:
        """It is in touch with so many nodes, and takes none of them for dead."""
        flags = {flag for node in self.nodes.values() for flag in node["flags"].split(",")}
        return len(self.nodes) == count and flags <= {"myself", "master", "slave"}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


class RedisCluster:
    """Six nodes. To kill and restart one, use its own methods: `cluster.owner(slot).kill()`."""

    def __init__(self) -> None:
        self.nodes = [RedisNode() for _ in range(2 * MASTERS)]

    @property
    def url(self) -> str:
        """The address of one node that runs."""
        return f"redis+cluster://{HOST}:{self._running()[0].port}"

    def client(self, timeout_s: float = 10.0) -> ClusterClient:
        """A client that finds the owner of each key."""
        return ClusterClient(host=HOST, port=self._running()[0].port, socket_timeout=timeout_s)

    def start(self) -> None:
        """Start the nodes, give each master a third of the slots, and wait until all six know all."""
        together(self.nodes, RedisNode.start)
        first, masters = self.nodes[0], self.nodes[:MASTERS]
        for number, node in enumerate(self.nodes):
            node.cluster("SET-CONFIG-EPOCH", number + 1)
            if node is not first:
                first.cluster("MEET", node.host, node.port, node.bus_port)
        for number, master in enumerate(masters):
            ends = [SLOTS * end // MASTERS for end in (number, number + 1)]
            master.cluster("ADDSLOTSRANGE", ends[0], ends[1] - 1)
        self._until(lambda: all(view.knows(len(self.nodes)) for view in self._views()), "its nodes do not meet")
        for master, replica in zip(masters, self.nodes[MASTERS:], strict=True):
            replica.cluster("REPLICATE", master.id)
        self.heal()

    def heal(self) -> None:
        """Bring back the nodes that a test left dead, and return when all six know all and have copied all."""
        together(self.nodes, RedisNode.heal)
        self._until(self._is_whole, "it is not complete")

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def wait_until_ok(self) -> None:
        """Return when every running node serves requests, and all agree on the owners of the slots, which run."""
        self._until(self._is_ok, "it is not ok")

    def owner(self, slot: int) -> RedisNode:
        """The master of a slot. It may be dead: then the nodes have not found out yet."""
        (port,) = {view.owner(slot) for view in self._views()}
        return self._node(port)

    def masters(self) -> list[RedisNode]:
        """The nodes that have slots."""
        return [self._node(port) for port in self._views()[0].masters()]

    def replica(self, master: RedisNode) -> RedisNode:
        """The replica of a master."""
        replicas = master.sees().replicas()
        return next(self._node(port) for port, of in replicas.items() if of == master.port)

    def fail_over(self, slot: int) -> RedisNode:
        """Kill -9 the master of a slot, wait for its replica to take over, and return it."""
        self.owner(slot).kill()
        self.wait_until_ok()
        return self.owner(slot)

    def flush(self) -> None:
        """Delete every key."""
        for master in self.masters():
            with master.client() as client:
                client.flushall()

    @contextmanager
    def moving(self, slot: int, to: RedisNode) -> Iterator["SlotMove"]:
        """Move a slot to another master. Its keys stay until they are moved one by one, or the block ends."""
        source = self.owner(slot)
        to.cluster("SETSLOT", slot, "IMPORTING", source.id)
        source.cluster("SETSLOT", slot, "MIGRATING", to.id)
        move = SlotMove(slot, source, to)
        try:
            yield move
        finally:
            while keys := move.keys():
                move.move(*keys)
            for node in (to, source, *self.masters()):
                node.cluster("SETSLOT", slot, "NODE", to.id)
            self.wait_until_ok()

    def _running(self) -> list[RedisNode]:
        return [node for node in self.nodes if node.running and not node.paused]

    def _node(self, port: int) -> RedisNode:
        return next(node for node in self.nodes if node.port == port)

    def _views(self) -> list[View]:
        return [node.sees() for node in self._running()]

    def _is_ok(self) -> bool:
        views, running = self._views(), {node.port for node in self._running()}
        one = views[0]
        return one.masters() <= running and all(view.is_ok and view.slots() == one.slots() for view in views)

    def _is_whole(self) -> bool:
        views = self._views()
        masters = views[0].masters()
        return (
            self._is_ok()
            and len(masters) == MASTERS
            and all(view.knows(len(self.nodes)) and view.link == "up" for view in views)
            and all(set(view.replicas().values()) == masters for view in views)
        )

    def _until(self, done: Callable[[], bool], complaint: str) -> None:
        until(done, READY_S, f"a cluster of {len(self.nodes)} started, but {complaint}", self.nodes[0].log)


@dataclass(frozen=True)
class SlotMove:
    """A slot on its way from one master to another. A script whose keys are on both sides gets TRYAGAIN."""

    slot: int
    source: RedisNode
    target: RedisNode

    def keys(self) -> list[bytes]:
        """Some of the keys that have not moved yet."""
        return list(self.source.cluster("GETKEYSINSLOT", self.slot, KEYS_AT_ONCE))

    def move(self, *keys: str | bytes) -> None:
        """Move these keys."""
        with self.source.client() as client:
            client.migrate(self.target.host, self.target.port, list(keys), 0, MIGRATE_MS)
