"""The AMQP client against a real server: every method, every kind of error, and every way to lose a connection."""

import asyncio
import functools
import itertools
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from uuid import uuid4

import pytest

from onward.brokers.rabbitmq.amqp import (
    AmqpError,
    Channel,
    ChannelClosed,
    ConnectFailed,
    Connection,
    ConnectionLost,
    LoginRefused,
    Outbound,
    Properties,
    PublishAnswer,
    Received,
    encoded_properties,
    properties_of,
)
from onward.brokers.rabbitmq.amqp.confirms import NACKED
from tests.servers.rabbitmq import RabbitMQServer

HOST = "127.0.0.1"
WAIT_S = 15.0
QUORUM = {"x-queue-type": "quorum"}
T = TypeVar("T")


def name() -> str:
    return f"amqp-{uuid4().hex[:12]}"


def properties(**given: Any) -> bytes:
    return encoded_properties(Properties(**given))


def out(key: str, body: bytes = b"body", *, exchange: str = "", id_: str = "1", mandatory: bool = True) -> Outbound:
    return Outbound(exchange, key, properties(message_id=id_, delivery_mode=2), body, mandatory)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


async def soon(awaited: Awaitable[T]) -> T:
    async with asyncio.timeout(WAIT_S):
        return await awaited


@asynccontextmanager
async def connected(server: Any, **options: Any) -> AsyncIterator[Connection]:
    connection = await Connection.open(HOST, server.port, **options)
    try:
        yield connection
    finally:
        await connection.close(timeout_s=1.0)


@asynccontextmanager
async def channels(server: Any, count: int = 1, **options: Any) -> AsyncIterator[list[Channel]]:
    async with connected(server, **options) as connection:
        yield [await connection.channel() for _ in range(count)]


class Inbox:
    """What a consumer received."""

    def __init__(self) -> None:
        self.messages: list[Received] = []
        self.lists = 0
        self._news = asyncio.Event()

    def __call__(self, messages: list[Received]) -> None:
        self.messages += messages
        self.lists += 1
        self._news.set()

    async def count(self, count: int) -> list[Received]:
        async with asyncio.timeout(WAIT_S):
            while len(self.messages) < count:
                self._news.clear()
                await self._news.wait()
        return self.messages


# -- the methods -------------------------------------------------------------------------------------------------------


