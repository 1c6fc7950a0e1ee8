"""Runs a coroutine's steps in their own context, within the current task."""

from collections.abc import Coroutine, Generator
from contextvars import Context
from types import coroutine
from typing import Any


@coroutine
def in_context(steps: Coroutine[Any, Any, Any], context: Context) -> Generator[Any, Any, None]:
    """Await the coroutine. Each of its steps runs in the given context."""
    run = context.run
    try:
        yielded = run(steps.send, None)
        while True:
            try:
                answer = yield yielded
            except GeneratorExit:  # the event loop has ended
                steps.close()
                raise
            except BaseException as thrown:
                yielded = run(steps.throw, thrown)
            else:
                yielded = run(steps.send, answer)
    except StopIteration:
        pass  # how a coroutine returns
