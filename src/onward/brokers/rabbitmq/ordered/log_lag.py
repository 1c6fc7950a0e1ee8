"""How many events of a partition were not delivered yet."""

import time

from onward import clock
from onward.brokers.base import BrokerLag
from onward.brokers.core.holdings import Chunk
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError, Connection
from onward.brokers.rabbitmq.message import RabbitEvent, appended
from onward.brokers.rabbitmq.ordered.log_reader import PartitionReader
from onward.brokers.rabbitmq.ordered.ordered_hold import OrderedHold
from onward.brokers.rabbitmq.stream_reader import EmptyStream, end_of
from onward.errors import BrokerError

_QUIET_S = 3.0  # a reader that may get more and has heard nothing for this long has read everything


async def lag_of(connection: Connection, hold: OrderedHold, reader: PartitionReader | None) -> BrokerLag:
    """Events that were read and not handed out count as undelivered. Offsets have a gap at each segment of the stream,
    so there may be a few events fewer."""
    if reader is None or reader.trouble:
        return BrokerLag(None, None)
    unread = 0
    if reader.is_stalled or clock.now() - reader.heard_at < _QUIET_S:
        try:
            unread = max(0, await end_of(connection, names.stream(*hold.partition)) - reader.position)
        except EmptyStream:
            pass
        except (AmqpError, BrokerError):
            return BrokerLag(None, None)
    chunks = [chunk for chunk in tuple(hold.ahead.chunks) if isinstance(chunk, Chunk)]
    event = chunks[0].deliveries[0].event if chunks else None
    age_s = max(0.0, time.time() - appended(event)) if isinstance(event, RabbitEvent) else None
    return BrokerLag(hold.ahead.events + unread, age_s)
