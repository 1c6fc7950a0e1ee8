"""Checks of the documentation against what exists. Each takes pages and returns the problems that it finds."""

import ast
import functools
import importlib.util
import inspect
import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

from onward import Onward
from onward.brokers.base import Broker
from onward.brokers.core.topic_rules import DEFAULT_PARTITIONS
from onward.failure.dead import DeadLetters
from onward.observe.metrics import Registry
from onward.settings import Settings
from tests.docs.known import commands, extras, members, resolve, signature, targets, variables
from tests.docs.pages import Code, Pages, blocks, code
from tests.docs.settings_page import names
from tests.examples import ROOT

SHELL = ("inline", "", "sh", "bash", "console", "text", "ini")  # blocks without a language show commands, too
PARTS = {"dead": DeadLetters, "broker": Broker, "registry": Registry, "settings": Settings}  # of an application
NOT_MODULES = ("onward.toml", "onward.db", "onward.topics", "onward.aside", "onward.kafka")  # files, topics, a logger
NOT_METRICS = ("onward_inbox", "onward_inbox_cursor", "onward_nats")  # tables, and the package of an example
NOT_VARIABLES = ("ONWARD_SERVICE_HOST", "ONWARD_PATITIONS")  # of Kubernetes, and a misspelt one
API = "docs/api.md"

_MARK = re.compile(r"<!-- members: ([\w.]+) -->\n(.*?)(?:\n\n|\Z)", re.DOTALL)


# -- the command line -------------------------------------------------------------------------------------------------


def wrong_commands(texts: Pages) -> list[str]:
    """`onward NAME` and its options, and options that stand alone."""
    shell = [each for each in code(texts) if each.language in SHELL]
    problems = [each.problem(what) for each in shell for what in _judge_command(_command_line(each.text), each.text)]
    options = frozenset().union(*commands().values())
    alone = [(each, re.match(r"--[a-z][a-z-]*", each.text)) for each in shell if each.language == "inline"]
    return problems + [each.problem(f"no command has {o[0]}") for each, o in alone if o and o[0] not in options]


def _command_line(text: str) -> list[str]:
    """The words behind `onward`, up to a comment or to the explanation behind two spaces."""
    found = re.search(r"(?<![\w.:'\"-])onward ([a-z-].*)", text)
    if found is None or re.search(r"\b(from|import|install|named|cd) $", text[: found.start()]):
        return []
    return re.split(r" {2,}| #|[;|>]", found[1])[0].split()


def _judge_command(words: Sequence[str], text: str) -> Iterator[str]:
    if not words:
        return
    known = commands()
    name = words[0] if not words[0].startswith("-") else ""
    is_group = any(each.startswith(f"{name} ") for each in known)
    if is_group and len(words) > 1 and re.fullmatch("[a-z]+", words[1]):
        name = f"{name} {words[1]}"
    if name not in known:
        yield f"there is no command `onward {name}`"
    else:
        wrong = [
            option for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text) if option not in known[name] | known[""]
        ]
        yield from (f"`onward {name}` has no option {option}" for option in wrong)


def missing_commands(texts: Pages) -> list[str]:
    shown = [" ".join(_command_line(each.text)[:2]) for each in code(texts)]
    wanted = [name for name in commands() if name]
    return [
        f"no page shows `onward {name}`"
        for name in wanted
        if not any(f"{each} ".startswith(f"{name} ") for each in shown)
    ]


def wrong_targets(texts: Pages) -> list[str]:
    found = [(each, re.match(r"(?:\$ )?make ([a-z-]+)", each.text)) for each in code(texts) if each.language in SHELL]
    return [each.problem(f"no target {make[1]!r}") for each, make in found if make and make[1] not in targets()]


# -- settings and metrics ---------------------------------------------------------------------------------------------


def wrong_settings(texts: Pages) -> list[str]:
    """Names that end in _s or _bytes or begin with max_, in a URL, in onward.toml, and ONWARD_ variables."""
    known = set(defaults(texts[API]))
    problems = [each.problem(what) for each in code(texts) for what in _wrong_settings(each.text, known)]
    for block in blocks(texts, "toml"):
        given = tomllib.loads(block.text)
        wrong = [name for name in given if "url" in given and name not in names()]
        problems += [block.problem(f"no setting is named {name}") for name in wrong]
    return problems