def test_the_server_is_known_after_the_handshake(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with connected(rabbitmq_server, frame_max=8192) as connection:
            assert connection.product == "RabbitMQ"
            assert connection.version >= (3, 8)
            assert connection.server["capabilities"]["publisher_confirms"] is True
            assert (connection.frame_max, connection.channel_max) == (8192, 2047)
            assert connection.blocked is None
            assert not connection.is_closed

    run(main)


def test_messages_go_through_bound_exchanges_to_a_consumer(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server) as (channel,):
            queue, source, target = name(), name(), name()
            assert await channel.declare_queue(queue, arguments=QUORUM) == (queue, 0, 0)
            await channel.declare_exchange(source, "topic")
            await channel.declare_exchange(target, "headers", internal=True, auto_delete=True)
            await channel.declare_exchange(source, "topic", passive=True)
            await channel.bind_exchange(target, source, "a.#")
            await channel.bind_queue(queue, target, "", {"x-match": "all", "kind": "paid"})
            given = Properties("text/plain", "utf-8", {"kind": "paid", "n": -1}, 2, 3, "c", "r", "90000", "m", 1, "t")
            message = Outbound(source, "a.b", encoded_properties(given), b"body")
            other = Outbound(source, "b.a", encoded_properties(given), b"body")
            assert await channel.publish([message, other]) == [
                None,
                f"exchange '{source}', routing key 'b.a': 312 NO_ROUTE",
            ]

            inbox = Inbox()
            tag = await channel.consume(queue, inbox)
            (received,) = await inbox.count(1)
            assert received[:4] == (1, False, source, "a.b")
            assert (received.body, received.consumer) == (b"body", tag)
            assert properties_of(received.properties) == given
            channel.ack(received.tag)
            await channel.cancel(tag)

            await channel.unbind_queue(queue, target, "", {"x-match": "all", "kind": "paid"})
            assert await channel.publish([message]) == [f"exchange '{source}', routing key 'a.b': 312 NO_ROUTE"]
            await channel.unbind_exchange(target, source, "a.#")
            await channel.delete_exchange(source)
            await channel.publish([out(queue), out(queue)])
            assert await channel.delete_queue(queue) == 2
            assert await channel.delete_queue(queue) == 0

    run(main)


def test_prefetch_acks_and_nacks_are_kept(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server, 2) as (channel, other):
            queue = (await channel.declare_queue("", exclusive=True)).name
            await channel.publish([out(queue, b"%d" % each) for each in range(10)])
            await channel.qos(4)
            inbox = Inbox()
            await channel.consume(queue, inbox, tag="mine")
            assert [each.body for each in await inbox.count(4)] == [b"0", b"1", b"2", b"3"]
            assert (await other.declare_queue(queue, passive=True)).messages == 6
            channel.ack(2, multiple=True)
            assert len(await inbox.count(6)) == 6
            channel.nack(3)
            again = (await inbox.count(7))[6]
            assert (again.tag, again.body, again.redelivered) == (7, b"2", True)
            channel.nack(7, multiple=True, requeue=False)
            assert [each.body for each in (await inbox.count(11))[7:]] == [b"6", b"7", b"8", b"9"]
            await channel.close()
            state = await other.declare_queue(queue, passive=True)
            assert (state.messages, state.consumers) == (4, 0)

    run(main)


def test_a_reply_comes_after_the_deliveries_that_were_sent_before_it(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server) as (channel,):
            stream = name()
            await channel.declare_queue(stream, arguments={"x-queue-type": "stream"})
            await channel.publish([out(stream, bytes(50)) for _ in range(1000)])
            await channel.qos(2000)
            inbox = Inbox()
            await channel.consume(stream, inbox, arguments={"x-stream-offset": "first"})
            await inbox.count(1000)
            last = inbox.messages[-1]
            assert (properties_of(last.properties).headers or {})["x-stream-offset"] == 999
            assert inbox.lists < 200

            tail = Inbox()
            await channel.consume(stream, tail, arguments={"x-stream-offset": "last"})
            await tail.count(1)
            await channel.qos(2000)
            assert (properties_of(tail.messages[-1].properties).headers or {})["x-stream-offset"] == 999
            await channel.delete_queue(stream)

    run(main)


@pytest.mark.parametrize("frame_max", [4096, 131072])
def test_bodies_of_every_size_come_back(rabbitmq_server: RabbitMQServer, frame_max: int) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server, frame_max=frame_max) as (channel,):
            queue = (await channel.declare_queue("", exclusive=True)).name
            room = frame_max - 8
            sizes = [0, 1, room - 1, room, room + 1, 2 * room, 2 * room + 1, 1_000_000]
            bodies = [bytes(itertools.islice(itertools.cycle(range(251)), size)) for size in sizes]
            assert await channel.publish([out(queue, body) for body in bodies]) == [None] * len(sizes)
            inbox = Inbox()
            await channel.consume(queue, inbox, no_ack=True)
            assert [each.body for each in await inbox.count(len(sizes))] == bodies

    run(main)


def test_requests_of_many_tasks_share_a_channel(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server) as (channel,):
            names = [name() for _ in range(30)]
            declares = [channel.declare_queue(each, exclusive=True) for each in names]
            assert [each.name for each in await asyncio.gather(*declares)] == names
            keys = [[out(each)] for each in names]
            assert await asyncio.gather(*(channel.publish(each) for each in keys)) == [[None]] * 30

    run(main)


def test_a_cancelled_request_takes_its_reply_with_it(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server) as (channel,):
            first, second = name(), name()
            cancelled = asyncio.create_task(channel.declare_queue(first, exclusive=True))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert (await channel.declare_queue(second, exclusive=True)).name == second

            opening = asyncio.create_task(channel.connection.channel())
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            other = await channel.connection.channel()
            assert (await other.declare_queue(second, passive=True)).name == second

    run(main)


def test_numbers_of_closed_channels_are_used_again(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server) as (kept,):
            connection = kept.connection
            with pytest.raises(ChannelClosed):
                await missing(await connection.channel(), kept)
            opening = asyncio.create_task(connection.channel())
            await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
            for _ in range(3):
                some = await asyncio.gather(*(connection.channel() for _ in range(100)))
                assert kept.number not in {each.number for each in some}
                await asyncio.gather(*(each.close() for each in some))
            assert (await kept.declare_queue("", exclusive=True)).messages == 0
            everything = await asyncio.gather(*(connection.channel() for _ in range(2046)))
            with pytest.raises(AmqpError, match="all 2047 channels"):
                await connection.channel()
            assert len({each.number for each in everything}) == 2046

    run(main)


# -- errors of a channel -----------------------------------------------------------------------------------------------


async def missing(channel: Channel, _: Channel) -> None:
    await channel.declare_queue("amqp-missing", passive=True)


async def different(channel: Channel, _: Channel) -> None:
    queue = name()
    await channel.declare_queue(queue, exclusive=True)
    await channel.declare_queue(queue, exclusive=True, arguments={"x-max-length": 5})


