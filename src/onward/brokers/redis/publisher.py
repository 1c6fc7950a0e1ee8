"""Publishing: events are encoded in the caller's thread and sent in windows by the courier."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from onward.brokers.base import Relay
from onward.brokers.core.partitioner import partition_of
from onward.brokers.core.publishing import Outgoing, Publisher
from onward.brokers.redis.courier import Packed, RedisCourier, RedisOutgoing
from onward.errors import TooLarge, Unserialisable
from onward.event import Event
from onward.settings import Settings

_CLOSE_S = 5.0
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


class RedisPublisher:
    def __init__(self, courier: RedisCourier, settings: Settings) -> None:
        self.in_turn = asyncio.Lock()  # calls take effect in the order they entered, even while a topic is looked up
        self._max_event_bytes = settings.max_event_bytes
        self._spread = itertools.count()
        self._courier = courier
        self._publisher: Publisher[Packed] = Publisher(
            courier,
            label="Redis",
            timeout_s=settings.publish_timeout_s,
            max_outgoing_bytes=settings.max_outgoing_bytes,
        )

    def enter(self, events: Sequence[Event], counts: Mapping[str, int], relay: Relay | None) -> "asyncio.Future[None]":
        """Done when all are accepted. `counts`: the partitions of their topics. PayloadError: nothing is sent."""
        keyless = next(self._spread)
        try:
            items = [self._outgoing(event, counts[event.topic], keyless, relay) for event in events]
        except (AttributeError, TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise Unserialisable(
                f"an event cannot be stored: {error}; value takes bytes, headers map str to str"
            ) from error
        return self._publisher.enter(items)

    async def close(self) -> None:
        await self._publisher.close()
        closing = asyncio.ensure_future(asyncio.to_thread(self._courier.close))
        await asyncio.wait([closing], timeout=_CLOSE_S)

    def _outgoing(self, event: Event, partitions: int, keyless: int, relay: Relay | None) -> RedisOutgoing:
        size = event.size
        if size > self._max_event_bytes:
            raise TooLarge(
                f"event {event.id} has {size} bytes, max_event_bytes is {self._max_event_bytes}; store the value "
                "elsewhere and publish a reference, or raise the limit"
            )
        data = _encode(event.whole())
        _decode(data)  # what is stored can be read
        index = keyless % partitions if event.key is None else partition_of(event.key, partitions)
        return Outgoing(event, index, size, Packed(data, relay))
