"""Frames, methods and properties, with pika as the judge in both directions."""

import inspect
import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pika import frame as pika_frame  # type: ignore[import-untyped]
from pika import spec

from onward.brokers.rabbitmq.amqp import Outbound, Properties, encoded_properties, frames, header_table, properties_of
from onward.brokers.rabbitmq.amqp.assembly import (
    Answered,
    Arrival,
    Assembly,
    Confirm,
    Deliveries,
    Received,
    ReturnedMessage,
    ServerMethod,
)
from onward.brokers.rabbitmq.amqp.confirms import Confirms, PublishAnswer, merged
from onward.brokers.rabbitmq.amqp.faults import Malformed
from onward.brokers.rabbitmq.amqp.frames import Method
from onward.brokers.rabbitmq.amqp.publish_frames import PublishFrames
from onward.brokers.rabbitmq.amqp.tables import decoded_table

FRAME_MAX = 131072

names = st.text(max_size=40)
headers = st.dictionaries(
    names, st.text() | st.integers(-(1 << 63), (1 << 63) - 1) | st.booleans() | st.none(), max_size=4
)
ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "B": st.integers(0, 255),
    "H": st.integers(0, (1 << 16) - 1),
    "I": st.integers(0, (1 << 32) - 1),
    "Q": st.integers(0, (1 << 63) - 1),
    "s": names,
    "S": st.text(max_size=400).map(str.encode),
    "t": headers,
    "b": st.booleans(),
}


def pika_class(method: Method) -> Any:
    return spec.methods[method.id]


def fields(of: Any) -> list[str]:
    return list(inspect.signature(of.__init__).parameters)[1:]


