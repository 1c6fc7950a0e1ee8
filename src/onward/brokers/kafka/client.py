"""Creates clients for one cluster, with the user's librdkafka settings and those that our guarantees depend on."""

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient

from onward import clock
from onward.brokers.kafka.client_log import ClientLog, server_and_cause
from onward.errors import BadSetting, BrokerError
from onward.settings import Settings

REQUEST_S = 10.0  # time limit of one request to the cluster
_PORT = 9092
_NAP_S = 0.003  # between two polls for a message
_OURS = frozenset(
    {
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.gapless.guarantee",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "message.timeout.ms",
        "delivery.timeout.ms",
        "transactional.id",
    }
)
_SECRET = ("password", "secret", "pem", "token", "jaas", "sasl.oauthbearer.config")
_CONSUMING = ("session.", "heartbeat.", "max.poll.", "partition.assignment.", "group.", "fetch.", "queued.")
_CONSUMING_TOO = frozenset({"auto.offset.reset", "isolation.level", "check.crcs", "max.partition.fetch.bytes"})
_SINGLE = {
    "enable.idempotence": False,
    "enable.gapless.guarantee": False,
    "acks": "all",
    "retries": 0,
    "batch.num.messages": 1,
    "linger.ms": 0,
}
_PRODUCING = ("linger.", "batch.", "compression.", "queue.buffering.", "sticky.", "retries", "acks", "request.required")


