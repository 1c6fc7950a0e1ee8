"""Between a user's values and bytes, by annotation: pydantic, msgspec.Struct, dataclass, dict, str, bytes."""

import sys
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from onward.errors import BadHandler, Undecodable, Unserialisable

Decode = Callable[[bytes | None], Any]


def encode(value: Any) -> bytes | None:
    """The bytes of a value. None is a tombstone, bytes stay as they are, str is UTF-8, everything else is JSON."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    try:
        return _json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise Unserialisable(
            f"a {type(value).__name__} cannot be published: {error}. "
            "Use bytes, str, a dict, a dataclass, a msgspec.Struct or a pydantic model"
        ) from error


def type_name(value: Any) -> str:
    """The event type a value speaks of by itself: the name of its class, unless that is a plain container."""
    return "" if type(value).__module__ == "builtins" else type(value).__name__


def decoder(annotation: Any) -> Decode:
    """A function from an event's bytes to what the handler asked for; it raises Undecodable."""
    takes_none = annotation is Any or annotation is NoneType or NoneType in _options(annotation)
    decode = _from_bytes(annotation)

    def checked(value: bytes | None) -> Any:
        if value is None:
            if takes_none:
                return None
            raise Undecodable(
                f"a tombstone (no value) for a handler that takes {_name(annotation)}; add `| None` to it"
            )
        try:
            return decode(value)
        except (ValueError, msgspec.MsgspecError) as error:  # pydantic's and UTF-8's errors are ValueErrors
            raise Undecodable(f"the value is no {_name(annotation)}: {error}") from error

    return checked


def _from_bytes(annotation: Any) -> Callable[[bytes], Any]:
    options = [option for option in _options(annotation) if option is not NoneType] or [annotation]
    if options == [bytes]:
        return lambda value: value
    if options == [str]:
        return lambda value: value.decode()
    if _has_pydantic(annotation):
        from pydantic import TypeAdapter

        return TypeAdapter(annotation).validate_json
    info = msgspec.inspect.type_info(annotation)
    if isinstance(info, msgspec.inspect.CustomType):
        raise BadHandler(
            f"{_name(annotation)} cannot be made from JSON; "
            "annotate with bytes, str, dict, a dataclass, a msgspec.Struct or a pydantic model"
        )
    return msgspec.json.Decoder(annotation).decode


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _has_pydantic(annotation: Any) -> bool:
    """Is a model anywhere in it, as in list[Order]?"""
    return _is_pydantic(annotation) or any(_has_pydantic(inner) for inner in get_args(annotation))


def _is_pydantic(annotation: Any) -> bool:
    # A model can only be annotated with when pydantic is imported, so this never imports it.
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)


def _name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _dump_model(value: Any) -> Any:
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"{type(value).__name__} is not JSON")


_json = msgspec.json.Encoder(enc_hook=_dump_model)
