"""How an object at the server differs from the declared one. Pure."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# "inequivalent arg 'x-max-length' for queue 'a' in vhost '/': received '1' but current is the value '5' of type 'long'"
_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<name>[^']*)' for (?P<object>(?:queue|exchange) '.*') in vhost '.*': "
    r"received (?P<wanted>.*) but current is (?P<live>.*)",
    re.DOTALL,
)
_VALUE = re.compile(r"(?:the value )?'(?P<text>.*?)'(?: of type '(?P<type>[a-z]+)')?", re.DOTALL)
_NUMBERS = frozenset({"signedint", "long", "short", "byte", "unsignedbyte", "unsignedshort", "unsignedint"})
_DEFAULTS = {"x-queue-type": "classic"}  # what a missing argument means


class Difference(NamedTuple):
    """An argument, or a field such as durable, whose value cannot be changed later. None: it is not set."""

    name: str
    wanted: Any
    live: Any

    def __str__(self) -> str:
        return f"{self.name} is {_text(self.live)} there and {_text(self.wanted)} here"


def of_reply(text: str, wanted: Mapping[str, Any]) -> Difference | None:
    """The difference that the server names when it refuses a declaration with 406. None: it names none."""
    found = _INEQUIVALENT.search(text)
    if found is None:
        return None
    name = found["name"]
    return Difference(name, wanted.get(name), _value(found["live"], wanted.get(name)))


def in_words(text: str) -> tuple[str, Difference] | None:
    """The object that exists, such as "queue orders", and how it differs, from the same reply. None: it names none."""
    found = _INEQUIVALENT.search(text)
    if found is None:
        return None
    name, default = found["name"], _DEFAULTS.get(found["name"])
    wanted, live = _value(found["wanted"], None), _value(found["live"], None)
    return found["object"].replace("'", ""), Difference(name, wanted or default, live or default)


def of_tables(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> list[Difference]:
    """Of arguments, by name."""
    names = sorted(wanted.keys() | live.keys())
    pairs = [(name, wanted.get(name, _DEFAULTS.get(name)), live.get(name, _DEFAULTS.get(name))) for name in names]
    return [Difference(name, want, have) for name, want, have in pairs if want != have]


def _value(text: str, like: Any) -> Any:
    """A value in a reply. Between two values the reply has no types, so the wanted one says which type it is."""
    found = _VALUE.fullmatch(text.strip())
    if found is None:
        return None
    if found["type"] == "bool" or isinstance(like, bool):
        return found["text"] == "true"
    if found["type"] in _NUMBERS or isinstance(like, int):
        return int(found["text"]) if re.fullmatch(r"-?\d+", found["text"]) else found["text"]
    return found["text"]


def _text(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
