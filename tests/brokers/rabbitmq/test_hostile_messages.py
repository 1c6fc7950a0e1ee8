"""Messages that other programs have made so that they are hard to read, or to send again. Each is handled by its group
as any other message is: retried, stored as a dead letter, replayed, and its neighbours go on."""

import asyncio
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import Onward, Retry
from onward.brokers.base import Filter, State, Tries
from onward.brokers.rabbitmq.amqp import Channel, Connection, Outbound, Received, properties_of
from onward.brokers.rabbitmq.amqp.raw_properties import entries_of, fields_of, joined_entries, joined_fields
from onward.brokers.rabbitmq.work.rungs import Retrying
from onward.brokers.rabbitmq.work.work_message import PROPERTIES_HEADER, arrived, is_ours, resent
from onward.testing.failure_shop import eventually, until
from tests.brokers.rabbitmq.stage import played
from tests.servers.rabbitmq import RabbitMQServer

QUEUE = "onward.orders:billing:work"
RETRY = Retry(attempts=3, first_delay_s=0.2, factor=1, jitter=0)
ODD = b'{"odd": 1}'


def short(raw: bytes) -> bytes:
    return bytes((len(raw),)) + raw


def long(raw: bytes) -> bytes:
    return struct.pack(">I", len(raw)) + raw


def entry(name: bytes, kind: bytes, value: bytes) -> bytes:
    return short(name) + kind + value


def headers(*entries: bytes, flags: int = 0, tail: bytes = b"") -> bytes:
    return struct.pack(">H", 0x2000 | flags) + long(b"".join(entries)) + tail


def nested(depth: int) -> bytes:
    found = b""
    for _ in range(depth):
        found = b"A" + long(found)
    return found


PLAIN = entry(b"a", b"S", long(b"x"))
NOT_TEXT = b"\xff" * 255  # as escapes it is four times as long

MESSAGES = {
    "plain": headers(PLAIN),
    "a time that no calendar has": headers(entry(b"when", b"T", b"\xff" * 8)),
    "a name that is not text": headers(entry(b"\xff" * 200, b"S", long(b"x"))),
    "a correlation id that is not text": headers(PLAIN, flags=0x0400, tail=short(NOT_TEXT)),
    "a message id that is not text": headers(PLAIN, flags=0x0080, tail=short(NOT_TEXT)),
    "an array of bytes": headers(entry(b"a", b"A", long(b"b\x01" * 30_000))),
    "many arrays in each other": headers(entry(b"a", b"A", long(nested(100)))),
    "large headers": headers(entry(b"a", b"S", long(b"x" * 130_900))),
    "more attempts than a number can count": headers(entry(b"onward-tries", b"S", long(b"1e30,0,0"))),
    "a time of sending that is text": headers(
        entry(b"onward-at", b"S", long(b"hello")), entry(b"onward-header.onward-priority", b"S", long(b"zzz"))
    ),
    "a time of sending, and a priority that is no number": headers(
        entry(b"onward-at", b"l", b"\0" * 8), entry(b"onward-header.onward-priority", b"S", long(b"zzz"))
    ),
}
messages = pytest.mark.parametrize("name", MESSAGES)


def message(properties: bytes) -> Received:
    return Received(1, False, "", "", properties, ODD, "normal-1")


# -- pure -------------------------------------------------------------------------------------------------------------


@messages
def test_the_attempts_survive_whatever_the_properties_are(name: str) -> None:
    state = Retrying(Tries(2, 0, 1), 5.0, 500.0, 3.0)
    sent = resent(message(MESSAGES[name]), state, id_="id", type_="type", suspect="s")
    found = arrived(message(sent))
    assert (found.state.tries, found.suspect) == (Tries(2, 0, 1), "s")
    assert arrived(message(resent(message(sent), Retrying(Tries(3))))).state.tries == Tries(3)
    assert len(sent) < 131_000, "it fits into a frame"


def test_what_is_sent_again_has_every_other_byte_of_the_original() -> None:
    odd = entry(b"when", b"T", b"\xff" * 8)
    raw = headers(odd, entry(b"CC", b"A", long(b"")), PLAIN, flags=0x0400, tail=short(NOT_TEXT))
    fields = fields_of(resent(message(raw), None))
    assert fields["correlation_id"] == short(NOT_TEXT)
    assert [each for _, each in entries_of(fields["headers"])] == [odd, PLAIN]


@given(st.binary(max_size=60), st.binary(max_size=60), st.booleans())
def test_no_bytes_make_it_fail(head: bytes, tail: bytes, has_table: bool) -> None:
    raw = headers(head, tail=tail) if has_table else head + tail
    sent = resent(message(raw), Retrying(Tries(4)), id_="x" * 300, type_="")
    assert arrived(message(sent)).state.tries == Tries(4)
    is_ours(message(raw))


@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9))))
def test_fields_and_entries_are_joined_as_they_were(pairs: list[tuple[bytes, bytes]]) -> None:
    entries = [entry(name, b"S", long(value)) for name, value in pairs]
    raw = headers(*entries, flags=0x1000, tail=b"\x02")
    fields = fields_of(raw)
    assert joined_fields(fields) == raw
    assert entries_of(fields["headers"]) == [(name, each) for (name, _), each in zip(pairs, entries, strict=True)]
    assert joined_entries(entries) == fields["headers"]