async def forbidden(channel: Channel, _: Channel) -> None:
    await channel.declare_queue("amq.mine")


async def locked(channel: Channel, other: Channel) -> None:
    queue = (await other.declare_queue("", exclusive=True)).name
    await channel.declare_queue(queue, passive=True)


async def unknown_tag(channel: Channel, _: Channel) -> None:
    channel.ack(99)
    await channel.qos(1)


async def no_exchange(channel: Channel, _: Channel) -> None:
    await channel.publish([out("q", exchange="amqp-missing")])


@pytest.mark.parametrize(
    ("attempt", "code", "text", "method"),
    [
        (missing, 404, "no queue 'amqp-missing'", "queue.declare"),
        (different, 406, "x-max-length", "queue.declare"),
        (forbidden, 403, "reserved prefix", "queue.declare"),
        (locked, 405, "exclusive access to locked queue", "queue.declare"),
        (unknown_tag, 406, "unknown delivery tag 99", "basic.ack"),
        (no_exchange, 404, "no exchange 'amqp-missing'", "basic.publish"),
    ],
)
def test_an_error_closes_the_channel_alone(
    rabbitmq_server: RabbitMQServer, attempt: Any, code: int, text: str, method: str
) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server) as (other,), channels(rabbitmq_server, 2) as (channel, neighbour):
            with pytest.raises(ChannelClosed, match=text) as caught:
                await soon(attempt(channel, other))
            error = caught.value
            assert (error.code, error.method) == (code, method)
            assert text in error.text
            assert channel.is_closed
            assert str(await channel.closing) == str(error)
            for call in (channel.qos(1), channel.publish([out("q")])):
                with pytest.raises(ChannelClosed, match=text):
                    await call
            with pytest.raises(ChannelClosed, match=text):
                channel.send([out("q")])
            channel.ack(1)
            await channel.close()
            assert (await neighbour.declare_queue("", exclusive=True)).messages == 0
            assert (await channel.connection.channel()).number != neighbour.number

    run(main)


def test_a_close_from_both_sides_at_once(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with connected(rabbitmq_server) as connection:
            for _ in range(20):
                channel = await connection.channel()
                failing = asyncio.create_task(channel.declare_queue("amqp-missing", passive=True))
                await asyncio.sleep(0)
                await soon(channel.close())
                with pytest.raises(ChannelClosed) as caught:
                    await failing
                assert caught.value.code == 0
            assert not connection.is_closed
            await connection.channel()

    run(main)


def test_an_error_of_the_connection_ends_all_channels(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server, 2) as (channel, neighbour):
            with pytest.raises(ConnectionLost, match=r"(unknown|invalid) exchange type 'none'") as caught:
                await soon(channel.declare_exchange(name(), "none"))
            assert caught.value.code == 503
            assert isinstance(await neighbour.closing, ConnectionLost)
            with pytest.raises(ConnectionLost, match="exchange type"):
                await channel.connection.channel()

    run(main)


def test_what_cannot_be_encoded_is_refused_and_harms_nothing(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server) as (channel,):
            queue = (await channel.declare_queue("", exclusive=True)).name
            await channel.confirm_select()
            with pytest.raises(ValueError, match="256 bytes"):
                channel.send([out(queue), out("k" * 256)])
            with pytest.raises(ValueError, match="of headers"):
                channel.send([out(queue, id_="2"), Outbound("", queue, properties(headers={"h": "x" * 200_000}), b"")])
            with pytest.raises(ValueError, match="has no type"):
                await channel.consume(queue, Inbox(), tag="c", arguments={"x": object()})
            inbox = Inbox()
            await channel.consume(queue, inbox, tag="c")
            with pytest.raises(ValueError, match="already has a consumer"):
                await channel.consume(queue, inbox, tag="c")
            assert await channel.publish([out(queue, id_="3")]) == [None]
            assert [properties_of(each.properties).message_id for each in await inbox.count(1)] == ["3"]

    run(main)


# -- confirms ----------------------------------------------------------------------------------------------------------


def test_returned_messages_are_refused_and_their_confirms_swallowed(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server) as (channel,):
            queue = (await channel.declare_queue("", exclusive=True)).name
            await channel.confirm_select()
            answers: list[PublishAnswer] = []
            channel.on_answers = answers.extend
            burst = [
                out(queue if each % 3 else "amqp-nowhere", b"x" * (each % 7), id_=str(each)) for each in range(300)
            ]
            assert channel.send(burst) == 1
            assert channel.send([out("amqp-nowhere", mandatory=False)]) == 301
            assert await channel.publish([out(queue)]) == [None]
            numbers = [number for each in answers for number in range(each.first, each.last + 1)]
            assert sorted(numbers) == list(range(1, 303))
            refused = [each for each in answers if each.why]
            assert [each.first for each in refused] == list(range(1, 301, 3))
            assert not any(each.unknown for each in answers)

    run(main)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_full_queue_answers_with_nack(rabbitmq_server: RabbitMQServer, kind: str) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server) as (channel,):
            queue = name()
            arguments = {"x-queue-type": kind, "x-max-length": 1, "x-overflow": "reject-publish"}
            await channel.declare_queue(queue, arguments=arguments)
            await channel.confirm_select()
            answers: list[PublishAnswer] = []
            channel.on_answers = answers.extend
            results: list[str | None] = [None]
            while results == [None]:  # a quorum queue notices late that it is full
                results = await soon(channel.publish([out(queue)]))
            assert results == [NACKED]
            assert answers[-1].unknown
            assert [each.unknown for each in answers[:-1]] == [False] * (len(answers) - 1)
            await channel.delete_queue(queue)

    run(main)


