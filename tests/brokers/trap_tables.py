"""Tables that say which tests cover a trap, and a stop in the middle of the work, which every broker must survive."""

import asyncio
import importlib
import re
from functools import reduce
from typing import Any

from onward import Onward
from onward.testing.scenario import event

_LABEL = re.compile(r"([A-Z])(\d+) ")
_TEST = re.compile(r"([\w/]+?)((?:::\w+)+)$")


def named_tests(table: str, package: str) -> dict[str, list[int]]:
    """The numbers of the traps by their letter, in order. Under each trap the table names tests, one in a line, such as
    `test_x::test_y`; a module outside the package has its folder in its name: `inbox/test_app::test_y`.

    Fails if a test does not exist, if pytest would not run it, or if a trap has none."""
    found: dict[str, list[int]] = {}
    tests: list[str] = ["before the first trap"]
    for line in table.splitlines():
        if label := _LABEL.match(line):
            assert tests, f"the trap above {line!r} has no test"
            tests = []
            found.setdefault(label[1], []).append(int(label[2]))
        if named := _TEST.search(line):
            tests.append(named[0])
            _check_exists(named[1], named[2].split("::")[1:], package)
        else:
            assert "::" not in line, f"{line!r} does not end with the name of a test"
    assert tests, "the last trap has no test"
    return found


def _check_exists(module: str, names: list[str], package: str) -> None:
    place = f"tests.{module.replace('/', '.')}" if "/" in module else f"{package}.{module}"
    assert callable(reduce(getattr, names, importlib.import_module(place)))
    *classes, function = names
    assert function.startswith("test_"), f"{function} is no test"
    assert all(name.startswith("Test") for name in classes), f"pytest does not collect {classes}"


async def stopped_in_the_middle(app: Onward, topic: str, count: int, **declared: Any) -> tuple[list[int], list[int]]:
    """The events that began and those that ended in an application that is stopped while it handles so many.
    `declared`: further options of its handler."""
    started: list[int] = []
    ended: list[int] = []

    @app.handler(topic, concurrency=4, **declared)
    async def slow(n: int) -> None:
        started.append(n)
        await asyncio.sleep(0.1)
        ended.append(n)
        if len(ended) == 6:
            app.stop()

    async with app:
        await app.broker.publish([event(topic, f"key-{n % 8}", n) for n in range(count)])
        await app.run()
    return started, ended