def test_only_a_time_of_sending_that_is_a_number_says_that_a_message_is_ours() -> None:
    assert not is_ours(message(MESSAGES["a time of sending that is text"]))
    assert not is_ours(message(headers(entry(b"a", b"S", long(entry(b"onward-at", b"l", b"\0" * 8))))))
    assert is_ours(message(headers(entry(b"onward-at", b"l", b"\0" * 8))))


# -- on a server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    with rabbitmq_server.vhost() as vhost:
        yield rabbitmq_server.url_of(vhost)


class Billing:
    """An application whose handler fails for odd messages until it is cured."""

    def __init__(self, url: str) -> None:
        self.app = Onward(url, partitions=1, drain_timeout_s=5.0)
        self.runs: Counter[bytes] = Counter()
        self.cured = False
        self.done: list[bytes] = []
        self.keys: list[str | None] = []

        @self.app.handler("orders", group="billing", ordering="none", start="latest", retry=RETRY)
        async def bill(value: bytes) -> None:
            self.runs[value] += 1
            if value == ODD and not self.cured:
                raise ValueError("odd")
            self.done.append(value)

    async def has_dead(self, count: int) -> bool:
        where = Filter(states=frozenset({State.DEAD}))
        return len((await self.app.broker.aside("billing").scan(where, None, 100)).records) == count

    async def joined(self) -> None:
        await self.app.publish("orders", b"first")
        await until(lambda: b"first" in self.done, "it has joined")


async def put(app: Onward, properties: bytes) -> None:
    """As another program does."""
    ground: Any = app.broker
    connection: Connection = await ground._ground.io.run(ground._ground.query())

    async def publish() -> list[str | None]:
        channel: Channel = await connection.channel()
        return await channel.publish([Outbound("", QUEUE, properties, ODD)])

    assert await ground._ground.io.run(publish()) == [None]


@pytest.mark.servers
@messages
@played
async def test_a_hostile_message_is_retried_becomes_a_dead_letter_and_is_replayed(url: str, name: str) -> None:
    billing = Billing(url)
    async with billing.app.running():
        await billing.joined()
        await put(billing.app, MESSAGES[name])
        await billing.app.publish("orders", b"next")
        await until(lambda: b"next" in billing.done, "its neighbour is handled")
        await eventually(lambda: billing.has_dead(1), "it is a dead letter")
        assert billing.runs[ODD] == RETRY.attempts
        billing.cured = True
        await billing.app.dead.replay()
        if name == "a time of sending, and a priority that is no number":  # no message of Onward can have it
            await eventually(lambda: billing.has_dead(1), "it is a dead letter again")
        else:
            await until(lambda: ODD in billing.done, "the replay is handled")
            await eventually(lambda: billing.has_dead(0), "its record is removed")
        await billing.app.publish("orders", b"last")
        await until(lambda: b"last" in billing.done, "the group goes on")
        await until(lambda: billing.app.health().ready, "the application is ready")


@pytest.mark.servers
@messages
@played
async def test_a_hostile_message_that_was_returned_stops_no_member(url: str, name: str) -> None:
    """As if members had died with it: it goes to the suspects, and runs alone."""
    billing = Billing(url)
    billing.cured = True
    async with billing.app.running():
        await billing.joined()
    async with billing.app:
        await put(billing.app, MESSAGES[name])
        await return_all(billing.app, 3)
    billing = Billing(url)
    billing.cured = True
    async with billing.app.running():
        await billing.app.publish("orders", b"next")
        await until(lambda: {ODD, b"next"} <= set(billing.done), "both are handled")
        await until(lambda: billing.app.health().ready, "the application is ready")


async def return_all(app: Onward, times: int) -> None:
    """Take the messages of the queue and return them."""
    ground: Any = app.broker

    async def once() -> None:
        connection = await ground._ground.connect("test", report=print)
        channel = await connection.channel()
        got = asyncio.Event()
        await channel.consume(QUEUE, lambda _: got.set())
        await got.wait()
        await connection.close()

    for _ in range(times):
        await ground._ground.io.run(once())


@pytest.mark.servers
@played
async def test_a_header_of_an_own_event_is_not_taken_for_the_properties_of_its_message(url: str) -> None:
    billing = Billing(url)
    async with billing.app.running():
        await billing.joined()
        for value in ("AAAA", "gAA=", "no base64"):
            await billing.app.publish("orders", ODD, key="k", headers={PROPERTIES_HEADER: value})
        await eventually(lambda: billing.has_dead(3), "they are dead letters")
        billing.cured = True
        await billing.app.dead.replay()
        await until(lambda: billing.done.count(ODD) == 3, "the replays are handled")
        await until(lambda: billing.app.health().ready, "the application is ready")


def test_a_message_without_properties_can_be_sent_again() -> None:
    found = properties_of(resent(message(b"\0\0"), Retrying(Tries(1)), id_="id", type_="t"))
    assert (found.message_id, found.type, found.delivery_mode) == ("id", "t", 2)
