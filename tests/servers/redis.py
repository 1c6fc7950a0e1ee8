"""Redis, an old Redis and Valkey: every write is in the append-only file before it is answered."""

from pathlib import Path
from typing import ClassVar

from redis import Redis

from tests.servers.needs import REDIS, REDIS_6, VALKEY, Need
from tests.servers.server import PROBE_S, Server


class RedisServer(Server):
    name = "Redis"
    address = "redis://127.0.0.1:{port}/0"
    program: ClassVar[Need] = REDIS

    def __init__(self, *options: str, password: str | None = None) -> None:
        """`options`: more of its command line; the last of one name counts."""
        super().__init__()
        self._options = options
        self._password = password

    def command(self) -> list[str]:
        where = ["--bind", self.host, "--port", str(self.port), "--dir", str(self.folder)]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        secret = ["--requirepass", self._password] if self._password else []
        return [str(self.program.path), "--daemonize", "no", *where, *durable, *secret, *self._options]

    def probe(self) -> None:
        with self.client(PROBE_S) as client:
            client.ping()

    def client(self, timeout_s: float = 10.0) -> Redis:
        return Redis(host=self.host, port=self.port, password=self._password, socket_timeout=timeout_s)

    @property
    def appended(self) -> Path:
        """The append-only file that is written to now."""
        files = [
            *self.folder.glob("appendonlydir/*.incr.aof"),
            *self.folder.glob("appendonly.aof"),
        ]  # since 7.0, before
        return max(files, key=lambda path: path.stat().st_mtime_ns)

    def forget(self, size: int) -> None:
        """Kill -9, then start again with so many bytes of the append-only file, as after a crash of the machine."""
        path = self.appended
        self.kill()
        with path.open("r+b") as file:
            file.truncate(size)
        self.start()


class OldRedisServer(RedisServer):
    """The oldest version that the broker accepts."""

    name = "Redis-6.2"
    program = REDIS_6


class ValkeyServer(RedisServer):
    name = "Valkey"
    program = VALKEY
