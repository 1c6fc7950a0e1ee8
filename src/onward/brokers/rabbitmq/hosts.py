"""The hosts of an address, in the order in which a process tries them."""

import asyncio
from collections.abc import Iterable, Iterator

from onward import clock
from onward.brokers.rabbitmq.address import RabbitHost
from onward.brokers.rabbitmq.amqp import AmqpError, ClosedByUs, Connection

_LACKS_S = 60.0  # a node may get a copy of a stream later, so it counts as one without it only for so long


class HostOrder:
    """A host goes to the end when it does not answer, or when a connection to it is lost. So one that is silent does
    not delay every new connection. All of it runs in one loop."""

    def __init__(self, hosts: Iterable[RabbitHost]) -> None:
        self._hosts = list(hosts)
        self._lacking: dict[tuple[RabbitHost, str], float] = {}  # when a host had no copy of a stream

    def __iter__(self) -> Iterator[RabbitHost]:
        return iter(tuple(self._hosts))

    def __len__(self) -> int:
        return len(self._hosts)

    def put_last(self, host: RabbitHost) -> None:
        self._hosts.remove(host)
        self._hosts.append(host)

    def watch(self, connection: Connection, host: RabbitHost) -> None:
        """Put the host last when this connection is lost."""

        def ended(closing: "asyncio.Future[AmqpError]") -> None:
            if not closing.cancelled() and not isinstance(closing.result(), ClosedByUs):
                self.put_last(host)

        connection.is_elsewhere = lambda stream: self.is_elsewhere(stream, host)
        connection.closing.add_done_callback(ended)

    def is_elsewhere(self, stream: str, host: RabbitHost) -> bool:
        """Whether another host may have the stream, which this one lacks. False if all of them lack it: the caller must
        not go round in circles."""
        now = clock.now()
        self._lacking = {each: at for each, at in self._lacking.items() if now <= at + _LACKS_S} | {(host, stream): now}
        return any((other, stream) not in self._lacking for other in self._hosts)
