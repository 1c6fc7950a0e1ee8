"""Which engine runs a handler, and what is refused at its declaration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onward import Onward
from onward.crew import _engine
from onward.engines.processes import ProcessEngine
from onward.engines.tasks import TaskEngine
from onward.engines.threads import ThreadEngine
from onward.errors import BadHandler
from onward.event import Delivery, Event, Partition
from onward.handler import bind
from tests.engines.programs import Order


async def coroutine(order: Order) -> None: ...
def plain(order: Order) -> None: ...


class Shop:
    @staticmethod
    def bill(order: Order) -> None: ...


@pytest.fixture
def app(tmp_path: Path) -> Onward:
    return Onward(f"sqlite:///{tmp_path}/shop.db")


def test_the_function_chooses_its_engine_by_default(app: Onward) -> None:
    app.handler("a")(coroutine)
    app.handler("b")(plain)
    assert [handler.engine for handler in app.handlers] == ["tasks", "threads"]
    assert [type(_engine(handler)) for handler in app.handlers] == [TaskEngine, ThreadEngine]


def test_processes_are_chosen_explicitly(app: Onward) -> None:
    from tests.engines import programs

    app.handler("c", engine="processes", workers=3, max_events_per_worker=10)(programs.never_there)
    assert type(_engine(app.handlers[0])) is ProcessEngine


def refused() -> list[tuple[Callable[..., Any], dict[str, Any], str]]:
    async def inner(order: Order) -> None: ...

    return [
        (plain, {"engine": "tasks"}, "not `async def`.*leave engine out"),
        (coroutine, {"engine": "threads"}, "needs no thread"),
        (coroutine, {"engine": "gpu"}, "engine='gpu'"),
        (inner, {"engine": "processes"}, "inside a function.*top level of a module"),
        (lambda order: None, {"engine": "processes", "group": "g"}, "a lambda.*top level of a module"),
        (plain, {"engine": "processes", "workers": 0}, "workers=0"),
        (plain, {"workers": 2}, "only with engine='processes'"),
        (plain, {"engine": "processes", "max_events_per_worker": 0}, "max_events_per_worker=0"),
    ]


@pytest.mark.parametrize(("function", "options", "says"), refused())
def test_an_impossible_choice_is_refused_with_its_cure(
    app: Onward, function: Callable[..., Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadHandler, match=says):
        app.handler("orders", **options)(function)
    assert not app.handlers


def test_a_name_that_leads_to_another_function_is_refused_before_anything_runs(app: Onward) -> None:
    from tests.engines import programs

    def other(order: Order) -> None: ...

    other.__module__, other.__qualname__ = programs.__name__, "never_there"
    app.handler("orders", engine="processes")(other)
    with pytest.raises(BadHandler, match="outermost decorator"):
        _engine(app.handlers[0])
    other.__qualname__ = "no_such"
    app.handlers.clear()
    app.handler("orders", engine="processes")(other)
    with pytest.raises(BadHandler, match="no_such"):
        _engine(app.handlers[0])


def test_a_plain_function_that_returns_a_coroutine_is_an_error_not_a_success() -> None:
    def forgetful(order: Order) -> Any:
        return coroutine(order)

    delivery = Delivery(Event("1", "t", None, b'{"n": 1}'), Partition("t", 0), 0, 1)
    with pytest.raises(BadHandler, match="declare it `async def`"):
        bind(forgetful)(delivery)
    bind(Shop.bill)(delivery)
