"""The engine suite on the three engines."""

from collections.abc import Callable
from typing import Any

import pytest

from onward.engines.base import Engine
from onward.engines.processes import ProcessEngine
from onward.engines.target import target_of
from onward.engines.tasks import TaskEngine
from onward.engines.threads import ThreadEngine
from onward.handler import bind
from onward.testing import EngineSuite
from onward.testing.engine import Style

Function = Callable[..., Any]


class TestTasks(EngineSuite):
    style: Style = "async def"

    @pytest.fixture
    def engine_of(self) -> Callable[..., Engine]:
        def engine(handler: Function, *, batch: bool, **options: Any) -> Engine:
            return TaskEngine(bind(handler, batch=batch), **options)

        return engine


class TestThreads(EngineSuite):
    style: Style = "def"
    ends_runs = False

    @pytest.fixture
    def engine_of(self) -> Callable[..., Engine]:
        def engine(handler: Function, *, batch: bool, **options: Any) -> Engine:
            return ThreadEngine(bind(handler, batch=batch), **options)

        return engine


@pytest.mark.slow
class TestProcesses(EngineSuite):
    style: Style = "def"
    has_processes = True

    @pytest.fixture
    def engine_of(self) -> Callable[..., Engine]:
        def engine(handler: Function, **options: Any) -> Engine:
            return ProcessEngine(target_of(handler), workers=2, **options)

        return engine


@pytest.mark.slow
class TestProcessesWithCoroutines(TestProcesses):
    style: Style = "async def"