class ClientFactory:
    """Creates clients for one cluster. Its repr contains no secret."""

    def __init__(self, url: str, settings: Settings) -> None:
        for name in settings.client:
            if name in _OURS:
                raise BadSetting(f"client.{name} cannot be set: Onward's guarantees depend on its own value; remove it")
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2]
        if not hosts:
            raise BadSetting("the Kafka URL has no host: write kafka://host:9092, or kafka://one:9092,two:9092")
        if parts.path.strip("/"):
            raise BadSetting(f"a Kafka URL has no path: remove {parts.path}; handlers and publishers name their topics")
        self.servers = ",".join(each if ":" in each else f"{each}:{_PORT}" for each in hosts.split(","))
        self._settings = settings
        self.denied = ""  # why the cluster refuses our login
        self.down = ""  # why it cannot be reached
        self._common: dict[str, Any] = {
            "bootstrap.servers": self.servers,
            "log.connection.close": False,
            "log_level": 4,
        }
        self._common |= _credentials(parts.netloc.rpartition("@")[0])
        _check_used(self._common | settings.client)
        self._log = ClientLog(_secrets(self._common | settings.client))

    def __repr__(self) -> str:
        return f"ClientFactory({self.servers})"

    def producer(self, **more: Any) -> Producer:
        conf = {
            "enable.idempotence": True,
            "enable.gapless.guarantee": True,  # after a refusal, no later event of that partition is accepted
            "message.timeout.ms": 0,  # the publisher has its own deadline, and then purges the producer
            "linger.ms": 1,
            "message.max.bytes": self._message_bytes,
            "queue.buffering.max.messages": 100_000,
            "queue.buffering.max.kbytes": 262_144,
        }
        return self._made(Producer, self._picked(_PRODUCING), conf, more)

    def single_producer(self) -> Producer:
        """Each message is sent alone and once: without an answer its outcome is unknown."""
        conf = {"message.timeout.ms": 0, "message.max.bytes": self._message_bytes}
        return self._made(Producer, self._picked(_PRODUCING) | _SINGLE, conf, {})

    @property
    def _message_bytes(self) -> int:
        return max(1_000_000, self._settings.max_event_bytes + 65_536)

    def consumer(self, **more: Any) -> Consumer:
        conf = {
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",  # the client must never guess a position
            "topic.metadata.refresh.interval.ms": 30_000,
            "fetch.error.backoff.ms": 100,
        }
        return self._made(Consumer, self._picked(_CONSUMING, _CONSUMING_TOO), conf, more)

    def admin(self) -> AdminClient:
        # The client sends requests to the node that it takes for the controller. Fresh metadata replaces a dead one.
        conf = {"error_cb": self._failed, "topic.metadata.refresh.interval.ms": 10_000}
        return self._made(AdminClient, self._picked(()), conf, {})

    def _failed(self, error: KafkaError) -> None:
        server, cause = server_and_cause(self._log.scrubbed(error.str()))
        if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL):
            self.denied = cause
        elif error.code() in (KafkaError._TRANSPORT, KafkaError._RESOLVE):
            self.down = cause if server in self.servers else f"{server}: {cause}"

    def _picked(self, prefixes: tuple[str, ...], names: frozenset[str] = frozenset()) -> dict[str, Any]:
        """The user's settings, without those of another kind of client: librdkafka would warn about them."""
        return {
            name: value
            for name, value in self._settings.client.items()
            if name.startswith(prefixes or ("\0",))
            or name in names
            or not (name.startswith(_CONSUMING + _PRODUCING) or name in _CONSUMING_TOO)
        }

    def _made(self, kind: Any, picked: Mapping[str, Any], conf: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
        try:
            return kind(self._common | dict(conf) | dict(more) | dict(picked), logger=self._log)
        except KafkaException as error:
            raise BadSetting(f"Kafka at {self.servers}: {_cured(self._log.scrubbed(error.args[0].str()))}") from error
        except (TypeError, ValueError) as error:
            raise BadSetting(f"Kafka at {self.servers}: {self._log.scrubbed(str(error))}") from error


def _secrets(conf: Mapping[str, Any]) -> list[str]:
    return [str(value) for name, value in conf.items() if any(word in name for word in _SECRET)]


def _cured(text: str) -> str:
    """librdkafka's error about a setting, with the cure."""
    if "No such configuration property" not in text:
        return text
    return f"{text}; client.NAME sets what librdkafka calls NAME, and its CONFIGURATION.md lists all of them"


def _credentials(userinfo: str) -> dict[str, str]:
    if not userinfo:
        return {}
    user, _, password = userinfo.partition(":")
    return {"sasl.username": unquote(user), "sasl.password": unquote(password)}


def _check_used(conf: Mapping[str, Any]) -> None:
    """Without a security.protocol, librdkafka uses plain text and ignores a user without a warning."""
    given = sorted(name for name in conf if name.startswith("sasl.") or name == "oauth_cb")
    if given and "security.protocol" not in conf:
        raise BadSetting(
            f"{', '.join(given)} would not be used without security.protocol: the connection would be plain text and "
            "without a login; add ?client.security.protocol=SASL_SSL to the URL (or SASL_PLAINTEXT, without encryption)"
        )


def explained(error: KafkaError | KafkaException | TimeoutError, doing: str) -> BrokerError:
    """A BrokerError with this error and what we were doing."""
    cause = error.args[0] if isinstance(error, KafkaException) else error
    text = cause.str() if isinstance(cause, KafkaError) else str(cause) or "no answer in time"
    return BrokerError(f"Kafka: {doing}: {text}")


def poll(consumer: Consumer, wait_s: float) -> Message | None:
    """Return the next message or error, or None if there was none for this long. Calls the client's callbacks.

    The client's own wait ends at a wall-clock time: if the clock is set back, the wait takes that much longer. So we
    poll without a wait, and sleep."""
    end = clock.now() + wait_s
    while (message := consumer.poll(0)) is None and clock.now() < end:
        time.sleep(_NAP_S)
    return message


def produce(producer: Producer, *message: Any, headers: Any) -> None:
    """Give a message to the producer: topic, value, key, partition, and the callback for its report.

    KafkaException, BufferError: the producer does not accept it."""
    try:
        producer.produce(*message, headers=headers)
    except KafkaException as error:
        if error.args[0].code() != KafkaError._UNKNOWN_PARTITION:
            raise
        producer.list_topics(timeout=REQUEST_S)  # the partition was added after the producer's last refresh
        producer.produce(*message, headers=headers)