def as_bytes(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("method", frames.METHODS.values(), ids=lambda method: method.name)
@settings(max_examples=25)
@given(data=st.data())
def test_a_method_is_written_and_read_as_pika_does(method: Method, data: st.DataObject) -> None:
    arguments = tuple(data.draw(ARGUMENTS[kind]) for kind in method.fields)
    theirs = pika_class(method)
    ours = frames.encoded_method(method, *arguments)
    assert ours == method.id.to_bytes(4, "big") + b"".join(theirs(*arguments).encode())
    read = theirs()
    read.decode(ours, 4)
    assert [as_bytes(getattr(read, name)) for name in fields(theirs)] == [as_bytes(each) for each in arguments]
    assert frames.decoded_method(ours) == (method, arguments)


@pytest.mark.parametrize("method", frames.METHODS.values(), ids=lambda method: method.name)
@settings(max_examples=25)
@given(data=st.data())
def test_a_method_of_any_other_length_is_malformed(method: Method, data: st.DataObject) -> None:
    arguments = tuple(data.draw(ARGUMENTS[kind]) for kind in method.fields)
    whole = frames.encoded_method(method, *arguments)
    with pytest.raises(Malformed):
        frames.decoded_method(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(Malformed):
        frames.decoded_method(whole + b"\0")


def test_an_unknown_method_is_malformed() -> None:
    with pytest.raises(Malformed, match="003c0046"):
        frames.decoded_method(b"\x00\x3c\x00\x46")


# -- properties --------------------------------------------------------------------------------------------------------

VALUES: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(Properties.__struct_fields__, names)
VALUES |= {"headers": headers, "delivery_mode": st.integers(0, 255), "priority": st.integers(0, 255)}
VALUES |= {"timestamp": st.integers(0, (1 << 63) - 1)}
some_properties = st.fixed_dictionaries({}, optional=VALUES)


def written_by_pika(given: dict[str, Any]) -> bytes:
    return b"".join(spec.BasicProperties(**given).encode())


@pytest.mark.parametrize("name", Properties.__struct_fields__)
@settings(max_examples=25)
@given(data=st.data())
def test_each_property_alone_has_its_own_flag(name: str, data: st.DataObject) -> None:
    given = {name: data.draw(VALUES[name])}
    assert encoded_properties(Properties(**given)) == written_by_pika(given)
    assert properties_of(written_by_pika(given)) == Properties(**given)


@given(some_properties)
def test_properties_are_written_and_read_as_pika_does(given: dict[str, Any]) -> None:
    ours = encoded_properties(Properties(**given))
    assert ours == written_by_pika(given)
    assert properties_of(ours) == Properties(**given)
    read = spec.BasicProperties()
    read.decode(ours)
    assert Properties(*(getattr(read, name) for name in Properties.__struct_fields__)) == Properties(**given)


@given(some_properties)
def test_the_headers_and_the_message_id_are_found_without_decoding(given: dict[str, Any]) -> None:
    raw = encoded_properties(Properties(**given))
    assert decoded_table(header_table(raw)) == given.get("headers", {})
    assert frames.message_id(raw) == given.get("message_id", "").encode()


@given(some_properties, st.data())
def test_cut_properties_are_malformed(given: dict[str, Any], data: st.DataObject) -> None:
    raw = encoded_properties(Properties(**given))
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    with pytest.raises(Malformed):
        properties_of(cut)
    for fast in (header_table, frames.message_id):
        with suppress(Malformed):
            assert fast(cut) == fast(raw)  # what is wanted may stand before the cut


def test_flags_beyond_the_known_are_malformed() -> None:
    for flags in (b"\x00\x01", b"\x00\x02"):
        with pytest.raises(Malformed, match="does not know"):
            properties_of(flags)


# -- what the server sends ---------------------------------------------------------------------------------------------

Said = tuple[list[bytes], Any]  # the frames, and what they say

bodies = st.binary(max_size=60) | st.builds(bytes, st.integers(0, 3000))


def content(channel: int, method: Any, raw: bytes, body: bytes, largest: int) -> list[bytes]:
    properties = spec.BasicProperties()
    properties.decode(raw)
    pieces = [body[at : at + largest] for at in range(0, len(body), largest)]
    return [
        pika_frame.Method(channel, method).marshal(),
        pika_frame.Header(channel, len(body), properties).marshal(),
        *(pika_frame.Body(channel, piece).marshal() for piece in pieces),
    ]


@st.composite
def deliveries(draw: st.DrawFn, channel: int) -> Said:
    tag, again, consumer = draw(ARGUMENTS["Q"]), draw(st.booleans()), draw(st.sampled_from(["a", "b", "", "é"]))
    exchange, key, body = draw(names), draw(names), draw(bodies)
    raw = encoded_properties(Properties(**draw(some_properties)))
    method = spec.Basic.Deliver(consumer, tag, again, exchange, key)
    said = Received(tag, again, exchange, key, raw, body, consumer)
    return content(channel, method, raw, body, draw(st.sampled_from([7, 100, 5000]))), said


@st.composite
def returns(draw: st.DrawFn, channel: int) -> Said:
    text, exchange, key, body = draw(names), draw(names), draw(names), draw(bodies)
    raw = encoded_properties(Properties(**draw(some_properties)))
    said = ReturnedMessage(312, text, exchange, key, raw, body)
    return content(channel, spec.Basic.Return(312, text, exchange, key), raw, body, 100), said


@st.composite
def confirms(draw: st.DrawFn, channel: int) -> Said:
    tag, multiple, accepted = draw(ARGUMENTS["Q"]), draw(st.booleans()), draw(st.booleans())
    method = (spec.Basic.Ack if accepted else spec.Basic.Nack)(tag, multiple)
    return [pika_frame.Method(channel, method).marshal()], Confirm(tag, multiple, accepted)


@st.composite
def replies(draw: st.DrawFn, channel: int) -> Said:
    name = draw(names)
    method = spec.Basic.ConsumeOk(name)
    return [pika_frame.Method(channel, method).marshal()], ServerMethod(frames.CONSUME_OK, (name,))


def sayings(channel: int) -> st.SearchStrategy[list[Said]]:
    return st.lists(deliveries(channel) | returns(channel) | confirms(channel) | replies(channel), max_size=6)


def shuffled(by_channel: list[list[bytes]], dice: random.Random) -> Iterator[bytes]:
    """The frames of all channels, mixed as the server may mix them, with heartbeats between."""
    left = [list(each) for each in by_channel if each]
    while left:
        chosen = dice.choice(left)
        yield chosen.pop(0)
        if dice.random() < 0.1:
            yield pika_frame.Heartbeat().marshal()
        left = [each for each in left if each]


def pieces_of(data: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        yield data[start:end]


def single(arrivals: Iterable[tuple[int, Arrival]], channel: int) -> list[Any]:
    found: list[Any] = []
    for number, arrival in arrivals:
        if number == channel:
            found += [arrival] if isinstance(arrival, ServerMethod) else arrival
    return found


@given(st.lists(sayings(1), min_size=3, max_size=3), st.lists(st.integers(0, 1 << 20), max_size=12), st.randoms())
def test_frames_mixed_and_cut_anywhere_say_the_same(said: Any, cuts: list[int], dice: random.Random) -> None:
    by_channel = [
        [frame[:1] + number.to_bytes(2, "big") + frame[3:] for frames_, _ in channel for frame in frames_]
        for number, channel in enumerate(said, 1)
    ]
    data = b"".join(shuffled(by_channel, dice))
    assembly = Assembly(FRAME_MAX)
    arrivals = [arrival for piece in pieces_of(data, cuts) for arrival in assembly.feed(piece)]
    for number, channel in enumerate(said, 1):
        assert single(arrivals, number) == [what for _, what in channel]
    for _, arrival in arrivals:
        if isinstance(arrival, Deliveries):
            assert len({each.consumer for each in arrival}) == 1


@given(sayings(1).filter(bool))
def test_frames_byte_by_byte_say_the_same(said: list[Said]) -> None:
    assembly = Assembly(FRAME_MAX)
    data = b"".join(frame for frames_, _ in said for frame in frames_)
    arrivals = [arrival for byte in data for arrival in assembly.feed(bytes((byte,)))]
    assert single(arrivals, 1) == [what for _, what in said]


def test_deliveries_of_one_read_come_as_one_list_and_a_method_between_splits_it() -> None:
    def delivery(tag: int, consumer: str = "a") -> bytes:
        return b"".join(content(1, spec.Basic.Deliver(consumer, tag, False, "", "q"), b"\0\0", b"x", 100))

    reply = frames.method_frame(1, frames.QOS_OK)
    read = Assembly(FRAME_MAX).feed(
        delivery(1) + delivery(2) + reply + delivery(3) + delivery(4, "b") + delivery(5, "b")
    )
    assert [[each.tag for each in what] if isinstance(what, Deliveries) else what for _, what in read] == [
        [1, 2],
        ServerMethod(frames.QOS_OK, ()),
        [3],
        [4, 5],
    ]


def test_a_body_of_another_channel_is_not_taken_for_ours() -> None:
    first, second = (
        content(each, spec.Basic.Deliver("a", 1, False, "", "q"), b"\0\0", b"%d" % each, 9) for each in (1, 2)
    )
    read = Assembly(FRAME_MAX).feed(b"".join([*first[:2], *second[:1], *second[1:], first[2]]))
    assert [[each.body for each in single(read, channel)] for channel in (1, 2)] == [[b"1"], [b"2"]]
    read = Assembly(FRAME_MAX).feed(b"".join([*second[:2], *first[:2], second[2], first[2]]))
    assert [[each.body for each in single(read, channel)] for channel in (1, 2)] == [[b"1"], [b"2"]]


def test_a_large_frame_in_many_reads_takes_linear_time() -> None:
    """Each read appends to a list; joining at every read would copy 8 GB here."""
    body = bytes(FRAME_MAX - frames.FRAME_ROOM)
    data = b"".join(content(1, spec.Basic.Deliver("a", 1, False, "", "q"), b"\0\0", body, len(body)))
    assembly = Assembly(FRAME_MAX)
    arrivals = [arrival for byte in data for arrival in assembly.feed(bytes((byte,)))]
    assert [each.body for each in single(arrivals, 1)] == [body]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "a frame of type 72"),
        (frames.PROTOCOL, "type 65"),
        (b"\x01\x00\x01\x7f\xff\xff\xff", "were agreed"),
        (frames.frame(1, 1, b"\x00\x3c\x00\x0b")[:-1] + b"\x00", "does not end"),
        (frames.frame(3, 1, b"body"), "may not come here"),
        (frames.frame(2, 1, b"\x00\x3c" + bytes(12)), "may not come here"),
        (frames.frame(8, 1, b""), "may not come here"),
        (frames.frame(8, 0, b"x"), "may not come here"),
        (frames.frame(4, 0, b""), "may not come here"),
        (frames.frame(1, 1, b"\x00"), "does not know"),
        (frames.method_frame(1, frames.RETURN, 1, "", "", "") * 2, "may not come here"),
        (frames.method_frame(1, frames.DELIVER, "c", 1, False, "", "q") * 2, "may not come here"),
        (frames.frame(1, 1, b"\x00\x3c\x00\x3c\xff"), "cut off"),
        (frames.frame(1, 1, b"\x00\x3c\x00\x3c\x01a" + bytes(9) + b"\x00\x05k"), "cut off"),
    ],
)
def test_bytes_that_are_not_amqp_are_malformed(data: bytes, says: str) -> None:
    with pytest.raises(Malformed, match=says):
        Assembly(FRAME_MAX).feed(data)


