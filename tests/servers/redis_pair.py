"""A Redis master and its replica, which can be made to lag and then be promoted: what it had not copied is lost."""

from typing import Any

from tests.servers.redis import RedisServer
from tests.servers.server import READY_S, together, until


class RedisPair:
    """Two servers and one address for clients, which leads to the master, and after promote() to the former replica.

    The two are connected by a proxy, so their link can be stalled. Both can be killed and restarted by their own
    methods.
    """

    def __init__(self) -> None:
        self.master, self.replica = (RedisServer("--repl-diskless-sync-delay", "0") for _ in range(2))
        self._link = self.master.proxy()
        self._front = self.master.proxy()

    @property
    def url(self) -> str:
        return self._front.url

    def start(self) -> None:
        together((self.master, self.replica), RedisServer.start)
        self.heal()

    def heal(self) -> None:
        """Bring back what a test left dead. The replica is again a replica, with the data of the master alone."""
        together((self.master, self.replica), RedisServer.heal)
        self._front.redirect(self.master.port)
        with self.replica.client() as client:
            if self._replication()["role"] == "master":
                client.replicaof(self._link.host, self._link.port)
        self.catch_up()

    def close(self) -> None:
        for part in (self._front, self._link, self.replica, self.master):
            part.close()

    def lag(self) -> None:
        """From now on nothing reaches the replica, which stays connected."""
        self._link.stall()

    def catch_up(self) -> None:
        """Let the replica read again, and return when it has everything that the master has now."""
        self._link.mend()
        with self.master.client() as client:
            info: Any = client.info("replication")
        goal = int(info["master_repl_offset"])
        until(lambda: self._has(goal), READY_S, "the replica does not catch up", self.replica.log)

    def promote(self) -> None:
        """Make the replica a master, and lead clients to it. The former master goes on, and accepts writes at its own
        address."""
        self._front.cut()
        self._link.cut()
        with self.replica.client() as client:
            client.replicaof("NO", "ONE")
        self._front.redirect(self.replica.port)

    def _has(self, offset: int) -> bool:
        seen = self._replication()
        return seen.get("master_link_status") == "up" and int(seen["slave_repl_offset"]) >= offset

    def _replication(self) -> dict[str, Any]:
        with self.replica.client() as client:
            info: Any = client.info("replication")
        return dict(info)
