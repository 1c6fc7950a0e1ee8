"""RabbitMQ over AMQP 0.9.1. A topic is an exchange with a stream for each partition.

broker.py          the contract; groups.py: which kind of group a handler joins
ordered/           groups with order: a token for each partition says who owns it and how far the group is
work/              groups without order: a queue that all members share, retries on rungs, tiers
aside/             waiting, held and dead events, in streams that are folded
registry/          which topics and groups exist
publish/           sending events, with a confirm for each
operate/           topology as code, `onward doctor`, metrics
presence.py        who is in a group, and what its members say of themselves
message.py         events as messages (pure); names.py: names and arguments of queues and exchanges (pure)
stream_reader.py   reads streams and finds their ends; server_errors.py: what refusals mean (pure)
ground.py          what all parts share: settings, thread, connections
io_thread.py       the thread that talks to the server; connecting.py and address.py: how it finds it
amqp/              the client
"""

from onward.brokers.base import Broker, Topology
from onward.brokers.rabbitmq.operate.topology import Binding, Exchange, Queue
from onward.settings import Settings

__all__ = ["Binding", "Exchange", "Queue", "open_broker"]


async def open_broker(url: str, settings: Settings) -> Broker:
    """The server that the URL names. BrokerError: it does not answer, refuses the login, or cannot be used."""
    from onward.brokers.rabbitmq import broker  # a program that only names its topology starts faster

    return await broker.open_broker(url, settings)


def uncompared(settings: Settings, topology: Topology) -> str:
    """Bindings, without the management API."""
    from onward.brokers.rabbitmq.address import RabbitAddress

    has_bindings = any(isinstance(each, Binding) for each in topology.own)
    has_bindings |= any(group.ordering == "none" for group in topology.groups)
    if not has_bindings or RabbitAddress.of(settings.url, settings).client.management_url is not None:
        return ""
    return "bindings were not compared, because client.management_url is not set; `onward topology apply` binds again"