def test_a_body_longer_than_announced_is_malformed_and_so_is_one_beyond_every_limit() -> None:
    start = frames.method_frame(1, frames.DELIVER, "a", 1, False, "", "q")

    def header(size: int) -> bytes:
        return frames.frame(2, 1, b"\x00\x3c\x00\x00" + size.to_bytes(8, "big") + b"\0\0")

    with pytest.raises(Malformed, match="2 bytes longer"):
        Assembly(FRAME_MAX).feed(start + header(1) + frames.frame(3, 1, b"abc"))
    with pytest.raises(Malformed, match="content header"):
        Assembly(FRAME_MAX).feed(start + header(1 << 40))


# -- what we send ------------------------------------------------------------------------------------------------------


def decoded_by_pika(data: bytes) -> list[Any]:
    found = []
    while data:
        used, each = pika_frame.decode_frame(data)
        found.append(each)
        data = data[used:]
    return found


@given(
    st.lists(st.tuples(names, names, some_properties, bodies, st.booleans()), max_size=5),
    st.sampled_from([4096, FRAME_MAX]),
    st.integers(1, 65535),
)
def test_pika_reads_what_we_publish(messages: Any, frame_max: int, channel: int) -> None:
    outbound = [
        Outbound(exchange, key, encoded_properties(Properties(**given)), body * 3, mandatory)
        for exchange, key, given, body, mandatory in messages
    ]
    data = PublishFrames(channel, frame_max).encoded(outbound)
    read = decoded_by_pika(data)
    assert {each.channel_number for each in read} <= {channel}
    for exchange, key, raw, body, mandatory in outbound:
        method, header = read.pop(0).method, read.pop(0)
        assert (method.exchange, method.routing_key, method.mandatory) == (exchange, key, mandatory)
        assert b"".join(header.properties.encode()) == raw
        found = b""
        while len(found) < header.body_size:
            found += (piece := read.pop(0).fragment)
            assert len(piece) + frames.FRAME_ROOM <= frame_max
        assert found == body
    assert not read


