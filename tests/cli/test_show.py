"""An event as one line."""

import json
from typing import Any

import msgspec
import pytest

from onward.cli.show import as_json, as_line
from onward.event import Event

AT = 1_700_000_000.25


def event(value: bytes | None, **more: Any) -> Event:
    return Event("id-1", "orders", "c-1", value, more.get("headers", {}), more.get("type", ""), AT)


class TestJson:
    def test_has_every_field(self) -> None:
        line = as_json(event(b'{"id": 1}', headers={"a": "b"}, type="OrderPlaced"))
        assert json.loads(line) == {
            "id": "id-1",
            "topic": "orders",
            "key": "c-1",
            "type": "OrderPlaced",
            "time": "2023-11-14T22:13:20.250000Z",
            "headers": {"a": "b"},
            "value": {"id": 1},
        }

    def test_stays_one_line(self) -> None:
        assert b"\n" not in as_json(event(b'{\n  "text": "two\\nlines"\n}\n'))

    def test_numbers_stay_as_they_were(self) -> None:
        assert b'"value":[123456789012345678901234567890,1.10]' in as_json(
            event(b"[123456789012345678901234567890, 1.10]")
        )

    @pytest.mark.parametrize("value", [b"", b"plain words", b"\xff\x00", b'"\xff"', b"{} {}"])
    def test_a_value_that_is_not_json_is_base64(self, value: bytes) -> None:
        line = json.loads(as_json(event(value)))
        assert "value" not in line
        assert isinstance(line["value_base64"], str)

    def test_a_tombstone_differs_from_null(self) -> None:
        assert json.loads(as_json(event(None)))["tombstone"] is True
        assert "tombstone" not in json.loads(as_json(event(b"null")))

    def test_an_event_without_a_time_has_none(self) -> None:
        assert json.loads(as_json(msgspec.structs.replace(event(b"1"), time=0.0)))["time"] is None


class TestLine:
    def test_an_event_without_a_time_shows_none(self) -> None:
        assert as_line(msgspec.structs.replace(event(b"1"), time=0.0)).plain.startswith("--:--:--.--- orders ")

    def test_shows_topic_key_type_value_and_headers(self) -> None:
        line = as_line(event(b'{"id": 1}', headers={"a": "b"}, type="OrderPlaced")).plain
        assert line.endswith(' orders key=c-1 type=OrderPlaced {"id":1} a=b')

    def test_control_characters_are_escaped(self) -> None:
        line = as_line(event(b"\x1b]0;title\x07 two\nlines", headers={"a": "\x1b[2J"})).plain
        assert line.isprintable()
        assert r"\x1b]0;title\x07 two\nlines" in line

    def test_bytes_are_escaped(self) -> None:
        assert r"\xff\x00" in as_line(event(b"\xff\x00")).plain

    def test_a_long_value_is_cut(self) -> None:
        line = as_line(event(b"x" * 100_000)).plain
        assert len(line) < 1_200
        assert "100,000 bytes" in line

    def test_a_tombstone_is_shown_as_one(self) -> None:
        assert as_line(event(None)).plain.endswith("tombstone")

    @pytest.mark.parametrize(
        ("key", "shown"),
        [(None, "key=-"), ("-", 'key="-"'), ("", 'key=""'), ("c-1", "key=c-1"), ("a b", 'key="a b"')],
    )
    def test_a_key_is_never_ambiguous(self, key: str | None, shown: str) -> None:
        line = as_line(Event("id-1", "orders", key, b"plain words", {}, "", AT)).plain
        assert line.endswith(f" orders {shown} plain words")
