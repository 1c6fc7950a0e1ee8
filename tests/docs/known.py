"""What exists: commands, settings, metrics, fixed values, targets, extras and public names."""

import ast
import asyncio
import functools
import inspect
import re
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from onward import Event, Onward
from onward.brokers.rabbitmq.operate.figures import RabbitFigures
from onward.brokers.redis.foreign import lost_entries
from onward.brokers.redis.stream_figures import StreamFigures
from onward.cli import app as cli
from onward.cli import policy
from onward.failure import judge
from onward.flow import dispatch, lag
from onward.flow.entry import Stage
from onward.observe import endpoint
from onward.observe.figures import of_broker
from onward.observe.metrics import exposition
from onward.outbox.relays import Relays
from onward.settings import _OTHER_NAMES as OTHER_VARIABLES
from onward.settings import Settings
from tests.docs.settings_page import names
from tests.examples import ROOT

INTERNAL = {
    "onward.Onward": {"append_in", "declared", "endpoint", "joined", "observes", "supervised"},
    "onward.outbox.Outbox": {"engine", "entry", "on_ring"},
    "onward.brokers.rabbitmq.Binding": {"identity", "target"},
    "onward.brokers.rabbitmq.Exchange": {"table"},
    "onward.brokers.rabbitmq.Queue": {"table", "tier_queues"},
    "onward.failure.dead.DeadLetters": {"total", "tally", "aside", "steps"},
    "onward.failure.dead.LetterChoice": {"anywhere", "where", "names"},
}
"""Members without an underscore that are for other modules of Onward only."""


@functools.cache
def commands() -> Mapping[str, frozenset[str]]:
    """The options of every command. Names are such as "run" and "dead list"; "" is `onward` itself."""
    root = typer.main.get_command(cli)
    first = _under(root)
    second = {f"{name} {inner}": each for name, group in first.items() for inner, each in _under(group).items()}
    return {name: _options(command) for name, command in ({"": root} | first | second).items()}


def _under(command: Any) -> dict[str, Any]:
    """The commands of a command, empty if it has none."""
    context = typer.Context(command)
    found = command.list_commands(context) if hasattr(command, "list_commands") else []
    return {name: command.get_command(context, name) for name in found}


def _options(command: Any) -> frozenset[str]:
    given = [option for each in command.params for option in (*each.opts, *each.secondary_opts)]
    return frozenset(option for option in given if option.startswith("--")) | {"--help"}


@functools.cache
def variables() -> set[str]:
    """The environment variables that Onward reads."""
    return {f"ONWARD_{name.upper()}" for name in (*names(), *OTHER_VARIABLES)}


def exported_metrics(folder: Path) -> set[str]:
    """The families that a running application exports, on every broker, and those of its relays."""
    app = Onward(f"sqlite:///{folder}/metrics.db")

    @app.handler("orders")
    async def bill(event: Event) -> None: ...

    async def exported() -> str:
        async with app.running():
            return app.metrics()

    nothing: Any = None
    relays = Relays((), nothing, Settings(), "name")
    others = exposition(of_broker([*StreamFigures().figures(), *RabbitFigures().figures(), *relays.figures()], []))
    return set(re.findall(r"^# TYPE (\w+)", asyncio.run(exported()) + others, re.MULTILINE))


def exit_codes() -> set[int]:
    """The constants of onward.cli.policy that are whole numbers."""
    public = [value for name, value in vars(policy).items() if name.isupper() and not name.startswith("_")]
    return {value for value in public if type(value) is int}


def paths() -> set[str]:
    """What the metrics endpoint serves."""
    nothing: Any = None
    return set(endpoint._pages(nothing, nothing))


def reasons() -> set[str]:
    """Why an event became a dead letter: what the judge of errors decides, the crashes that the flow counts, and the
    entries that a stream has lost."""
    returned = re.findall(r'"([a-z]+)"', inspect.getsource(judge.ErrorJudge._reason))
    crashed = re.findall(r'reason="([a-z]+)"', inspect.getsource(dispatch))
    lost = re.findall(r'reason="([a-z]+)"', inspect.getsource(lost_entries))
    return {*returned, *judge._REASONS.values(), *crashed, *lost}


def states() -> set[str]:
    """The states of an event that blocks a partition."""
    named = re.findall(r'_blocked_by\(.*, "([a-z]+)"', inspect.getsource(lag))
    return {stage.name.lower() for stage in Stage} | set(named)


@functools.cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@functools.cache
def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


@functools.cache
def resolve(path: str) -> Any:
    """The object with this import path. AttributeError: there is none."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[cut:], found)
    raise AttributeError(path)


def exists(path: str) -> bool:
    try:
        resolve(path)
    except AttributeError:
        return False
    return True


@functools.cache
def members(path: str) -> set[str]:
    """The public names of a module, the public members of a class, or the keywords of a function."""
    found = resolve(path)
    if isinstance(found, ModuleType):
        named = set(getattr(found, "__all__", None) or _defined(found))
    elif isinstance(found, type):
        bases = {name for base in found.__mro__[1:] if not _is_ours(base) for name in dir(base)}
        named = set(dir(found)) - bases | _assigned(found)
    else:
        parameters = inspect.signature(found).parameters.values()
        named = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    return {name for name in named if not name.startswith("_")} - INTERNAL.get(path, set())


def unlisted(module: ModuleType) -> list[str]:
    """The public classes that the module defines and does not list in its __all__."""
    ours = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [name for name in ours if name[0].isupper() and name not in module.__all__]


def _is_ours(base: type) -> bool:
    return base.__module__.startswith("onward")


def _defined(module: ModuleType) -> set[str]:
    """What a module without __all__ defines at its top level."""
    nodes = ast.parse(inspect.getsource(module)).body
    named = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    return named | {ast.unparse(target) for node in nodes if isinstance(node, ast.Assign) for target in node.targets}


def _assigned(kind: type) -> set[str]:
    """The attributes that the constructor sets."""
    init = vars(kind).get("__init__")
    if not inspect.isfunction(init):
        return set()
    return set(re.findall(r"^ +self\.([a-z]\w*)(?:: [^=]+)? = ", inspect.getsource(init), re.MULTILINE))


def signature(name: str, function: Any) -> str:
    """As the API page writes it: without annotations, and with double quotes."""
    found = inspect.signature(function)
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    kept = [each for each in plain if each.name != "self"]
    shown = found.replace(parameters=kept, return_annotation=inspect.Signature.empty)
    return f"{name}{shown}".replace("'", '"')
