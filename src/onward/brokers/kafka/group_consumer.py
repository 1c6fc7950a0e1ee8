"""The client that is in the group. It reads no events: the partitions that it is assigned are paused at once."""

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NoAnswer
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import ConfigResource, ResourceType

from onward import clock
from onward.brokers.base import MemberInfo, Start, Supervised
from onward.brokers.core.session_clock import BEATS
from onward.brokers.kafka.client import REQUEST_S, explained, poll
from onward.brokers.kafka.topics import Cluster
from onward.errors import BadSetting, OnwardError
from onward.settings import Settings

log = logging.getLogger("onward")

_POLL_S = 0.02
_ANSWER_S = 0.5
_LEAVE_S = 10.0
_USUAL_SESSION_S = 45.0
_SLOT_CHARS = 200  # of 249
_ILLEGAL = re.compile(r"[^A-Za-z0-9._-]")

_FORBIDDEN = frozenset(
    {
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.GROUP_MAX_SIZE_REACHED,
        KafkaError.UNSUPPORTED_VERSION,
        KafkaError.UNSUPPORTED_ASSIGNOR,
        KafkaError._FATAL,
        KafkaError._AUTHENTICATION,
    }
)

Places = Sequence[TopicPartition]


class JoinSpec(NamedTuple):
    """What a member joins, and under which name."""

    group: str
    member: str
    topics: Sequence[str]
    start: Start
    supervised: Supervised | None = None


class Listener(Protocol):
    """Called within a poll when the group assigns partitions, revokes them, or has given them to other members."""

    def on_assign(self, consumer: Consumer, places: Places) -> None: ...
    def on_revoke(self, consumer: Consumer, places: Places) -> None: ...
    def on_lost(self, consumer: Consumer, places: Places) -> None: ...


