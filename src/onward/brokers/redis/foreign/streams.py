"""Streams that other programs own, as topics of ours. Pure."""

import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from onward.errors import BadSetting

Hash = Literal["md5", "murmur2"]
_HASHES: tuple[str, ...] = get_args(Hash)


class Streams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The streams behind a topic: `name`, or with `shards` `name:0` to `name:<shards - 1>`."""

    name: str
    shards: int | None = None
    value: str | None = None  # the field that is the value; None: all fields together, as a JSON object
    key: str | None = None  # the field that is the key
    hash: Hash | None = None  # how their publishers choose a shard; needed to publish
    trim: bool = False  # finished entries may be removed

    def __post_init__(self) -> None:
        if not self.name:
            raise BadSetting("streams: a name is empty; write the name of a stream, without the number of its shard")
        if tag_of(self.name) == self.name and ("{" in self.name or "}" in self.name):
            raise BadSetting(f"streams: {self.name}: braces must enclose a hash tag, as in {{scan}}:events")
        if self.shards is not None and self.shards < 1:
            raise BadSetting(f"streams: {self.name} has shards={self.shards}; write 1 or more, or leave it out")

    @property
    def partitions(self) -> int:
        return self.shards or 1

    @property
    def place(self) -> tuple[str, int | None]:
        """What all processes must agree on."""
        return self.name, self.shards

    @property
    def place_text(self) -> str:
        return repr(self.name) if self.shards is None else f"{self.name!r}, shards={self.shards}"

    def stream(self, index: int) -> str:
        return self.name if self.shards is None else f"{self.name}:{index}"


def tag_of(stream: str) -> str:
    """What decides on its slot: what stands in its braces, or else its whole name."""
    _, brace, rest = stream.partition("{")
    inner, end, _ = rest.partition("}")
    return inner if brace and end and inner else stream


def mapped(streams: Mapping[str, Any]) -> dict[str, Streams]:
    """The setting `streams`, whose values are Streams or, in onward.toml, tables of their fields."""
    return {topic: _mapped(topic, value) for topic, value in streams.items()}


def _mapped(topic: str, value: Any) -> Streams:
    if isinstance(value, Streams):
        return value
    place = f"[streams.{topic}]"
    fields = Streams.__struct_fields__
    for name in value if isinstance(value, Mapping) else ():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(fields)}"
            raise BadSetting(f"{place}: there is no field {name!r}; {hint}")
        if name == "hash" and value[name] not in (None, *_HASHES):
            raise BadSetting(f"{place}: hash = {value[name]!r}; write one of {', '.join(map(repr, _HASHES))}")
    try:
        return msgspec.convert(value, Streams)
    except msgspec.ValidationError as error:
        cure = "; write a table, such as name = 'scan:events'" if "name" not in (value or ()) else ""
        raise BadSetting(f"{place}: {error}{cure}") from error
