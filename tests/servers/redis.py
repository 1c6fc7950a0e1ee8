"""Redis: every write is in the append-only file before it is answered."""

from redis import Redis

from tests.servers.needs import REDIS
from tests.servers.server import PROBE_S, Server


class RedisServer(Server):
    name = "Redis"
    address = "redis://127.0.0.1:{port}/0"

    def command(self) -> list[str]:
        where = ["--bind", self.host, "--port", str(self.port), "--dir", str(self.folder)]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        return [str(REDIS.path), "--daemonize", "no", *where, *durable]

    def probe(self) -> None:
        with Redis(host=self.host, port=self.port, socket_timeout=PROBE_S) as client:
            client.ping()
