"""What librdkafka is told: the user's own settings by their names, under those that our promises rest on."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from onward.brokers.kafka.reports import Reports, told_of
from onward.errors import BadSetting, BrokerError
from onward.settings import Settings

REQUEST_S = 10.0  # for one question to the cluster
_PORT = 9092
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


class Client:
    """Makes clients of one cluster. Its text holds no secret."""

    def __init__(self, url: str, settings: Settings) -> None:
        for name in settings.client:
            if name in _OURS:
                raise BadSetting(f"client.{name} cannot be set: Onward's guarantees rest on its own value; remove it")
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2]
        if not hosts:
            raise BadSetting("a Kafka URL names its brokers: kafka://host:9092, or kafka://one:9092,two:9092")
        self.servers = ",".join(each if ":" in each else f"{each}:{_PORT}" for each in hosts.split(","))
        self._settings = settings
        self.denied = ""  # why the cluster does not let us in
        self.down = ""  # why it is not to be reached
        self._common: dict[str, Any] = {
            "bootstrap.servers": self.servers,
            "log.connection.close": False,
            "log_level": 4,
        }
        self._common |= _credentials(parts.netloc.rpartition("@")[0])
        _check_used(self._common | settings.client)
        self._reports = Reports(_secrets(self._common | settings.client))

    def __repr__(self) -> str:
        return f"Client({self.servers})"

    def producer(self, **more: Any) -> Producer:
        conf = {
            "enable.idempotence": True,
            "enable.gapless.guarantee": True,  # after a refusal nothing later of that partition is accepted
            "message.timeout.ms": 0,  # the publisher has a deadline of its own, and purges
            "linger.ms": 1,
            "message.max.bytes": self._message_bytes,
            "queue.buffering.max.messages": 100_000,
            "queue.buffering.max.kbytes": 262_144,
        }
        return self._made(Producer, self._picked(_PRODUCING), conf, more)

    def single_producer(self) -> Producer:
        """Each message goes out alone and once: what is not answered is not known."""
        conf = {"message.timeout.ms": 0, "message.max.bytes": self._message_bytes}
        return self._made(Producer, self._picked(_PRODUCING) | _SINGLE, conf, {})

    @property
    def _message_bytes(self) -> int:
        return max(1_000_000, self._settings.max_event_bytes + 65_536)

    def consumer(self, **more: Any) -> Consumer:
        conf = {
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",  # where to go on is never guessed
            "topic.metadata.refresh.interval.ms": 30_000,
            "fetch.error.backoff.ms": 100,
        }
        return self._made(Consumer, self._picked(_CONSUMING, _CONSUMING_TOO), conf, more)

    def admin(self) -> AdminClient:
        # It asks the one node that it was last told is the controller: it must hear of it when that is dead.
        conf = {"error_cb": self._failed, "topic.metadata.refresh.interval.ms": 10_000}
        return self._made(AdminClient, self._picked(()), conf, {})

    def _failed(self, error: KafkaError) -> None:
        server, cause = told_of(self._reports.scrubbed(error.str()))
        if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL):
            self.denied = cause
        elif error.code() in (KafkaError._TRANSPORT, KafkaError._RESOLVE):
            self.down = cause if server in self.servers else f"{server}: {cause}"

    def _picked(self, prefixes: tuple[str, ...], names: frozenset[str] = frozenset()) -> dict[str, Any]:
        """The user's settings but for those of another kind of client, about which librdkafka would complain."""
        return {
            name: value
            for name, value in self._settings.client.items()
            if name.startswith(prefixes or ("\0",))
            or name in names
            or not (name.startswith(_CONSUMING + _PRODUCING) or name in _CONSUMING_TOO)
        }

    def _made(self, kind: Any, picked: Mapping[str, Any], conf: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
        try:
            return kind(self._common | dict(conf) | dict(more) | dict(picked), logger=self._reports)
        except KafkaException as error:
            raise BadSetting(
                f"Kafka at {self.servers}: {_said(self._reports.scrubbed(error.args[0].str()))}"
            ) from error
        except (TypeError, ValueError) as error:
            raise BadSetting(f"Kafka at {self.servers}: {self._reports.scrubbed(str(error))}") from error


def _secrets(conf: Mapping[str, Any]) -> list[str]:
    return [str(value) for name, value in conf.items() if any(word in name for word in _SECRET)]


def _said(text: str) -> str:
    """What librdkafka says of a setting, and how to mend it."""
    if "No such configuration property" not in text:
        return text
    return f"{text}; client.NAME sets what librdkafka calls NAME, and its CONFIGURATION.md lists all of them"


def _credentials(userinfo: str) -> dict[str, str]:
    if not userinfo:
        return {}
    user, _, password = userinfo.partition(":")
    return {"sasl.username": unquote(user), "sasl.password": unquote(password)}


def _check_used(conf: Mapping[str, Any]) -> None:
    """librdkafka speaks plaintext unless told otherwise, and then says nothing of a user it did not use."""
    given = sorted(name for name in conf if name.startswith("sasl.") or name == "oauth_cb")
    if given and "security.protocol" not in conf:
        raise BadSetting(
            f"{', '.join(given)} would not be used without security.protocol: the connection would be plain text and "
            "without a login; add ?client.security.protocol=SASL_SSL to the URL (or SASL_PLAINTEXT, without encryption)"
        )


def explained(error: KafkaError | KafkaException | TimeoutError, doing: str) -> BrokerError:
    """The error with what was being done."""
    cause = error.args[0] if isinstance(error, KafkaException) else error
    text = cause.str() if isinstance(cause, KafkaError) else str(cause) or "no answer in time"
    return BrokerError(f"Kafka: {doing}: {text}")
