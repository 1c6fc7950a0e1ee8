"""Publishing: prepares events, which the publisher of core/ queues and a thread sends."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from onward.brokers.core.cloudevents import headers_of
from onward.brokers.core.partitioner import partition_of
from onward.brokers.core.publishing import Outgoing, Publisher
from onward.brokers.kafka.client import ClientFactory
from onward.brokers.kafka.closing import close_in_time
from onward.brokers.kafka.producer_thread import ProducerThread
from onward.brokers.kafka.sending import KafkaOutgoing, Packed
from onward.errors import TooLarge, Unserialisable
from onward.event import Event
from onward.settings import Settings

if TYPE_CHECKING:
    import asyncio


class KafkaPublisher:
    def __init__(self, factory: ClientFactory, settings: Settings) -> None:
        self._max_event_bytes = settings.max_event_bytes
        self._spread = itertools.count()
        self._thread = ProducerThread(factory, settings.publish_timeout_s)
        self._publisher: Publisher[Packed] = Publisher(
            self._thread,
            label="Kafka",
            timeout_s=settings.publish_timeout_s,
            max_outgoing_bytes=settings.max_outgoing_bytes,
        )

    def warm(self) -> None:
        """Connect now: a publish will follow."""
        self._thread.warm()

    def enter(self, events: Sequence[Event], counts: Mapping[str, int]) -> "asyncio.Future[None]":
        """The future is done when all events are accepted. `counts`: how many partitions the keys of each topic use.

        PayloadError: nothing is sent."""
        try:
            items = [self._outgoing(event, counts[event.topic]) for event in events]
        except (AttributeError, TypeError, ValueError) as error:
            raise Unserialisable(
                f"an event cannot be stored: {error}; the value must be bytes, and headers must map str to str"
            ) from error
        return self._publisher.enter(items)

    async def close(self) -> None:
        await self._publisher.close()
        await close_in_time(self._thread.close)

    def _outgoing(self, event: Event, partitions: int) -> KafkaOutgoing:
        size = event.size
        if size > self._max_event_bytes:
            raise TooLarge(f"event {event.id} of {size} bytes exceeds max_event_bytes")
        if event.key is None:
            return Outgoing(event, next(self._spread) % partitions, size, headers_of(event))
        return Outgoing(event, partition_of(event.key, partitions), size, headers_of(event))
