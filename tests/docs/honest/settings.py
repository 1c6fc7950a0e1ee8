"""Settings and keywords, their values and their defaults."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import msgspec

from onward import Onward
from onward.settings import Settings
from tests.docs.honest.api_page import API, defaults, setting_defaults
from tests.docs.known import variables
from tests.docs.pages import Code, Pages, blocks, code, line_of
from tests.docs.settings_page import names

NOT_VARIABLES = ("ONWARD_SERVICE_HOST", "ONWARD_PATITIONS")  # of Kubernetes, and a misspelt one
NOT_KEYWORDS = ("connect_args", "start_new_session", "synchronous")  # of SQLAlchemy, of subprocess and of SQLite
INBOX = "docs/inbox.md"  # here `lease_s` is the keyword of RedisInbox


def wrong_settings(texts: Pages) -> list[str]:
    """Names that end in _s or _bytes or begin with max_, in a URL, in onward.toml, and ONWARD_ variables."""
    known = set(defaults(texts[API]))
    problems = [each.problem(what) for each in code(texts) for what in _wrong_settings(each.text, known)]
    for block in blocks(texts, "toml"):
        given = _settings_file(block.text)
        problems += [block.problem(f"no setting is named {name}") for name in given if name not in names()]
    return problems


def _settings_file(text: str) -> Mapping[str, Any]:
    """What an onward.toml sets. Empty for another file: its first line is a heading, and not [client] or [onward]."""
    given = tomllib.loads(text)
    has_top = any(not isinstance(value, dict) for value in given.values())
    return given if has_top or given.keys() <= {"client", "onward"} else {}


def _wrong_settings(text: str, known: set[str]) -> Iterator[str]:
    limits = re.findall(r"(?<![\w.])(?:[a-z][a-z_]*_(?:s|bytes)|max_[a-z_]+)\b", text)
    yield from (f"no setting or keyword is named {name}" for name in limits if name not in known)
    queries = re.findall(r"\w+://[^\s?]*\?(\S+)", text)
    given = [name for query in queries for name in re.findall(r"(?:^|&)([a-z_]+)=", query)]
    yield from (f"no setting is named {name}" for name in given if name not in names())
    found = set(re.findall(r"\bONWARD_[A-Z_]*[A-Z]\b", text)) - variables() - set(NOT_VARIABLES)
    yield from (f"Onward reads no variable {name}" for name in sorted(found))


def wrong_values(texts: Pages) -> list[str]:
    """`name=value` in the text, and the lines of onward.toml: the name exists, and may have this value."""
    problems = []
    for each in [each for each in code(texts) if each.language == "inline"]:
        given = _given(each.text)
        wrong = [name for name in given if name not in defaults(texts[API]) and name not in NOT_KEYWORDS]
        problems += [each.problem(f"no setting or keyword is named {name}") for name in wrong]
        problems += _wrong_values(each, given)
    for block in blocks(texts, "toml"):
        problems += _wrong_values(block, _settings_file(block.text))
    return problems


def _given(span: str) -> dict[str, Any]:
    """The names before the = of `engine=` or `batch_size=100, start="latest"`, and the values that are constants."""
    if name := re.fullmatch(r"([a-z][a-z_]*)=(?:\{…\})?", span):
        return {name[1]: None}
    if not re.match("[a-z][a-z_]*=[^=]", span):
        return {}
    try:
        call = ast.parse(f"f({span})", mode="eval").body
    except SyntaxError:
        return {}
    keywords = call.keywords if isinstance(call, ast.Call) else []
    return {
        each.arg: each.value.value if isinstance(each.value, ast.Constant) else None for each in keywords if each.arg
    }


def _wrong_values(where: Code, given: Mapping[str, Any]) -> list[str]:
    constants = {name: value for name, value in given.items() if isinstance(value, str | int | float)}
    wrong = [(name, value) for name, value in constants.items() if not _accepts(name, value)]
    return [where.problem(f"{name} cannot be {value!r}") for name, value in wrong]


def _accepts(name: str, value: object) -> bool:
    try:
        msgspec.convert(value, _types().get(name, Any), strict=False)
    except (msgspec.ValidationError, TypeError):  # TypeError: no constant has this type
        return False
    return True


@functools.cache
def _types() -> Mapping[str, Any]:
    """Of the settings, and of the keywords of app.handler."""
    return get_type_hints(Onward.handler) | get_type_hints(Settings, include_extras=True)


def wrong_defaults(texts: Pages) -> list[str]:
    """A number in parentheses behind a name is its default: `lease_s` (10 s), `max_event_bytes` (1 MiB). A name that a
    setting and a keyword have is the setting's."""
    units = {"": 1, "s": 1, "minutes": 60, "days": 86_400, "MiB": 1 << 20, "GiB": 1 << 30}
    problems = []
    for page, text in texts.items():
        for found in re.finditer(rf"`([a-z_]+)`\s\((\d[\d,.]*) ?({'|'.join(units)})\)", text):
            is_setting = found[1] in names() and page != INBOX
            known = setting_defaults()[found[1]] if is_setting else defaults(texts[API]).get(found[1], set())
            if known and float(found[2].replace(",", "")) * units[found[3]] not in known:
                where = f"{page}:{line_of(text, found.start())}"
                problems.append(f"{where}: the default of {found[1]} is {sorted(known)}, not {found[2]}")
    return problems
