"""RabbitMQ as a broker, over AMQP 0.9.1."""

from onward.brokers.base import Broker
from onward.brokers.rabbitmq.topology import Binding, Exchange, Queue
from onward.settings import Settings

__all__ = ["Binding", "Exchange", "Queue", "open_broker"]


async def open_broker(url: str, settings: Settings) -> Broker:
    """The server that the URL names. BrokerError: it does not answer, refuses the login, or cannot be used."""
    from onward.brokers.rabbitmq import broker  # a program that only names its topology starts faster

    return await broker.open_broker(url, settings)
