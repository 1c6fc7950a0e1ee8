"""Redis: a stream for each partition, leases and progress in hashes, every write by a script that checks the owner."""

from onward.brokers.redis.broker import open_broker
from onward.brokers.redis.streams import Streams

__all__ = ["Streams", "open_broker"]