def test_open_messages_are_unknown_when_the_channel_ends(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server, 2) as (channel, closed):
            for each in (channel, closed):
                await each.confirm_select()
            answers: list[PublishAnswer] = []
            channel.on_answers = answers.extend
            channel.send([out("q", exchange="amqp-missing", id_=str(each)) for each in range(5)])
            assert isinstance(await soon(channel.closing), ChannelClosed)
            ((first, last, why, unknown),) = answers
            assert (first, last, unknown) == (1, 5, True)
            assert "no exchange 'amqp-missing'" in str(why)

            waiting = asyncio.create_task(closed.publish([out("amqp-nowhere")]))
            await asyncio.sleep(0)
            await closed.close()
            with pytest.raises(ChannelClosed, match="closed by us"):
                await waiting

    run(main)


# -- the server's side -------------------------------------------------------------------------------------------------


def test_the_server_cancels_a_consumer_whose_queue_is_deleted(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server, 2) as (channel, other):
            queue, cancelled = name(), asyncio.Event()
            await channel.declare_queue(queue, arguments=QUORUM)
            tag = await channel.consume(queue, Inbox(), on_cancel=cancelled.set)
            await other.delete_queue(queue)
            await soon(cancelled.wait())
            await channel.cancel(tag)  # no error, although the server was faster
            await channel.declare_queue(queue, arguments=QUORUM)
            inbox = Inbox()
            await channel.consume(queue, inbox, tag=tag)
            await channel.publish([out(queue)])
            await inbox.count(1)
            await channel.delete_queue(queue)

    run(main)


def test_an_alarm_blocks_publishers_and_no_reader(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server, heartbeat_s=1) as (channel,), channels(rabbitmq_server) as (reader,):
            queue = name()
            await channel.declare_queue(queue)
            await channel.publish([out(queue, b"before")])
            states: asyncio.Queue[str | None] = asyncio.Queue()
            channel.connection.on_blocked = states.put_nowait
            try:
                await asyncio.to_thread(rabbitmq_server.alarm, on=True)
                publishing = asyncio.create_task(channel.publish([out(queue, bytes(3_000_000))] * 5))
                assert await soon(states.get()) == "low on memory"
                assert channel.connection.blocked == "low on memory"
                inbox = Inbox()
                await reader.consume(queue, inbox)
                await inbox.count(1)
                await asyncio.wait([channel.connection.closing], timeout=3.5)
                assert not publishing.done()  # the server does not read
                assert not channel.connection.is_closed  # we hear its heartbeats
            finally:
                await asyncio.to_thread(rabbitmq_server.alarm, on=False)
            assert [await soon(states.get()), channel.connection.blocked] == [None, None]
            assert await soon(publishing) == [None] * 5
            await channel.delete_queue(queue)

    run(main)