def test_headers_that_do_not_fit_a_frame_are_refused_before_anything_is_sent() -> None:
    raw = encoded_properties(Properties(headers={"x": "y" * 5000}))
    with pytest.raises(ValueError, match="of headers; the server takes 4076 at most"):
        PublishFrames(1, 4096).encoded([Outbound("", "q", raw, b"")])


# -- confirms ----------------------------------------------------------------------------------------------------------


def outbound(key: str, id_: str, body: bytes = b"") -> Outbound:
    return Outbound("", key, encoded_properties(Properties(message_id=id_)), body)


def returned(message: Outbound) -> ReturnedMessage:
    return ReturnedMessage(312, "NO_ROUTE", message.exchange, message.routing_key, message.properties, message.body)


@given(
    st.lists(st.tuples(st.sampled_from(["send", "ack", "acks", "nack", "nacks", "return"]), st.integers(0, 1 << 16)))
)
def test_each_number_gets_one_answer(steps: list[tuple[str, int]]) -> None:
    confirms, answers = Confirms(), list[PublishAnswer]()
    sent: list[Outbound] = []
    expected: dict[int, bool] = {}  # accepted
    back: set[int] = set()
    for step, at in steps:
        is_open = [number for number in range(1, len(sent) + 1) if number not in expected]
        if step == "send":
            more = [outbound("q", f"{len(sent) + each}") for each in range(at % 5)]
            assert confirms.sent(more) == len(sent) + 1
            sent += more
        elif not is_open:
            continue
        elif step == "return":
            number = is_open[at % len(is_open)]
            answers.append(confirms.returned(returned(sent[number - 1])))
            expected[number] = False
            back.add(number)
        else:
            number = (is_open + sorted(back))[at % (len(is_open) + len(back))]
            answered = [each for each in is_open if each == number or (each < number and step.endswith("s"))]
            expected |= dict.fromkeys(answered, step.startswith("ack"))
            back = {each for each in back if each != number and not (each < number and step.endswith("s"))}
            answers += confirms.confirmed(Confirm(number, step.endswith("s"), step.startswith("ack")))
    rest = confirms.ended("the connection broke")
    assert all(each.unknown and each.why == "the connection broke" for each in rest)
    for found in (answers + rest, merged(answers) + rest):
        numbers = [number for each in found for number in range(each.first, each.last + 1)]
        assert sorted(numbers) == list(range(1, len(sent) + 1))
    assert {n: each.why is None for each in answers for n in range(each.first, each.last + 1)} == expected


