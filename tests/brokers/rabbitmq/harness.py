"""RabbitMQ under the suites: each test has a virtual host of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from onward.brokers.rabbitmq.amqp import Channel, Outbound
from onward.event import Event
from tests.servers.rabbitmq import RabbitMQServer

NOWHERE = "onward.nowhere"  # no queue and no exchange has this name


class RabbitHarness:
    """A virtual host of a real server."""

    in_process = False

    def __init__(self, server: RabbitMQServer, vhost: str, folder: Path) -> None:
        self.folder = folder
        self.server = server
        self.vhost = vhost
        self.url = f"{server.url_of(vhost)}?client.heartbeat_s=2"  # the least: a suspended member is cut off sooner

    @contextmanager
    def refuse(self, event: Event) -> Iterator[None]:
        """The event is sent to a missing exchange. The server closes the channel, and stores nothing that was sent
        behind it."""
        id_ = event.id.encode()
        with self._changing(
            lambda each: each._replace(exchange=NOWHERE) if id_ in each.properties else each,
        ):
            yield

    @contextmanager
    def refuse_aside(self, larger_than: int = 0) -> Iterator[None]:
        """Records, and retries of work queues, are sent to a missing queue. The server returns them."""
        stores = (".aside.", ".rung.")

        def diverted(each: Outbound) -> Outbound:
            is_record = any(part in each.routing_key for part in stores) and len(each.body) > larger_than
            return each._replace(routing_key=NOWHERE) if is_record else each

        with self._changing(diverted):
            yield

    @contextmanager
    def _changing(self, change: Callable[[Outbound], Outbound]) -> Iterator[None]:
        """What the clients of this process send."""
        send = Channel.send

        def changing(channel: Channel, messages: Sequence[Outbound]) -> int:
            return send(channel, [change(each) for each in messages])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "send", changing)
            yield


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
