"""Apache Kafka: one KRaft node, or a cluster of three. Each node is broker and controller in one small JVM."""

import time
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.servers.needs import JARS, JAVA
from tests.servers.proxy import Proxy
from tests.servers.server import PROBE_S, READY_S, Server, free_port, together

ANSWER_S = 10.0  # for a request to a cluster whose nodes are killed and restarted
PAUSE_S = 0.05
CLUSTER_ID = "b253YXJkLXRlc3RzLTAwMQ"  # any 16 bytes, in url-safe base64
SMALL_JVM = ("-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")

PROPERTIES = """\
process.roles=broker,controller
node.id={number}
controller.quorum.voters={voters}
listeners=PLAINTEXT://{host}:{port},PROXIED://{host}:{proxied_port},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port},PROXIED://{host}:{proxy_port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT
log.dirs={folder}/data
# After kill -9 the broker may register again only when its former session has ended.
broker.session.timeout.ms={session_ms}
broker.heartbeat.interval.ms=250
group.initial.rebalance.delay.ms=0
# Compaction is seen at once.
log.cleaner.backoff.ms=200
# Leases of a second, as in the suites.
group.min.session.timeout.ms=500
group.consumer.min.session.timeout.ms=500
group.consumer.min.heartbeat.interval.ms=500
group.consumer.heartbeat.interval.ms=500
offsets.topic.replication.factor={copies}
offsets.topic.num.partitions=5
transaction.state.log.replication.factor={copies}
transaction.state.log.min.isr={least_copies}
transaction.state.log.num.partitions=5
share.coordinator.state.topic.replication.factor={copies}
share.coordinator.state.topic.min.isr={least_copies}
default.replication.factor={copies}
min.insync.replicas={least_copies}
"""


