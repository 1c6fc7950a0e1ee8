"""RabbitMQ under the suites: each test has a virtual host of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from onward.brokers.rabbitmq.amqp.channel import Channel, Outbound
from onward.event import Event
from tests.servers.rabbitmq import RabbitMQServer

NOWHERE = "nowhere"  # no queue is bound with this routing key, so the server returns the message


class RabbitHarness:
    """A virtual host of a real server. To refuse, a message is sent with a routing key that leads to no queue, and the
    server returns it."""

    in_process = False

    def __init__(self, server: RabbitMQServer, vhost: str, folder: Path) -> None:
        self.folder = folder
        self.server = server
        self.vhost = vhost
        self.url = server.url_of(vhost)

    @contextmanager
    def refuse(self, event: Event) -> Iterator[None]:
        """The server refuses this event."""
        id_ = event.id.encode()
        with self._diverting(lambda message: id_ in message.properties):
            yield

    @contextmanager
    def refuse_aside(self, larger_than: int = 0) -> Iterator[None]:
        """The server refuses records, and retries of work queues."""
        kept_in = (".aside.", ".rung.")
        with self._diverting(
            lambda message: any(part in message.routing_key for part in kept_in) and len(message.body) > larger_than
        ):
            yield

    @contextmanager
    def _diverting(self, refused: Callable[[Outbound], bool]) -> Iterator[None]:
        send = Channel.send

        def diverting(channel: Channel, messages: Sequence[Outbound]) -> int:
            return send(channel, [_diverted(each) if refused(each) else each for each in messages])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "send", diverting)
            yield


def _diverted(message: Outbound) -> Outbound:
    return message._replace(routing_key=NOWHERE, mandatory=True)


SERVERS = [
    pytest.param("rabbitmq_server", marks=pytest.mark.servers),
    pytest.param("newer_rabbitmq_server", marks=[pytest.mark.servers, pytest.mark.more]),
    pytest.param("newest_rabbitmq_server", marks=[pytest.mark.servers, pytest.mark.more]),
]


@pytest.fixture(params=SERVERS)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RabbitHarness]:
    """On 3.10, and in `make test-more` on 4.0 and on the newest version."""
    server: RabbitMQServer = request.getfixturevalue(request.param)
    with server.vhost() as vhost:
        yield RabbitHarness(server, vhost, tmp_path)
