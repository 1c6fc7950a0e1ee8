"""Events as messages: every event survives, and messages of other programs become sensible events."""

import logging
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.brokers.core.publishing import check_events
from onward.brokers.rabbitmq.amqp import Properties, Received, encoded_properties, properties_of
from onward.brokers.rabbitmq.message import (
    AT,
    FOUNDING,
    OFFSET,
    RabbitEvent,
    appended,
    from_stream,
    packed,
    received,
)
from onward.brokers.rabbitmq.work.rungs import TRIES_HEADER
from onward.errors import TooLarge, Unserialisable
from onward.event import Event, header_fault
from onward.failure.expiry import EXPIRES, expires

AT_MS = 1_794_974_021_867
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = TEXT.filter(lambda name: not header_fault({name: ""}) and len(name.encode()) < 200)
TRICKY = st.sampled_from(
    ["CC", "BCC", "x-death", "x-stream-offset", "onward-key", "onward-at", "onward-header.a", "x-"]
)
EVENTS = st.builds(
    Event,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=400),
    st.just("orders"),
    st.none() | TEXT,
    st.none() | st.binary(),
    st.dictionaries(NAMES.filter(lambda name: not name.startswith("ce_")) | TRICKY, TEXT, max_size=5),
    TEXT.filter(lambda type_: len(type_.encode()) <= 200 and type_ != "onward.event"),
    st.floats(-62_135_596_800, 253_402_300_799),
)


def back(event: Event, **extra: str) -> RabbitEvent:
    made = packed(event, extra)
    return received(made.properties(AT_MS), made.body, event.topic, "fallback")


def by_stream(properties: bytes, body: bytes = b"", offset: int = 7) -> Received:
    """As a stream returns it: with its offset, and the headers sorted by name."""
    found = properties_of(properties)
    headers = dict(sorted({**(found.headers or {}), OFFSET: offset + (1 << 40)}.items()))  # large numbers are longs
    raw = encoded_properties(msgspec.structs.replace(found, headers=headers))
    return Received(1, False, "onward.orders", "0", raw, body, "tag")


@given(EVENTS)
def test_an_event_survives_as_a_message(event: Event) -> None:
    check_events([event])
    found = back(event)
    assert found.whole() == msgspec.structs.replace(event, time=found.time)
    assert found.time == pytest.approx(event.time, abs=1e-6, rel=0)
    assert dict(found.headers) == dict(event.headers)
    assert found.size == event.size
    assert appended(found) == AT_MS / 1000


@given(EVENTS)
def test_an_event_survives_a_stream_which_sorts_its_headers(event: Event) -> None:
    made = packed(event)
    offset, found = from_stream(by_stream(made.properties(AT_MS), made.body), "orders", "orders/0")
    assert offset == 7 + (1 << 40)
    assert found is not None
    assert found.key == event.key
    assert found.value == event.value
    assert found.whole() == msgspec.structs.replace(event, time=found.time)


@given(EVENTS, st.dictionaries(st.sampled_from(["onward-tries", "onward-due"]), TEXT))
def test_headers_of_the_broker_are_no_headers_of_the_event(event: Event, extra: dict[str, str]) -> None:
    assert dict(back(event, **extra).headers) == dict(event.headers)


def test_the_properties_say_to_other_programs_what_the_event_is() -> None:
    event = Event("id-1", "orders", "k", b'{"n": 1}', {"trace": "abc", "onward-priority": "7"}, "OrderPlaced", 12.5)
    found = properties_of(packed(event).properties(AT_MS))
    assert (found.content_type, found.delivery_mode, found.priority) == ("application/json", 2, 7)
    assert (found.message_id, found.timestamp, found.type) == ("id-1", 12, "OrderPlaced")
    assert found.headers is not None
    assert found.headers["ce_id"] == "id-1"
    assert found.headers["trace"] == "abc"
    assert found.headers[AT] == AT_MS
    assert (
        properties_of(packed(Event("1", "t", None, b"\x00")).properties(0)).content_type == "application/octet-stream"
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Event("1", "t", "k", b"", {"h" * 256: "x"}), "256|255"),
        (Event("1", "t", "k", b"", {}, "t" * 201), "201.*routing key"),
        (Event("1", "t", "k", b"", {"onward-priority": "high"}), "0 to 255"),
        (Event("1", "t", "k", b"", {"ce_id": "x"}), "CloudEvents"),
    ],
)
def test_what_amqp_cannot_carry_is_named(event: Event, words: str) -> None:
    with pytest.raises(Unserialisable, match=words):
        packed(event)


