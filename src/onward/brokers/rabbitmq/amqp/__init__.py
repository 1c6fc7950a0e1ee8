"""A client of AMQP 0.9.1 for asyncio. The pure modules know the wire format; `connection` and `channel` do the I/O."""

from onward.brokers.rabbitmq.amqp.assembly import Received
from onward.brokers.rabbitmq.amqp.channel import Channel, QueueState
from onward.brokers.rabbitmq.amqp.confirms import Outbound, PublishAnswer
from onward.brokers.rabbitmq.amqp.connection import Connection
from onward.brokers.rabbitmq.amqp.faults import (
    AmqpError,
    ChannelClosed,
    ClosedByUs,
    ConnectFailed,
    ConnectionLost,
    LoginRefused,
)
from onward.brokers.rabbitmq.amqp.frames import Properties, encoded_properties, header_table, properties_of

__all__ = [
    "AmqpError",
    "Channel",
    "ChannelClosed",
    "ClosedByUs",
    "ConnectFailed",
    "Connection",
    "ConnectionLost",
    "LoginRefused",
    "Outbound",
    "Properties",
    "PublishAnswer",
    "QueueState",
    "Received",
    "encoded_properties",
    "header_table",
    "properties_of",
]