class GroupConsumer:
    """`client` is librdkafka's consumer; only the member's thread may call it."""

    def __init__(self, cluster: Cluster, spec: JoinSpec, on_commit: Callable[..., None]) -> None:
        settings = cluster.settings
        self._settings = settings
        self._admin = cluster.admin.client
        self._spec = spec
        self.is_modern = settings.client.get("group.protocol") == "consumer"  # KIP-848
        self._is_cooperative = self.is_modern or "cooperative" in str(
            settings.client.get("partition.assignment.strategy", "cooperative-sticky")
        )
        own = "" if spec.supervised is None or self.is_modern else instance_id(spec.supervised.slot, spec.topics)
        self.instance = "" if self.is_modern else str(settings.client.get("group.instance.id", own))
        self.client: Consumer = cluster.factory.consumer(**self._conf(), on_commit=on_commit)
        self.is_subscribed = False
        self.is_dead = False  # the client has left the group for good, and calls no listener any more
        self.failure: OnwardError | None = None  # why this client can never be in the group

    def _conf(self) -> dict[str, Any]:
        settings = self._settings
        session_ms = self._session_ms
        longest_s = max(settings.max_poll_gap_s, settings.revoke_grace_s + 10, session_ms / 1000)
        conf: dict[str, Any] = {
            "group.id": self._spec.group,
            "client.id": self._client_id,
            "max.poll.interval.ms": int(longest_s * 1000),
        }
        if not self.is_modern:
            conf |= {
                "session.timeout.ms": session_ms,
                "heartbeat.interval.ms": max(1, session_ms // BEATS),
                "partition.assignment.strategy": "cooperative-sticky",
            }
        if self.instance:
            conf["group.instance.id"] = self.instance
        return conf

    @property
    def _client_id(self) -> str:
        """The coordinator stores the client id of a slot's first process, so all its processes use the slot's name."""
        supervised = self._spec.supervised
        if supervised is None or not self.instance:
            return self._spec.member
        return str(msgspec.structs.replace(MemberInfo.parse(self._spec.member), name=supervised.slot))

    @property
    def _session_ms(self) -> int:
        return int(self._settings.client.get("session.timeout.ms", self._settings.lease_s * 1000))

    @property
    def session_s(self) -> float:
        """The session that this member requests."""
        return self._session_ms / 1000

    def group_session_s(self) -> float:
        """The session that the cluster uses for the group (KIP-848).

        If the cluster does not answer: `lease_s`, at most Kafka's default of 45 s."""
        asked = ConfigResource(ResourceType.GROUP, self._spec.group)
        try:
            answer = self._admin.describe_configs([asked], request_timeout=REQUEST_S)[asked]
            return int(answer.result(REQUEST_S)["consumer.session.timeout.ms"].value) / 1000
        except (KafkaException, KeyError, NoAnswer):
            return min(self._settings.lease_s, _USUAL_SESSION_S)

    @property
    def member_id(self) -> str:
        """Given by the coordinator. A new one means that the coordinator ended our session."""
        return str(self.client.memberid())

    @property
    def has_assignment(self) -> bool:
        """A fenced client has no assignment, also while a callback keeps us from polling."""
        return bool(self.client.assignment())

    def join(self, listener: Listener) -> None:
        self.client.subscribe(
            list(self._spec.topics),
            on_assign=listener.on_assign,
            on_revoke=listener.on_revoke,
            on_lost=listener.on_lost,
        )
        self.is_subscribed = True

    def unsubscribe(self) -> None:
        self.is_subscribed = False
        self.client.unsubscribe()

    def accept(self, places: Places) -> None:
        """Confirm an assignment, paused. Called within `on_assign`."""
        paused = [TopicPartition(place.topic, place.partition, 0) for place in places]
        if self._is_cooperative:
            self.client.incremental_assign(paused)
        else:
            self.client.assign(paused)
        if paused:
            self.client.pause(paused)

    def poll(self) -> None:
        """Serve the group for a moment. A failure that lasts is stored in `failure`."""
        message = poll(self.client, _POLL_S)
        self.client.memberid()  # asks the client's own thread, and so ends its wall-clock wait: see `poll`
        if message is not None and message.error() is not None:
            self._note(message.error())

    def leave(self) -> None:
        """Leave the group, and close.

        While the group rebalances, the coordinator does not read our requests. If it does not read that we leave, the
        other members wait for us for a whole session. The coordinator answers in order, so an answer to a later request
        means that it has read the earlier one."""
        end = clock.now() + min(self._settings.lease_s, _LEAVE_S)
        if self.is_subscribed and not self.is_dead and self._is_answered(end):
            self.client.unsubscribe()
            self._is_answered(end)
        self.client.close()

    def _is_answered(self, end: float) -> bool:
        while clock.now() < end:
            poll(self.client, _POLL_S)
            with contextlib.suppress(KafkaException):
                self.client.committed([TopicPartition(self._spec.topics[0], 0)], _ANSWER_S)
                return True
        return False

    def _note(self, error: KafkaError) -> None:
        log.warning("Kafka: group member: %s", error.str())
        if error.code() == KafkaError.INVALID_SESSION_TIMEOUT:
            self.failure = BadSetting(
                f"{_session_setting(self._settings)}: the cluster does not allow this session timeout; set it between "
                "the cluster's group.min.session.timeout.ms (6 s by default) and group.max.session.timeout.ms"
            )
        elif error.code() == KafkaError._FATAL and self.instance:
            self.is_dead = True
            self.failure = BadSetting(
                f"group {self._spec.group}: another process has joined as {self.instance}, so this one was fenced. "
                "Each process needs a slot (or client.group.instance.id) of its own: stop one of the two"
            )
        elif error.code() in _FORBIDDEN:
            self.failure = explained(error, f"joining the group for {', '.join(self._spec.topics)}")


def instance_id(slot: str, topics: Sequence[str]) -> str:
    """The group.instance.id of a slot's member for these topics, in the characters and the length that Kafka allows."""
    digest = blake2b("\0".join([slot, *sorted(topics)]).encode(), digest_size=8).hexdigest()
    return f"{_ILLEGAL.sub('-', slot)[:_SLOT_CHARS]}.{digest}"


def _session_setting(settings: Settings) -> str:
    asked_ms = settings.client.get("session.timeout.ms")
    return f"lease_s={settings.lease_s:g}" if asked_ms is None else f"session.timeout.ms={asked_ms}"
