"""Redis: every write is in the append-only file before it is answered."""

from pathlib import Path

from redis import Redis

from tests.servers.needs import REDIS
from tests.servers.server import PROBE_S, Server


class RedisServer(Server):
    name = "Redis"
    address = "redis://127.0.0.1:{port}/0"

    def __init__(self, *options: str, password: str | None = None) -> None:
        """`options`: more of its command line; the last of one name counts."""
        super().__init__()
        self._options = options
        self._password = password

    def command(self) -> list[str]:
        where = ["--bind", self.host, "--port", str(self.port), "--dir", str(self.folder)]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        secret = ["--requirepass", self._password] if self._password else []
        return [str(REDIS.path), "--daemonize", "no", *where, *durable, *secret, *self._options]

    def probe(self) -> None:
        with self.client(PROBE_S) as client:
            client.ping()

    def client(self, timeout_s: float = 10.0) -> Redis:
        return Redis(host=self.host, port=self.port, password=self._password, socket_timeout=timeout_s)

    @property
    def appended(self) -> Path:
        """The append-only file that is written to now."""
        return max((self.folder / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime_ns)

    def forget(self, size: int) -> None:
        """Kill -9, then start again with so many bytes of the append-only file, as after a crash of the machine."""
        path = self.appended
        self.kill()
        with path.open("r+b") as file:
            file.truncate(size)
        self.start()
