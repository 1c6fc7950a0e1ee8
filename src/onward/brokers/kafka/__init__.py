"""Apache Kafka: partitions by key, ownership by the group protocol, progress in commits and their metadata."""

from onward.brokers.kafka.broker import open_broker

__all__ = ["open_broker"]