def _wrong_settings(text: str, known: set[str]) -> Iterator[str]:
    limits = re.findall(r"(?<![\w.])(?:[a-z][a-z_]*_(?:s|bytes)|max_[a-z_]+)\b", text)
    yield from (f"no setting or keyword is named {name}" for name in limits if name not in known)
    queries = re.findall(r"\w+://[^\s?]*\?(\S+)", text)
    given = [name for query in queries for name in re.findall(r"(?:^|&)([a-z_]+)=", query)]
    yield from (f"no setting is named {name}" for name in given if name not in names())
    found = set(re.findall(r"\bONWARD_[A-Z_]*[A-Z]\b", text)) - variables() - set(NOT_VARIABLES)
    yield from (f"Onward reads no variable {name}" for name in sorted(found))


def wrong_metrics(texts: Pages, exported: set[str]) -> list[str]:
    return [each.problem(f"no metric is named {name}") for each, name, found in _metrics(texts, exported) if not found]


def missing_metrics(texts: Pages, exported: set[str]) -> list[str]:
    mentioned = {family for _, _, found in _metrics(texts, exported) for family in found}
    return [f"no page mentions the metric {name}" for name in sorted(exported - mentioned)]


def _metrics(texts: Pages, exported: set[str]) -> Iterator[tuple[Code, str, set[str]]]:
    """Each name of a metric in the text, and the families that it means. In a table, `_open` behind `onward_lag_gap`
    means the families that begin with `onward_lag_open`."""
    last = ("", 0, "")  # page, line and first words of the last full name
    for each in code(texts):
        for name in re.findall(r"\bonward_[a-z_]*[a-z]\b", each.text):
            if name not in NOT_METRICS:
                last = each.page, each.line, "_".join(name.split("_")[:2])
                base = re.sub("_(bucket|sum|count)$", "", name)
                yield each, name, {name, base} & exported
        if each.language == "inline" and re.fullmatch("_[a-z_]+", each.text) and last[:2] == (each.page, each.line):
            yield each, each.text, {family for family in exported if family.startswith(last[2] + each.text)}


# -- names of Python --------------------------------------------------------------------------------------------------


def wrong_names(texts: Pages) -> list[str]:
    """Imports, `onward.x.y`, and `app.x` where app is an application."""
    problems = []
    for each in code(texts):
        for module, names_ in re.findall(r"from (onward[\w.]*) import ([\w, ]+)", each.text):
            wrong = [name for name in re.split(r",\s*", names_.strip()) if name and not _exists(f"{module}.{name}")]
            problems += [each.problem(f"{module} has no {name}") for name in wrong]
        for path in re.findall(r"(?<![\w/.@-])onward(?:\.[A-Za-z_]\w*)+", each.text):
            if not path.startswith(NOT_MODULES) and not _exists(path):
                problems.append(each.problem(f"{path} does not exist"))
        for part, inner in re.findall(
            rf"(?<![\w.])(?:{_applications(texts[each.page])})\.(\w+)(?:\.(\w+))?", each.text
        ):
            if part != "py" and part not in _attributes(Onward):
                problems.append(each.problem(f"Onward has no {part}"))
            elif inner and part in PARTS and inner not in _attributes(PARTS[part]):
                problems.append(each.problem(f"app.{part} has no {inner}"))
    return problems


def wrong_keywords(texts: Pages) -> list[str]:
    """Keywords in calls of public classes and of methods of an application, where the code is complete Python."""
    calls = {name: resolve(f"onward.{name}") for name in members("onward")}
    calls |= {name: getattr(Onward, name) for name in members("onward.Onward") if callable(getattr(Onward, name, None))}
    whole = [*blocks(texts, "python"), *(each for each in code(texts) if each.language == "inline")]
    return [
        each.problem(f"{name} has no keyword {keyword}")
        for each in whole
        for name, keyword in _keywords_of_calls(each.text)
        if name in calls and keyword not in _accepted(calls[name])
    ]