def test_a_return_is_that_of_the_oldest_message_it_fits() -> None:
    confirms = Confirms()
    messages = [
        outbound("a", "1"),
        outbound("q", "1"),
        outbound("q", "1", b"longer"),
        outbound("q", "2"),
        outbound("q", "1"),
    ]
    confirms.sent(messages)
    assert [confirms.returned(returned(messages[at])).first for at in (4, 4, 2, 3, 0)] == [2, 5, 3, 4, 1]
    with pytest.raises(Malformed, match="not sent"):
        confirms.returned(returned(messages[0]))
    assert confirms.confirmed(Confirm(5, True, True)) == []


def test_neighbours_of_one_fate_are_one_answer() -> None:
    accepted = [PublishAnswer(number, number, None, False) for number in (1, 2, 3, 5, 4, 6)]
    nacked = [PublishAnswer(7, 7, "no", True), PublishAnswer(8, 9, "no", True)]
    assert [(each.first, each.last) for each in merged(accepted + nacked)] == [(1, 3), (5, 5), (4, 4), (6, 6), (7, 9)]


def test_a_confirm_of_what_was_not_sent_is_malformed() -> None:
    confirms = Confirms()
    confirms.sent([outbound("q", "1")])
    with pytest.raises(Malformed, match="1 were sent"):
        confirms.confirmed(Confirm(1 << 63, True, True))


def test_zero_confirms_all_and_a_nack_is_unknown() -> None:
    confirms = Confirms()
    confirms.sent([outbound("q", str(each)) for each in range(5)])
    (answer,) = confirms.confirmed(Confirm(0, False, False))
    assert (answer.first, answer.last, answer.unknown) == (1, 5, True)
    assert Answered() == []
