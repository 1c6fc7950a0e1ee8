"""Names of Python, files of the repository, and extras."""

import ast
import builtins
import functools
import importlib.util
import inspect
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

from onward import Onward
from onward.brokers.base import Broker
from onward.failure.dead import DeadLetters
from onward.observe.metrics import Registry
from onward.settings import Settings
from tests.docs.honest.api_page import API, tables
from tests.docs.known import exists, extras, members, resolve
from tests.docs.pages import Pages, blocks, code, imports
from tests.docs.settings_page import names
from tests.examples import ROOT

PARTS = {"dead": DeadLetters, "broker": Broker, "registry": Registry, "settings": Settings}  # of an application
NOT_MODULES = (  # files, topics, a logger, and queues of RabbitMQ
    *("onward.toml", "onward.db", "onward.topics", "onward.aside", "onward.kafka"),
    *("onward.registry", "onward.shop"),
)
RESULTS = (  # classes that the API page names only as what a method returns
    "onward.failure.dead.Dropped",
    "onward.failure.dead.LetterScan",
    "onward.failure.dead.Replayed",
    "onward.observe.metrics.Family",
)
NOT_OURS = {
    *("AsyncConnection", "AsyncEngine", "AsyncSession", "Connection", "Session"),  # of SQLAlchemy
    "CancelledError",  # of asyncio
    *("TestCase", "TransactionTestCase"),  # of Django
    "SortedSet",  # of sortedcontainers
    "TimeoutStopSec",  # of systemd
}


def wrong_names(texts: Pages) -> list[str]:
    """Imports, `onward.x.y`, and `app.x` where app is an application."""
    found = imports(texts)
    problems = [each.problem(f"{path} has no {name}") for each, path, name in found if not exists(f"{path}.{name}")]
    for each in code(texts):
        paths = re.findall(r"(?<![\w/.@-])onward(?:\.[A-Za-z_]\w*)+", each.text)
        wrong = [path for path in paths if not path.startswith(NOT_MODULES) and not exists(path)]
        problems += [each.problem(f"{path} does not exist") for path in wrong]
        for part, inner in re.findall(
            rf"(?<![\w.])(?:{_applications(texts[each.page])})\.(\w+)(?:\.(\w+))?", each.text
        ):
            if part != "py" and part not in _attributes(Onward):
                problems.append(each.problem(f"Onward has no {part}"))
            elif inner and part in PARTS and inner not in _attributes(PARTS[part]):
                problems.append(each.problem(f"app.{part} has no {inner}"))
    return problems


def wrong_classes(texts: Pages) -> list[str]:
    """`BacklogFull` or `BacklogFull(...)` in the text: a name of the API page, of Python, or of another library."""
    listed = {name for path in tables(texts[API]) for name in (path.rpartition(".")[2], *members(path))}
    known = listed | {path.rpartition(".")[2] for path in RESULTS if exists(path)} | set(dir(builtins)) | NOT_OURS
    inline = [each for each in code(texts) if each.language == "inline"]
    found = [(each, re.fullmatch(r"((?:[A-Z][a-z]+)+)(?:\(.*\))?", each.text)) for each in inline]
    return [
        each.problem(f"no public class is named {name[1]}") for each, name in found if name and name[1] not in known
    ]


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
    """Dots at the end stand for further keywords."""
    text = re.sub(r", *(?:\.\.\.|…)\)", ")", text)
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