def _keywords_of_calls(text: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            yield from ((name, each.arg) for each in node.keywords if each.arg is not None)


def _accepted(call: Any) -> set[str]:
    accepted = set(inspect.signature(call).parameters)
    return accepted | set(names()) if call is Onward else accepted


@functools.cache
def _applications(page: str) -> str:
    """The names that this page gives to an application, as a pattern."""
    return "|".join(sorted({"app", *re.findall(r"^(\w+) = Onward\(", page, re.MULTILINE)}))


@functools.cache
def _attributes(kind: type) -> set[str]:
    given = set(vars(kind(url="sqlite:///none.db"))) if kind is Onward else set()
    return given | set(dir(kind)) | set(get_type_hints(kind))


def _exists(path: str) -> bool:
    try:
        resolve(path)
    except AttributeError:
        return False
    return True


def wrong_files(texts: Pages) -> list[str]:
    """Files of the repository, modules that are run with -m, and extras."""
    return [each.problem(what) for each in code(texts) for what in _wrong_files(each.text)]


def _wrong_files(text: str) -> Iterator[str]:
    files = re.findall(r"(?<![\w/.:-])(?:examples|tests|src|docs|bench)/[\w./*-]*\w", text)
    yield from (f"no file {path}" for path in files if not any(ROOT.glob(path)))
    modules = re.findall(r"-m ((?:onward|bench|tests)[\w.]*)", text)
    yield from (f"no module {module}" for module in modules if importlib.util.find_spec(module) is None)
    named = [name for found in re.findall(r"(?:\bonward|\.)\[([a-z,]+)\]", text) for name in found.split(",")]
    yield from (f"no extra {name}" for name in named if name not in extras())


# -- the API page -----------------------------------------------------------------------------------------------------


def tables(page: str) -> dict[str, list[list[str]]]:
    """The rows of the API page's tables, by what they list."""
    found: dict[str, list[list[str]]] = {}
    for path, table in _MARK.findall(page):
        rows = [re.split(r" *\| *", row.strip("| ")) for row in table.splitlines()]
        has_defaults = rows[0][1:2] == ["default"]
        found.setdefault(path, []).extend(row[:2] if has_defaults else row[:1] for row in rows[2:])
    return found


def wrong_tables(page: str) -> list[str]:
    """A table lists exactly the public members, with their real signatures and defaults."""
    problems = []
    for path, rows in tables(page).items():
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


def wrong_constructors(page: str) -> list[str]:
    """Constructors that are written out, such as `Webhook(url, *, timeout_s=10.0)`."""
    kinds = {
        name: resolve(f"{path}.{name}") for path in tables(page) for name in members(path) if _exists(f"{path}.{name}")
    }
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
        for each in code(texts)
        for module, names_ in re.findall(r"from (onward[\w.]*) import ([\w, ]+)", each.text)
        for name in re.split(r",\s*", names_.strip())
        if name and f"{module}.{name}" not in public
    ]


# -- keywords and their defaults --------------------------------------------------------------------------------------


@functools.cache
def defaults(api: str) -> dict[str, set[float]]:
    """Every setting, public parameter and public field, and the numbers that are its defaults."""
    found: dict[str, set[float]] = {name: _numbers(getattr(Settings(), name)) for name in names()}
    found["partitions"] = {DEFAULT_PARTITIONS}
    for path in tables(api):
        for name in members(path):
            value = getattr(resolve(path), name, None)
            for each in (name, *(members(f"{path}.{name}") if isinstance(value, type) else ())):
                found.setdefault(each, set())
            for parameter in _parameters(value):
                found.setdefault(parameter.name, set()).update(_numbers(parameter.default))
    return found


def wrong_defaults(texts: Pages) -> list[str]:
    """A number in parentheses behind a name is its default: `lease_s` (10 s), `max_event_bytes` (1 MiB)."""
    units = {"": 1, "s": 1, "minutes": 60, "days": 86_400, "MiB": 1 << 20, "GiB": 1 << 30}
    problems = []
    for page, text in texts.items():
        for found in re.finditer(rf"`([a-z_]+)`\s\((\d[\d,.]*) ?({'|'.join(units)})\)", text):
            known = defaults(texts[API]).get(found[1], set())
            if known and float(found[2].replace(",", "")) * units[found[3]] not in known:
                line = text.count("\n", 0, found.start()) + 1
                problems.append(f"{page}:{line}: the default of {found[1]} is {sorted(known)}, not {found[2]}")
    return problems


def _numbers(value: object) -> set[float]:
    return {value} if isinstance(value, int | float) and not isinstance(value, bool) else set()


def _parameters(value: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):  # it is not callable, or it is a type alias
        return []
