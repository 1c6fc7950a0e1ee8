"""Publishing: events are encoded in the caller's thread and sent in windows by the courier."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from onward.brokers.core.partitioner import partition_of
from onward.brokers.core.publishing import Outgoing, Publisher
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.message import packed
from onward.brokers.rabbitmq.publish.courier import RabbitCourier
from onward.brokers.rabbitmq.publish.sending import RabbitOutgoing, RabbitPacked
from onward.brokers.rabbitmq.registry.topics import PublishRoute
from onward.errors import TooLarge, Unserialisable
from onward.event import Event
from onward.settings import Settings


class RabbitPublisher:
    def __init__(self, courier: RabbitCourier, settings: Settings) -> None:
        self.in_turn = asyncio.Lock()  # calls take effect in the order they entered, even while a topic is looked up
        self._max_event_bytes = settings.max_event_bytes
        self._spread = itertools.count()
        self._publisher: Publisher[RabbitPacked] = Publisher(
            courier,
            label="RabbitMQ",
            timeout_s=settings.publish_timeout_s,
            max_outgoing_bytes=settings.max_outgoing_bytes,
        )

    def enter(self, events: Sequence[Event], routes: Mapping[str, PublishRoute]) -> "asyncio.Future[None]":
        """The future is done when all events are accepted. Raises PayloadError; then nothing is sent."""
        keyless = next(self._spread)
        try:
            items = [self._outgoing(event, routes[event.topic], keyless) for event in events]
        except (AttributeError, TypeError, ValueError) as error:
            raise Unserialisable(
                f"an event cannot be stored: {error}; the value must be bytes, and headers must map str to str"
            ) from error
        return self._publisher.enter(items)

    async def close(self) -> None:
        await self._publisher.close()

    def _outgoing(self, event: Event, route: PublishRoute, keyless: int) -> RabbitOutgoing:
        size = event.size
        if size > self._max_event_bytes:
            raise TooLarge(
                f"event {event.id} has {size} bytes, max_event_bytes is {self._max_event_bytes}; store the value "
                "elsewhere and publish a reference, or raise the limit"
            )
        event = event.whole()
        if route.entry is None:  # an exchange of the application
            return Outgoing(event, 0, size, RabbitPacked(None, route.exchange, packed(event)))
        index = keyless % route.partitions if event.key is None else partition_of(event.key, route.partitions)
        return Outgoing(
            event, index, size, RabbitPacked(names.stream(event.topic, index), route.exchange, packed(event))
        )
