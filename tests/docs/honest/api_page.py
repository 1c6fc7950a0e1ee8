"""The API page lists every public name, with its signature and defaults."""

import ast
import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from onward.brokers.core.topic_rules import DEFAULT_PARTITIONS
from onward.settings import Settings
from tests.docs.known import exists, members, resolve, signature
from tests.docs.pages import Pages, code, imports
from tests.docs.settings_page import names

API = "docs/api.md"

_MARK = re.compile(r"<!-- members: ([\w.]+) -->\n(.*?)(?:\n\n|\Z)", re.DOTALL)


def tables(page: str) -> dict[str, list[list[str]]]:
    """The rows of the API page's tables, by what they list."""
    found: dict[str, list[list[str]]] = {}
    for path, table in _MARK.findall(page):
        rows = [re.split(r" *\| *", row.strip("| ")) for row in table.splitlines()]
        has_defaults = rows[0][1:2] == ["default"]
        found.setdefault(path, []).extend(row[:2] if has_defaults else row[:1] for row in rows[2:])
    return found


def wrong_tables(texts: Pages) -> list[str]:
    """A table lists exactly the public members, with their real signatures and defaults."""
    problems = []
    for path, rows in tables(texts[API]).items():
        listed = {re.split(r"\W", span)[0]: span for cell, *_ in rows for span in re.findall("`([^`]+)`", cell)}
        real = members(path)
        problems += [f"{path} has no public {name}" for name in sorted(set(listed) - real)]
        problems += [f"the table of {path} lacks {name}" for name in sorted(real - set(listed))]
        shown = [(name, span) for name, span in listed.items() if "(" in span and "…" not in span and name in real]
        signed = [(span, signature(name, getattr(resolve(path), name))) for name, span in shown]
        problems += [f"{span} is really {right}" for span, right in signed if span != right]
        problems += _wrong_defaults(path, rows)
    return [f"{API}: {problem}" for problem in problems]


def _wrong_defaults(path: str, rows: Sequence[list[str]]) -> Iterator[str]:
    """Of defaults that are written as numbers or quoted text."""
    real = {f"`{each.name}`": each.default for each in _parameters(resolve(path))}
    for name, default in [row for row in rows if len(row) == 2 and row[0] in real]:
        if re.fullmatch(r'[\d.]+|`".*"`', default) and ast.literal_eval(default.strip("`")) != real[name]:
            yield f"the default of {name} of {path} is {real[name]!r}, not {default}"


def wrong_constructors(texts: Pages) -> list[str]:
    """Constructors that the page writes out, such as `Webhook(url, *, timeout_s=10.0)`."""
    page = texts[API]
    paths = [f"{path}.{name}" for path in tables(page) for name in members(path)]
    kinds = {path.rpartition(".")[2]: resolve(path) for path in paths if exists(path)}
    problems = []
    for each in code({API: page}):
        name = each.text.partition("(")[0]
        if (
            isinstance(kinds.get(name), type)
            and _is_definition(each.text)
            and each.text != signature(name, kinds[name])
        ):
            problems.append(each.problem(f"{each.text} is really {signature(name, kinds[name])}"))
    return problems


def _is_definition(text: str) -> bool:
    """Could it follow `def`? A call with constants could not."""
    try:
        ast.parse(f"def {text}: pass")
    except SyntaxError:
        return False
    return True


def private_imports(texts: Pages) -> list[str]:
    """Names that a page imports although the API page does not list them."""
    public = {f"{path}.{name}" for path in tables(texts[API]) for name in members(path)} | {"onward.context.current"}
    return [
        each.problem(f"{module}.{name} is not on the API page")
        for each, module, name in imports(texts)
        if f"{module}.{name}" not in public
    ]


def setting_defaults() -> dict[str, set[float]]:
    """Every setting, and the number that is its default."""
    return {name: _numbers(getattr(Settings(), name)) for name in names()} | {"partitions": {DEFAULT_PARTITIONS}}


@functools.cache
def defaults(api: str) -> dict[str, set[float]]:
    """Every setting, public parameter and public field, and the numbers that are its defaults."""
    found = setting_defaults()
    for path in tables(api):
        for name in members(path):
            value = getattr(resolve(path), name, None)
            for each in (name, *(members(f"{path}.{name}") if isinstance(value, type) else ())):
                found.setdefault(each, set())
            for parameter in _parameters(value):
                found.setdefault(parameter.name, set()).update(_numbers(parameter.default))
    return found


def _numbers(value: object) -> set[float]:
    return {value} if isinstance(value, int | float) and not isinstance(value, bool) else set()


def _parameters(value: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):  # it is not callable, or it is a type alias
        return []
