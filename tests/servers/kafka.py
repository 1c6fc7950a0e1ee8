"""Apache Kafka: one KRaft node, broker and controller in one small JVM."""

from confluent_kafka.admin import AdminClient

from tests.servers.needs import JARS, JAVA
from tests.servers.proxy import Proxy
from tests.servers.server import PROBE_S, Server, free_port

CLUSTER_ID = "b253YXJkLXRlc3RzLTAwMQ"  # any 16 bytes, in url-safe base64
SMALL_JVM = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")

PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
listeners=PLAINTEXT://{host}:{port},PROXIED://{host}:{proxied_port},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port},PROXIED://{host}:{proxy_port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT
log.dirs={folder}/data
# After kill -9 the broker may register again only when its former session has ended.
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=250
group.initial.rebalance.delay.ms=0
# Compaction is seen at once.
log.cleaner.backoff.ms=200
# Leases of a second, as the suites have them.
group.min.session.timeout.ms=500
group.consumer.min.heartbeat.interval.ms=500
group.consumer.heartbeat.interval.ms=500
offsets.topic.replication.factor=1
offsets.topic.num.partitions=5
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=5
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
"""


class KafkaServer(Server):
    name = "Kafka"
    address = "kafka://127.0.0.1:{port}"

    def __init__(self) -> None:
        super().__init__()
        self._controller_port, self._proxied_port, self._proxy_port = free_port(), free_port(), free_port()

    @property
    def bootstrap(self) -> str:
        """What clients take as `bootstrap.servers`."""
        return f"{self.host}:{self.port}"

    def properties(self) -> str:
        return PROPERTIES.format(
            host=self.host,
            port=self.port,
            proxied_port=self._proxied_port,
            proxy_port=self._proxy_port,
            controller_port=self._controller_port,
            folder=self.folder,
        )

    def prepare(self, *options: str) -> None:
        (self.folder / "server.properties").write_text(self.properties())
        tool = ("kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", "server.properties")
        self.run(*self._java(*tool, *options))

    def command(self) -> list[str]:
        return self._java("kafka.Kafka", "server.properties")

    def probe(self) -> None:
        client = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        if not client.list_topics(timeout=PROBE_S).brokers:
            raise ConnectionError("the broker is not in the cluster yet")

    def proxy(self) -> Proxy:
        """A proxy before this server, one at a time.

        Clients go where the broker says it is, so the broker has a second listener, which advertises the one port
        that is kept for the proxy.
        """
        url = self.address.format(port=self._proxy_port)
        return Proxy(port=self._proxy_port, target_port=self._proxied_port, url=url)

    def _java(self, *arguments: str) -> list[str]:
        where = [f"-Djava.io.tmpdir={self.folder}", "-Dlog4j2.level=WARN", "-cp", f"{JARS.path}/*"]
        return [str(JAVA.path), *SMALL_JVM, *where, *arguments]
