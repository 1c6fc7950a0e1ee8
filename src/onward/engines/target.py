"""The import path of a handler, which worker processes use to find it."""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from onward.errors import BadHandler

_MAIN = "__main__"
_MAIN_AGAIN = "__mp_main__"  # multiprocessing uses this name too: `if __name__ == "__main__"` is false there


def target_of(function: Callable[..., Any]) -> str:
    """The function's path, module:name. Raises BadHandler if another process could not import it."""
    module, name = function.__module__, function.__qualname__
    if "<lambda>" in name or "<locals>" in name:
        what = "a lambda" if "<lambda>" in name else "defined inside a function"
        raise BadHandler(
            f"handler {module}.{name} is {what}, so a worker process cannot import it; "
            "engine='processes' needs a function at the top level of a module"
        )
    if module == _MAIN and main_file() is None:
        raise BadHandler(
            f"handler {name} is defined in a program that has no file, so a worker process cannot import it; "
            "engine='processes' needs a function in a module"
        )
    return f"{module}:{name}"


def check(target: str, function: Callable[..., Any]) -> None:
    """Check that the path leads to this function, now that its module is imported. Raises BadHandler if not."""
    try:
        found = follow(target)
    except (ImportError, AttributeError) as error:
        raise BadHandler(f"handler {target} cannot be imported by a worker process: {error}") from error
    if found is not function:
        raise BadHandler(
            f"a worker process that imports {target} finds {found!r} there, not the handler that was declared; "
            "give each handler its own name, and make @app.handler its outermost decorator"
        )


def follow(target: str) -> Any:
    """The object at the path."""
    module, _, names = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def main_file() -> tuple[str, str] | None:
    """The file of the running program and its package. None if it has no file (-c, a prompt)."""
    main = sys.modules[_MAIN]
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        return None
    return os.path.abspath(path), getattr(main, "__package__", None) or ""


def import_main(path: str, package: str) -> None:
    """Import the parent's main module as the main module here, without running what its guard protects."""
    spec = importlib.util.spec_from_file_location(_MAIN_AGAIN, path)
    if spec is None or spec.loader is None:
        raise BadHandler(f"{path} cannot be imported by a worker process; move the handler into its own module")
    module: types.ModuleType = importlib.util.module_from_spec(spec)
    module.__package__ = package
    sys.modules[_MAIN] = sys.modules[_MAIN_AGAIN] = module
    spec.loader.exec_module(module)


def public_name(kind: str) -> str:
    """The name that a class has in the parent process."""
    return _MAIN + kind.removeprefix(_MAIN_AGAIN) if kind.startswith(_MAIN_AGAIN + ".") else kind
