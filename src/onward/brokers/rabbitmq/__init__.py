"""RabbitMQ as a broker, over AMQP 0.9.1."""

from onward.brokers.rabbitmq.broker import open_broker
from onward.brokers.rabbitmq.topology import Binding, Exchange, Queue

__all__ = ["Binding", "Exchange", "Queue", "open_broker"]