@pytest.mark.parametrize(
    "event", [Event("1", "t", "k" * 130_000, b""), Event("1", "t", "k", b"", {"h": "v" * 130_000})]
)
def test_a_key_and_headers_that_fit_no_frame_are_refused(event: Event) -> None:
    with pytest.raises(TooLarge, match="put them into the value"):
        packed(event)


def test_a_message_without_any_property_becomes_an_event() -> None:
    offset, event = from_stream(by_stream(encoded_properties(Properties()), b"body", 3), "orders", "orders/0")
    assert event is not None
    assert (event.id, event.key, event.value, event.type) == (f"orders/0/{offset}", None, b"body", "")
    assert dict(event.headers) == {}
    assert appended(event) == 0.0
    assert received(encoded_properties(Properties()), b"", "orders", "queue/1").id == "queue/1"


def test_a_message_of_another_program_keeps_its_id_type_and_time() -> None:
    properties = Properties(message_id="m-1", type="order.paid", timestamp=1_700_000_000, headers={"tenant": "a"})
    event = received(encoded_properties(properties), b"{}", "orders", "queue/1")
    assert event.whole() == Event("m-1", "orders", None, b"{}", {"tenant": "a"}, "order.paid", 1_700_000_000.0)
    assert appended(event) == 1_700_000_000.0


def test_another_program_may_say_when_its_message_expires() -> None:
    """Of the other headers of Onward it can set none."""
    headers = {EXPIRES: 1_700_000_000, TRIES_HEADER: "3,0,0"}
    event = received(encoded_properties(Properties(headers=headers)), b"{}", "orders", "queue/1")
    assert dict(event.headers) == {EXPIRES: "1700000000"}
    assert expires(event) == 1_700_000_000.0


def test_headers_that_are_not_text_are_rendered_as_text() -> None:
    headers: dict[str, Any] = {
        "int": 5,
        "big": 1 << 40,
        "float": 1.5,
        "yes": True,
        "none": None,
        "bytes": b"\x00\xff",
        "table": {"a": [1, {"b": Decimal("1.5")}]},
        "time": datetime(2026, 1, 2, tzinfo=UTC),
        "control\n": "x",
    }
    event = received(encoded_properties(Properties(headers=headers)), b"", "orders", "f")
    assert dict(event.headers) == {
        "int": "5",
        "big": str(1 << 40),
        "float": "1.5",
        "yes": "true",
        "none": "",
        "bytes": "\x00\\xff",
        "table": '{"a":[1,{"b":"1.5"}]}',
        "time": "2026-01-02T00:00:00+00:00",
        "control\\x0a": "x",
    }


def test_the_founding_message_is_no_event() -> None:
    raw = encoded_properties(Properties(headers={FOUNDING: "log-1"}))
    assert from_stream(by_stream(raw), "orders", "orders/0") == (7 + (1 << 40), None)


@pytest.mark.parametrize("value", ["log-1", 5])
def test_a_message_of_another_program_with_our_header_and_a_body_is_an_event(value: object) -> None:
    raw = encoded_properties(Properties(headers={FOUNDING: value}))
    _, event = from_stream(by_stream(raw, b"body"), "orders", "orders/0")
    assert event is not None
    assert event.value == b"body"


@given(st.binary(max_size=60), st.binary(max_size=10))
def test_no_bytes_break_the_reader(properties: bytes, body: bytes) -> None:
    event = received(properties, body, "orders", "fallback")
    assert event.value in (body, None)
    assert event.whole().topic == "orders"


def test_properties_that_cannot_be_read_are_reported_once_and_the_offset_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = by_stream(encoded_properties(Properties(headers={"h": "x"})), b"body").properties
    damaged = whole.replace(b"\x01hS", b"\x01h?")
    message = Received(1, False, "", "q", damaged, b"body", "tag")
    with caplog.at_level(logging.WARNING, "onward"):
        results = [from_stream(message, "damaged", "damaged/0") for _ in range(2)]
    for offset, event in results:
        assert offset == 7 + (1 << 40)
        assert event is not None
        assert (event.value, dict(event.headers)) == (b"body", {})
    assert len([record for record in caplog.records if "cannot be read" in record.message]) == 1
