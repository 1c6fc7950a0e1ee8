"""Which module may import which, what a clean install can do, and the size and names of classes."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src/onward"
FREE = {"onward.event", "onward.errors", "onward.settings", "onward.clock", "onward.loops", "onward.context"}
FREE |= {"onward.error_report"}
CONTRACTS = {"onward.brokers.base", "onward.engines.base", "onward.failure.retry", "onward.inbox.base"}
HOMES: dict[str, str | tuple[str, ...]] = {  # third-party clients and where they may be imported
    "confluent_kafka": "brokers/kafka",
    "redis": ("brokers/redis", "inbox/redis"),
    "aio_pika": "brokers/rabbitmq",
    "pika": "brokers/rabbitmq",
    "sqlalchemy": ("outbox", "inbox/sql.py", "inbox/store.py"),
    "psycopg": "outbox",
    "pymysql": "outbox",
    "asyncpg": "outbox",
    "fastapi": "fastapi.py",
    "django": "django",
    "starlette": "live",
    "uvicorn": "cli",
    "jwt": "live",
    "opentelemetry": ("observe", "outbox/trace.py"),
    "prometheus_client": "observe",
    "typer": "cli",
    "rich": "cli",
    "pytest": "testing",
}
SCHEME = re.compile(r"\b(sqlite|kafka|redis|rediss|amqp|amqps):")
CONCRETE = {f"onward.brokers.{path.name}" for path in (SRC / "brokers").iterdir() if path.is_dir()}
CONCRETE -= {"onward.brokers.core", "onward.brokers.__pycache__"}
RIM = ["__init__", "broker_tasks", "consumer", "run_outcomes"]  # of the flow
PURE = sorted(path.stem for path in (SRC / "flow").glob("*.py") if path.stem not in RIM)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(found)


def modules(folder: str = ".") -> list[Path]:
    return sorted((SRC / folder).rglob("*.py"))


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.startswith("onward.")}


def belongs(name: str, allowed: set[str]) -> bool:
    return any(name == each or name.startswith(each + ".") for each in allowed)


@pytest.mark.parametrize("name", ["event", "errors", "error_report", "settings", "clock", "context", "loops"])
def test_the_ground_floor_imports_nothing_above_it(name: str) -> None:
    assert all(belongs(each, FREE) for each in ours(SRC / f"{name}.py"))


@pytest.mark.parametrize("path", [SRC / "brokers/base.py", SRC / "engines/base.py", SRC / "failure/retry.py"])
def test_a_contract_imports_only_the_ground_floor(path: Path) -> None:
    assert all(belongs(each, FREE) for each in ours(path))


@pytest.mark.parametrize("stage", ["outbox", "brokers", "flow", "engines", "failure", "inbox"])
def test_a_stage_imports_contracts_and_no_other_stage(stage: str) -> None:
    allowed = FREE | CONTRACTS | {f"onward.{stage}"}

    # The fair share of shards and the observed leases; the application, which builds the events.
    allowed |= {"onward.brokers.core", "onward.app"} if stage == "outbox" else set()
    allowed |= {"onward.handler"} if stage in ("flow", "engines") else set()
    allowed |= {"onward.failure.expiry", "onward.failure.judge"} if stage == "flow" else set()
    allowed |= {"onward.flow.entry"} if stage == "failure" else set()  # the outcomes that the judge returns
    for path in modules(stage):
        assert all(belongs(each, allowed) for each in ours(path)), path


def test_only_the_rim_imports_the_command_line_the_console_and_the_test_kit() -> None:
    for path in modules():
        room = path.relative_to(SRC).parts[0]
        if room not in ("cli", "testing", "console", "demo", "__main__.py"):
            assert not [e for e in ours(path) if belongs(e, {"onward.cli", "onward.testing", "onward.console"})], path


def test_a_third_party_client_has_one_home() -> None:
    for path in modules():
        where = path.relative_to(SRC).as_posix()
        for name in imports(path):
            home = HOMES.get(name.split(".")[0])
            homes = (home,) if isinstance(home, str) else home
            assert homes is None or where.startswith((*homes, "demo")), f"{where} imports {name}"


def texts(path: Path) -> Iterator[str]:
    """The string constants of a module, except docstrings and help texts."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    prose |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "help"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def test_no_scheme_is_named_outside_the_brokers() -> None:
    for path in modules():
        where = path.relative_to(SRC)
        if where.parts[0] == "brokers":
            continue
        default = {"sqlite:///onward.db"} if where.name == "settings.py" else set()
        assert not {text for text in texts(path) if SCHEME.search(text)} - default, where
        assert not [each for each in ours(path) if belongs(each, CONCRETE)], where


@pytest.mark.parametrize("name", PURE)
def test_the_plane_is_pure(name: str) -> None:
    impure = {"asyncio", "time", "random", "logging", "os", "threading", "onward.clock"}
    assert not impure.intersection(imports(SRC / f"flow/{name}.py"))


def test_import_onward_imports_no_extra_and_no_command_line() -> None:
    banned = sorted(set(HOMES) | {"pydantic"})
    code = f"import sys, onward; print([name for name in {banned} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


MOST_ATTRIBUTES = 10
LARGE = {"Onward", "SqliteBroker", "Story", "SimulatedProcess", "World", "OwnedPartition", "Session"}  # no new ones


def classes() -> Iterator[tuple[ast.ClassDef, Path]]:
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                yield node, path


def attributes(node: ast.ClassDef) -> set[str]:
    """The attributes that its __init__ sets."""
    inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    stored = [each for init in inits for each in ast.walk(init) if isinstance(each, ast.Attribute)]
    return {each.attr for each in stored if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"}


def test_no_two_classes_have_the_same_name() -> None:
    homes: dict[str, list[str]] = {}
    for node, path in classes():
        if not node.name.startswith("_"):
            homes.setdefault(node.name, []).append(path.relative_to(SRC).as_posix())
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_classes_stay_small() -> None:
    large = {node.name: len(attributes(node)) for node, _ in classes() if len(attributes(node)) > MOST_ATTRIBUTES}
    assert set(large) <= LARGE, large
