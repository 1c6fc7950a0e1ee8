"""How long the group's coordinator waits for a member that is silent, where that is not ours to say (KIP-848)."""

from concurrent.futures import TimeoutError as Late

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from onward.brokers.kafka.client import REQUEST_S

_USUAL_S = 45.0


def session_s(admin: AdminClient, group: str, otherwise_s: float) -> float:
    """As the cluster says; where it does not, what the caller believes, but no more than is usual."""
    asked = ConfigResource(ResourceType.GROUP, group)
    try:
        answer = admin.describe_configs([asked], request_timeout=REQUEST_S)[asked]
        return int(answer.result(REQUEST_S)["consumer.session.timeout.ms"].value) / 1000
    except (KafkaException, KeyError, Late):
        return min(otherwise_s, _USUAL_S)
