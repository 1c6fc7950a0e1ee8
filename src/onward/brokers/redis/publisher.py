"""Publishing: events are encoded in the caller's thread and sent in windows by the courier."""

import asyncio
import hashlib
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from onward.brokers.base import Relay
from onward.brokers.core.partitioner import partition_of
from onward.brokers.core.publishing import Outgoing, Publisher
from onward.brokers.redis.courier import Packed, RedisCourier, RedisOutgoing
from onward.brokers.redis.foreign.entries import fields_of, packed
from onward.brokers.redis.foreign.streams import Streams
from onward.brokers.redis.keys import Keyspace
from onward.errors import BadSetting, TooLarge, Unserialisable
from onward.event import Event
from onward.settings import Settings

_CLOSE_S = 5.0
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


class RedisPublisher:
    def __init__(self, courier: RedisCourier, settings: Settings, keyspace: Keyspace) -> None:
        self.in_turn = asyncio.Lock()  # calls take effect in the order they entered, even while a topic is looked up
        self._keyspace = keyspace
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
        streams = self._keyspace.mapped(event.topic)
        if streams is not None:
            data = packed(fields_of(event.whole(), streams))
            return Outgoing(event, _shard_of(event, streams, keyless), size, Packed(data, relay))
        data = _encode(event.whole())
        _decode(data)  # what is stored can be read
        index = keyless % partitions if event.key is None else partition_of(event.key, partitions)
        return Outgoing(event, index, size, Packed(data, relay))


def _shard_of(event: Event, streams: Streams, keyless: int) -> int:
    """As the other program chooses it."""
    if streams.partitions == 1:
        return 0
    if streams.hash is None:
        raise BadSetting(
            f"topic {event.topic} is on {streams.partitions} streams of another program, and this process does not "
            "know how it spreads keys over them; to publish, write hash='md5' or hash='murmur2' in its Streams"
        )
    if event.key is None:
        return keyless % streams.partitions
    if streams.hash == "murmur2":
        return partition_of(event.key, streams.partitions)
    digest = hashlib.md5(event.key.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") % streams.partitions
