"""A Redis master, two replicas, and three Sentinels that promote a replica when the master is down for a second."""

from collections.abc import Callable
from typing import Any

from tests.servers.proxy import HOST
from tests.servers.redis import RedisServer
from tests.servers.server import READY_S, together, until

NAME = "mymaster"
NODES = 3
QUORUM = 2

CONFIG = """\
port {port}
bind {host}
dir {folder}
sentinel monitor {name} {host} {master_port} {quorum}
sentinel down-after-milliseconds {name} 1000
sentinel failover-timeout {name} 3000
sentinel parallel-syncs {name} {quorum}
"""


class RewritableRedis(RedisServer):
    """A Redis with a configuration file, in which Sentinel stores whose replica it is."""

    def __init__(self) -> None:
        super().__init__("--repl-diskless-sync-delay", "0")

    def prepare(self) -> None:
        (self.folder / "redis.conf").touch()

    def command(self) -> list[str]:
        program, *options = super().command()
        return [program, "redis.conf", *options]

    def replication(self) -> dict[str, Any]:
        """Its role, and the master of a replica."""
        with self.client() as client:
            info: Any = client.info("replication")
        return dict(info)


class SentinelServer(RedisServer):
    """One of the Sentinels."""

    def __init__(self, master: RedisServer) -> None:
        super().__init__()
        self._master = master

    def prepare(self) -> None:
        (self.folder / "sentinel.conf").write_text(
            CONFIG.format(
                name=NAME,
                host=self.host,
                port=self.port,
                folder=self.folder,
                master_port=self._master.port,
                quorum=QUORUM,
            )
        )

    def command(self) -> list[str]:
        return [str(self.program.path), "sentinel.conf", "--sentinel"]

    def sees(self) -> dict[str, Any]:
        """The master as this Sentinel sees it."""
        with self.client() as client:
            seen: Any = client.sentinel_master(NAME)
        return dict(seen)


class RedisSentinel:
    """Three nodes and three Sentinels. Each can be killed, paused and restarted by its own methods."""

    def __init__(self) -> None:
        self.nodes = [RewritableRedis() for _ in range(NODES)]
        self.sentinels = [SentinelServer(self.nodes[0]) for _ in range(NODES)]

    @property
    def url(self) -> str:
        addresses = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{addresses}/{NAME}"

    def start(self) -> None:
        together(self.nodes, RewritableRedis.start)
        self._attach(self.nodes[0])
        together(self.sentinels, SentinelServer.start)
        self._until(self._is_whole, "the Sentinels do not know all nodes and each other")

    def heal(self) -> None:
        """Bring back what a test left dead or paused, and return when the other nodes are replicas of the master."""
        together([*self.nodes, *self.sentinels], RedisServer.heal)
        self._until(self._is_mended, "not every node and Sentinel is back")

    def close(self) -> None:
        for server in (*self.sentinels, *self.nodes):
            server.close()

    def master(self) -> RewritableRedis:
        """The master that the Sentinels name. It may be dead: then they have not found out yet."""
        (port,) = self._named()
        return next(node for node in self.nodes if node.port == port)

    def fail_over(self) -> RewritableRedis:
        """Kill -9 the master, wait for the next one, and return it."""
        former = self.master()
        former.kill()
        return self.wait_for_another(former)

    def wait_for_another(self, former: RewritableRedis) -> RewritableRedis:
        """Return the next master, when all running Sentinels name it and it has that role."""
        self._until(
            lambda: self.master() is not former and self.master().replication()["role"] == "master",
            f"no other node became master instead of {former.port}",
        )
        return self.master()

    def _named(self) -> set[int]:
        """The ports of the masters that the Sentinels name: one, unless they disagree."""
        running = [sentinel for sentinel in self.sentinels if sentinel.running and not sentinel.paused]
        return {int(sentinel.sees()["port"]) for sentinel in running}

    def _attach(self, master: RewritableRedis) -> None:
        """Make the other masters its replicas. Sentinel does so as well, ten seconds after such a master came back."""
        for node in self.nodes:
            if node is not master and node.replication()["role"] == "master":
                with node.client() as client:
                    client.replicaof(master.host, master.port)

    def _is_mended(self) -> bool:
        """Whether all is well. If another master is left behind, make it a replica, unless a fail-over is under way:
        then it may be the next master. A master that restarts is replaced as well, if Sentinel misses one answer."""
        if self._is_calm() and not self._is_whole():
            self._attach(self.master())
        return self._is_whole()

    def _is_calm(self) -> bool:
        """No Sentinel takes the master for dead, or replaces it."""
        return all(sentinel.sees()["flags"] == "master" for sentinel in self.sentinels)

    def _is_whole(self) -> bool:
        master = self.master()
        replicas = [node.replication() for node in self.nodes if node is not master]
        views = [sentinel.sees() for sentinel in self.sentinels]
        return (
            self._is_calm()
            and master.replication()["role"] == "master"
            and all(each.get("master_link_status") == "up" and each["master_port"] == master.port for each in replicas)
            and all(view["num-other-sentinels"] == view["num-slaves"] == NODES - 1 for view in views)
        )

    def _until(self, done: Callable[[], bool], complaint: str) -> None:
        until(done, READY_S, complaint, self.sentinels[0].log)
