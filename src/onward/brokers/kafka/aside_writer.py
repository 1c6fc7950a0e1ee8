"""Writes entries into the logs of asides."""

from collections.abc import Sequence
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as KafkaMessage

from onward.brokers.core.folded_aside import LogEntry
from onward.brokers.kafka.aside_topics import FAILURE_BYTES
from onward.brokers.kafka.client import ClientFactory, produce
from onward.settings import Settings

FENCE_HEADER = "onward-fence"

# An entry that is written twice counts once, so this producer needs no id from the cluster.
_PLAIN = {
    "enable.gapless.guarantee": False,
    "enable.idempotence": False,
    "max.in.flight.requests.per.connection": 1,
    "acks": "all",
}

PlacedEntry = tuple[int, LogEntry]  # with the index of its partition


class AsideWriter:
    """One call at a time. Calls block."""

    def __init__(self, factory: ClientFactory, settings: Settings) -> None:
        self._factory = factory
        self._settings = settings
        self._producer: Producer | None = None

    def write(self, name: str, entries: Sequence[PlacedEntry]) -> list[int | str]:
        """Return the offset of each entry, or why it was not stored."""
        if self._producer is None:
            size = self._settings.max_event_bytes + 2 * FAILURE_BYTES
            self._producer = self._factory.producer(**_PLAIN, **{"message.max.bytes": size})
        producer, answers = self._producer, dict[int, int | str]()

        def report(at: int, error: KafkaError | None, message: KafkaMessage) -> None:
            answers[at] = error.str() if error is not None else message.offset()

        for at, (index, entry) in enumerate(entries):
            try:
                headers = [(FENCE_HEADER, str(entry.fence).encode())]
                produce(producer, name, entry.value, entry.key, index, partial(report, at), headers=headers)
            except (KafkaException, BufferError) as error:
                answers[at] = str(error)
        if producer.flush(self._settings.publish_timeout_s):
            producer.purge()
            producer.flush(1.0)
            self._producer = None
        return [answers.get(at, "no answer in time") for at in range(len(entries))]

    def close(self) -> None:
        if self._producer is not None:
            self._producer.flush(1.0)
