"""Converts between values and bytes, by annotation: pydantic, msgspec.Struct, dataclass, dict, str, bytes."""

import math
import sys
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from onward.errors import BadHandler, Undecodable, Unserialisable

Decode = Callable[[bytes | None], Any]


def encode(value: Any, topic: str = "") -> bytes | None:
    """The bytes of a value. None is a tombstone, bytes stay as they are, str becomes UTF-8, everything else JSON."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    try:
        data = value.encode() if isinstance(value, str) else _json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise Unserialisable(_why(value, topic, error)) from error
    # JSON turns NaN and the infinities into null, so the handler would not get what was published.
    if b"null" in data and (odd := _first(value, _is_no_number)):
        raise Unserialisable(
            f"{_what(value, topic)} cannot be published: {odd} is not a finite number, and JSON has no NaN or "
            "infinity; use None or a str"
        )
    return data


def _why(value: Any, topic: str, error: Exception) -> str:
    what = f"{_what(value, topic)} cannot be published"
    if isinstance(error, UnicodeEncodeError):
        odd = _first(value, _is_half) or "a key of it"
        return (
            f"{what}: {odd} holds half a surrogate pair, which no encoding has; decode the text with errors='replace'"
        )
    return f"{what}: {error}. Use bytes, str, a dict, a dataclass, a msgspec.Struct or a pydantic model"


def _what(value: Any, topic: str) -> str:
    return f"a {type(value).__name__}{f' for topic {topic!r}' if topic else ''}"


def _first(value: Any, odd: Callable[[Any], bool], path: str = "value") -> str | None:
    """The path of the first odd leaf of a value, such as `value.lines[3].price`."""
    if odd(value):
        return path
    if isinstance(value, Mapping):
        inner = [(f"{path}.{name}", each) for name, each in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = [(f"{path}[{at}]", each) for at, each in enumerate(value)]
    elif isinstance(value, str | int | float | None):
        return None
    else:
        return _first(msgspec.to_builtins(value, builtin_types=(), enc_hook=_dump_raw), odd, path)
    return next((found for name, each in inner if (found := _first(each, odd, name))), None)


def _is_no_number(leaf: Any) -> bool:
    return isinstance(leaf, float) and not math.isfinite(leaf)


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, str) and any("\ud800" <= char <= "\udfff" for char in leaf)


def type_name(value: Any) -> str:
    """The default event type of a value: the name of its class; empty for a builtin."""
    return "" if type(value).__module__ == "builtins" else type(value).__name__


def decoder(annotation: Any) -> Decode:
    """A function that decodes an event's bytes into the annotated type. It raises Undecodable."""
    takes_none = annotation is Any or annotation is NoneType or NoneType in _options(annotation)
    decode = _from_bytes(annotation)

    def checked(value: bytes | None) -> Any:
        if value is None:
            if takes_none:
                return None
            raise Undecodable(
                f"the event is a tombstone (no value), but the handler takes {_name(annotation)}; add `| None` to it"
            )
        try:
            return decode(value)
        except (ValueError, msgspec.MsgspecError) as error:  # pydantic's and UTF-8's errors are ValueErrors
            raise Undecodable(f"the value cannot be decoded as {_name(annotation)}: {error}") from error

    return checked


def _from_bytes(annotation: Any) -> Callable[[bytes], Any]:
    options = [option for option in _options(annotation) if option is not NoneType] or [annotation]
    if options == [bytes]:
        return lambda value: value
    if options in ([bytearray], [memoryview]):
        return options[0]  # type: ignore[no-any-return]
    if options == [str]:
        return lambda value: value.decode()
    if _has_pydantic(annotation):
        from pydantic import TypeAdapter

        return TypeAdapter(annotation).validate_json
    info = msgspec.inspect.type_info(annotation)
    if isinstance(info, msgspec.inspect.CustomType):
        raise BadHandler(
            f"{_name(annotation)} cannot be decoded from JSON; "
            "annotate with bytes, str, dict, a dataclass, a msgspec.Struct or a pydantic model"
        )
    return msgspec.json.Decoder(annotation).decode


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _has_pydantic(annotation: Any) -> bool:
    """Whether the annotation contains a model anywhere, as list[Order] does."""
    return _is_pydantic(annotation) or any(_has_pydantic(inner) for inner in get_args(annotation))


def _is_pydantic(annotation: Any) -> bool:
    # An annotation can only be a model if pydantic is already imported, so this never imports it.
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)


def _name(annotation: Any) -> str:
    if annotation is Any:
        return "JSON"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _dump_model(value: Any) -> Any:
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _dump_raw(value: Any) -> Any:
    return value.model_dump(by_alias=True) if _is_pydantic(type(value)) else str(value)


_json = msgspec.json.Encoder(enc_hook=_dump_model)
