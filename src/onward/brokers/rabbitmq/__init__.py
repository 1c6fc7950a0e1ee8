"""RabbitMQ as a broker, over AMQP 0.9.1."""

from onward.brokers.rabbitmq.topology import Binding, Exchange, Queue

__all__ = ["Binding", "Exchange", "Queue"]
