import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from onward import Event
from onward.errors import BadHandler, Undecodable, Unserialisable
from onward.event import Delivery, Partition
from onward.handler import bind
from onward.payload import decoder, encode, type_name


class Packed(msgspec.Struct):
    id: int
    note: str = ""


class Modelled(pydantic.BaseModel):
    id: int
    note: str = ""


class Aliased(pydantic.BaseModel):
    order_id: int = pydantic.Field(alias="orderId")


@dataclass
class Classy:
    id: int
    note: str = ""


class Typed(TypedDict):
    id: int


def call(function: Callable[..., Any], value: bytes | None) -> Any:
    delivery = Delivery(Event("1", "t", "k", value), Partition("t", 0), 0, 1)
    return asyncio.run(bind(function)(delivery))


@pytest.mark.parametrize(
    ("annotation", "sent", "got"),
    [
        (Packed, Packed(7, "x"), Packed(7, "x")),
        (Modelled, Modelled(id=7, note="x"), Modelled(id=7, note="x")),
        (Classy, Classy(7, "x"), Classy(7, "x")),
        (Typed, {"id": 7}, {"id": 7}),
        (dict, {"id": 7, "tags": ["a"]}, {"id": 7, "tags": ["a"]}),
        (dict[str, int], {"id": 7}, {"id": 7}),
        (list[int], [1, 2], [1, 2]),
        (str, "텍스트", "텍스트"),
        (bytes, b"\x00\xff", b"\x00\xff"),
        (Any, {"a": 1}, {"a": 1}),
        (Packed | None, None, None),
        (bytes | None, None, None),
        (Modelled | None, Modelled(id=1), Modelled(id=1)),
        (list[Modelled], [Modelled(id=1)], [Modelled(id=1)]),
        (Aliased, Aliased(orderId=3), Aliased(orderId=3)),
    ],
)
def test_a_value_arrives_as_annotated(annotation: Any, sent: Any, got: Any) -> None:
    async def handler(value):  # type: ignore[no-untyped-def]
        return value

    handler.__annotations__["value"] = annotation
    assert call(handler, encode(sent)) == got


def test_the_event_is_optional_and_found_by_its_annotation() -> None:
    async def both(order: Packed, event: Event) -> Any:
        return order.id, event.key

    async def swapped(event: Event, order: Packed) -> Any:
        return order.id, event.key

    async def alone(event: Event) -> Any:
        return event.key

    async def untyped(order):  # type: ignore[no-untyped-def]
        return order["id"]

    assert call(both, b'{"id": 7}') == (7, "k")
    assert call(swapped, b'{"id": 7}') == (7, "k")
    assert call(alone, b"not json") == "k"
    assert call(untyped, b'{"id": 7}') == 7


@pytest.mark.parametrize("annotation", [Packed, Modelled, Classy, dict, str])
def test_an_undecodable_value_raises_undecodable(annotation: Any) -> None:
    async def handler(value):  # type: ignore[no-untyped-def]
        return value

    handler.__annotations__["value"] = annotation
    with pytest.raises(Undecodable):
        call(handler, b"\xff{")


def test_a_value_that_may_be_anything_must_be_json() -> None:
    with pytest.raises(Undecodable, match="the value cannot be decoded as JSON"):
        decoder(Any)(b"{")


def test_the_error_for_an_unexpected_tombstone_names_the_cure() -> None:
    async def handler(order: Packed) -> None: ...

    with pytest.raises(Undecodable, match=r"\| None"):
        call(handler, None)


async def _none() -> None: ...
async def _three(a: int, b: int, event: Event) -> None: ...
async def _keyword(*, order: dict[str, int]) -> None: ...
async def _unresolvable(order: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def _no_json(order: asyncio.Lock) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_none, "must take"),
        (_three, "must take"),
        (_keyword, "'order'"),
        (_unresolvable, "Missing"),
        (_no_json, "Lock"),
    ],
)
def test_a_handler_that_cannot_be_called_is_refused_at_declaration(function: Any, says: str) -> None:
    with pytest.raises(BadHandler, match=says) as raised:
        bind(function)
    assert function.__qualname__ in str(raised.value)


@pytest.mark.parametrize("value", [object(), {"a": object()}, {1, object()}, lambda: 1])
def test_an_unserialisable_value_is_refused(value: Any) -> None:
    with pytest.raises(Unserialisable):
        encode(value)


def test_a_value_names_its_type() -> None:
    assert type_name(Packed(1)) == "Packed"
    assert type_name({"a": 1}) == type_name(b"") == ""


def test_a_handler_that_yields_is_refused() -> None:
    """Calling it would run nothing, and its events would count as handled."""

    def plain(order: dict[str, int]) -> Iterator[int]:
        yield order["id"]

    async def suspending(order: dict[str, int]) -> AsyncIterator[int]:
        yield order["id"]

    for function in (plain, suspending):
        with pytest.raises(BadHandler, match="has a `yield`"):
            bind(function)