def test_an_idle_connection_lives_by_its_heartbeats(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with connected(rabbitmq_server, heartbeat_s=1) as connection:
            done, _ = await asyncio.wait([connection.closing], timeout=3.5)  # the server's limit is 2 to 3 s
            assert not done
            await connection.channel()

    run(main)


def test_a_silent_server_is_given_up_after_two_heartbeats(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        async with channels(rabbitmq_server, heartbeat_s=1) as (channel,):
            await asyncio.to_thread(rabbitmq_server.pause)
            begun = time.monotonic()
            try:
                with pytest.raises(ConnectionLost, match="silent for 2 s"):
                    await soon(channel.qos(1))
            finally:
                await asyncio.to_thread(rabbitmq_server.resume)
            assert 1.5 < time.monotonic() - begun < 5.0

    run(main)


def test_closing_does_not_wait_for_a_server_that_hangs(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        connection = await Connection.open(HOST, rabbitmq_server.port)
        channel = await connection.channel()
        await asyncio.to_thread(rabbitmq_server.pause)
        try:
            begun = time.monotonic()
            await asyncio.gather(channel.close(), connection.close(timeout_s=0.5), connection.close(timeout_s=0.5))
            assert time.monotonic() - begun < 2.0
        finally:
            await asyncio.to_thread(rabbitmq_server.resume)
        await connection.close()
        assert str(await connection.closing) == "closed by us"

    run(main)


def test_a_cut_connection_ends_everything_that_waits(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        with rabbitmq_server.proxy() as proxy:
            async with channels(proxy, 2) as (channel, neighbour):
                await channel.confirm_select()
                answers: list[PublishAnswer] = []
                channel.on_answers = answers.extend
                await asyncio.to_thread(proxy.stall)
                channel.send([out("amqp-nowhere", id_=str(each)) for each in range(7)])
                waiting = [
                    asyncio.create_task(each)
                    for each in (neighbour.qos(1), neighbour.close(), channel.publish([out("q")]), channel.qos(1))
                ]
                await asyncio.sleep(0.05)
                await asyncio.to_thread(proxy.cut)
                results = await soon(asyncio.gather(*waiting, return_exceptions=True))
                assert [type(each) for each in results] == [ChannelClosed, type(None), ConnectionLost, ConnectionLost]
                assert [(each.first, each.last, each.unknown) for each in answers] == [(1, 8, True)]
                assert isinstance(await channel.closing, ConnectionLost)
                assert (await channel.connection.closing).code == 0  # type: ignore[attr-defined]

    run(main)


def test_a_connection_closed_by_an_operator_says_so(rabbitmq_server: RabbitMQServer) -> None:
    with rabbitmq_server.vhost() as vhost:

        async def main() -> None:
            async with channels(rabbitmq_server, vhost=vhost, name="amqp test") as (channel,):
                await asyncio.to_thread(rabbitmq_server.ctl, "close_all_connections", "--vhost", vhost, "maintenance")
                lost = await soon(channel.closing)
                assert isinstance(lost, ConnectionLost)
                assert lost.code == 320
                assert "maintenance" in lost.text

        run(main)


def test_a_callback_that_fails_closes_the_connection(
    rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("broken")

    async def main() -> None:
        async with channels(rabbitmq_server, 2) as (channel, publisher):
            queue = (await channel.declare_queue("", exclusive=True)).name
            await channel.consume(queue, broken)
            await publisher.confirm_select()
            publisher.send([out(queue)])
            lost = await soon(publisher.closing)
            assert "callback failed: ZeroDivisionError" in str(lost)
        async with channels(rabbitmq_server) as (channel,):
            await channel.confirm_select()
            channel.send([out("amqp-nowhere")])
            channel.on_answers = broken
            await channel.close()
            assert channel.connection.is_closed

    with caplog.at_level(logging.ERROR, "onward"):
        run(main)
    assert caplog.text.count("ZeroDivisionError: broken") == 2


# -- connecting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"password": "wrong"}, "ACCESS_REFUSED"),
        ({"user": "stranger"}, "ACCESS_REFUSED"),
        ({"vhost": "missing"}, "vhost missing not found"),
    ],
)
def test_a_wrong_login_is_refused(rabbitmq_server: RabbitMQServer, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LoginRefused, match=f"{HOST}:{rabbitmq_server.port} refused the login: .*{says}"):
        run(functools.partial(opened, rabbitmq_server.port, **options))


async def opened(port: int, **options: Any) -> None:
    await (await Connection.open(HOST, port, **options)).close()


def test_a_port_without_amqp_is_named() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port = listener.getsockname()[1]
        with pytest.raises(ConnectFailed, match=f"{HOST}:{port} cannot be reached"):
            run(functools.partial(opened, port))
        listener.listen()
        with pytest.raises(ConnectFailed, match=f"{HOST}:{port} did not answer within 0.2 s"):
            run(functools.partial(opened, port, timeout_s=0.2))


def test_a_cancelled_open_leaves_no_socket(rabbitmq_server: RabbitMQServer) -> None:
    async def main() -> None:
        for delay_s in (0, 0.0005, 0.001, 0.002, 0.004):
            opening = asyncio.create_task(Connection.open(HOST, rabbitmq_server.port))
            await asyncio.sleep(delay_s)
            opening.cancel()
            (result,) = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(result, Connection):
                await result.close()

    run(main)