class KafkaServer(Server):
    name = "Kafka"
    address = "kafka://127.0.0.1:{port}"
    heap = "-Xmx384m"
    session_ms = 6_000  # on a busy machine it may lose its controller for some seconds, and then accepts no new topic

    def __init__(self, number: int = 1) -> None:
        super().__init__()
        self.number = number
        self.peers: list[KafkaServer] = [self]  # the nodes of its cluster, with itself
        self._controller_port, self._proxied_port, self._proxy_port = free_port(), free_port(), free_port()

    @property
    def bootstrap(self) -> str:
        """The value of `bootstrap.servers` for clients."""
        return f"{self.host}:{self.port}"

    def properties(self) -> str:
        copies = len(self.peers)
        return PROPERTIES.format(
            number=self.number,
            voters=",".join(f"{peer.number}@{peer.host}:{peer._controller_port}" for peer in self.peers),
            session_ms=self.session_ms,
            copies=copies,
            least_copies=copies // 2 + 1,
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
        """A proxy in front of this server, one at a time.

        Clients connect to the address that the broker advertises. So the broker has a second listener, which
        advertises the port that is reserved for the proxy.
        """
        url = self.address.format(port=self._proxy_port)
        return Proxy(port=self._proxy_port, target_port=self._proxied_port, url=url)

    def _java(self, *arguments: str) -> list[str]:
        where = [f"-Djava.io.tmpdir={self.folder}", "-Dlog4j2.level=WARN", "-cp", f"{JARS.path}/*"]
        return [str(JAVA.path), self.heap, *SMALL_JVM, *where, *arguments]


class KafkaNode(KafkaServer):
    """One of three nodes, small enough to run together on a small machine."""

    heap = "-Xmx256m"
    session_ms = 2_000  # so that the others take over soon

    def properties(self) -> str:
        """All groups have the same coordinator, so a test of one group is enough."""
        return super().properties().replace("offsets.topic.num.partitions=5", "offsets.topic.num.partitions=1")


class KafkaCluster:
    """Three nodes. Each has a copy of everything, and a write is accepted when two of them have it."""

    def __init__(self) -> None:
        self.nodes: list[KafkaServer] = [KafkaNode(number) for number in (1, 2, 3)]
        for node in self.nodes:
            node.peers = self.nodes
        self.bootstrap = ",".join(node.bootstrap for node in self.nodes)
        self.url = f"kafka://{self.bootstrap}"

    def start(self) -> None:
        """Start all nodes at once: a single node has no majority and does not answer."""
        together(self.nodes, KafkaServer.start)

    def heal(self) -> None:
        """Bring back the nodes that a test left dead."""
        together(self.nodes, KafkaServer.heal)

    def node(self, number: int) -> KafkaServer:
        return self.nodes[number - 1]

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class KafkaView:
    """Reads the state of a cluster, and tries what a bare client can do with it. Each call uses new clients, so no old
    knowledge about a dead node gets in the way."""

    def __init__(self, bootstrap: str) -> None:
        self._conf = {"bootstrap.servers": bootstrap, "log_level": 0}
        self._own = f"view-{uuid4().hex[:8]}"
        self._commit = 0

    def prepare(self, partitions: int) -> None:
        """Create a topic to try the cluster with."""
        admin = AdminClient(self._conf)
        admin.create_topics([NewTopic(self._own, partitions)])[self._own].result(READY_S)

    def coordinator(self, group: str) -> int:
        """The node that stores the group's members and progress. Call this while all nodes live: librdkafka ends the
        process when an admin request to a coordinator is cut off (confluentinc/librdkafka#4605)."""
        admin = AdminClient(self._conf)
        futures = admin.describe_consumer_groups([group], request_timeout=READY_S)
        return int(futures[group].result(READY_S).coordinator.id)

    def committed(self, topic: str, group: str) -> int:
        """The sum of the group's offsets; 0 while the cluster does not answer."""
        consumer = Consumer(self._conf | {"group.id": group, "enable.auto.commit": False})
        try:
            places = [TopicPartition(topic, index) for index in self._partitions(consumer, topic)]
            return sum(max(0, place.offset) for place in consumer.committed(places, ANSWER_S))
        except KafkaException:
            return 0
        finally:
            consumer.close()

    def leaders(self, topic: str) -> set[int]:
        return {int(each.leader) for each in self._partitions(AdminClient(self._conf), topic).values()}

    def is_whole(self, copies: int) -> bool:
        """Every partition of every topic has this many in-sync copies. False while the cluster does not answer."""
        try:
            topics = AdminClient(self._conf).list_topics(timeout=ANSWER_S).topics.values()
        except KafkaException:
            return False
        return all(len(each.isrs) == copies for topic in topics for each in topic.partitions.values())

    def works(self) -> bool:
        """A bare client publishes to all partitions of the prepared topic and commits."""
        return self._publishes() and self._commits()

    def _publishes(self) -> bool:
        answers: list[KafkaError | None] = []
        producer = Producer(self._conf | {"acks": "all", "message.timeout.ms": int(ANSWER_S * 1000)})
        try:
            indexes = list(self._partitions(producer, self._own))
            for index in indexes:
                producer.produce(self._own, b"", partition=index, on_delivery=lambda error, _: answers.append(error))
        except KafkaException:
            return False
        producer.flush(2 * ANSWER_S)
        return len(answers) == len(indexes) and all(error is None for error in answers)

    def _commits(self) -> bool:
        """Commit, then read the commit until it is stored. Unlike a synchronous commit, this has a time limit."""
        self._commit += 1
        place = TopicPartition(self._own, 0, self._commit)
        consumer = Consumer(self._conf | {"group.id": self._own, "enable.auto.commit": False})
        end = time.monotonic() + ANSWER_S
        try:
            consumer.commit(offsets=[place], asynchronous=True)
            while time.monotonic() < end:
                if [each.offset for each in consumer.committed([place], ANSWER_S)] == [self._commit]:
                    return True
                consumer.poll(PAUSE_S)
        except KafkaException:
            pass
        finally:
            consumer.close()
        return False

    def _partitions(self, client: Any, topic: str) -> dict[int, Any]:
        return dict(client.list_topics(topic, ANSWER_S).topics[topic].partitions)
