"""Finds what a command works on: an application by MODULE:APP, or a broker by its URL."""

import difflib
import functools
import importlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import typer

from onward import brokers
from onward import settings as settings_
from onward.app import Onward
from onward.brokers.base import Topology
from onward.cli.say import Misuse, say
from onward.errors import BadSetting, OnwardError

log = logging.getLogger("onward")

AppOption = Annotated[str | None, typer.Option("--app", metavar="MODULE:APP", help="Use this application's broker.")]
UrlOption = Annotated[str | None, typer.Option("--url", metavar="URL", help="Use the broker at this URL.")]

_OUR_FOLDER = str(Path(__file__).parent)
_IGNORED = "ONWARD_URL is ignored: the application names its URL in the code; write Onward() to use ONWARD_URL"


def system(app: str | None, url: str | None) -> Onward:
    """The application that the options name, else the environment, else onward.toml. Prints the choice on stderr."""
    choice = choose(app, url, os.environ)
    found = Onward(choice.url) if choice.app is None else load(choice.app)
    which = settings_.redacted(found.settings.url)
    say(f"using {which} ({choice.how})")
    if choice.app is not None and _ignores_environment(found.settings.url):
        say(f"warning: {_IGNORED}")
    return found


def log_broker(url: str) -> None:
    """Log the URL that a running application uses, and a warning if ONWARD_URL names another one."""
    log.info("broker: %s", settings_.redacted(url))
    if _ignores_environment(url):
        log.warning(_IGNORED)


def _ignores_environment(url: str) -> bool:
    """Is ONWARD_URL set, and `url` another one?"""
    if not os.environ.get("ONWARD_URL"):
        return False
    try:
        return settings_.load().url != url
    except BadSetting:  # ONWARD_URL is malformed, so an application that used it would not have started
        return True


def observed(app: str | None, url: str | None) -> Onward:
    """The application, for a command that only reads: opening it does not create what it declares."""
    found = system(app, url)
    found.declared, found.observes = Topology(own=found.declared.own), True
    return found


def existing(app: str | None, url: str | None) -> Onward:
    """The application, for a command that must not create the store. Misuse if there is none."""
    found = observed(app, url)
    if why := brokers.absent(found.settings):
        raise Misuse(f"{why}: nothing was ever published there; is the URL right?")
    return found


def application(written: str) -> str:
    """The application that the environment or onward.toml names, for a command line without one. `written`: how to
    write it on the command line."""
    known = settings_.load().app
    if not known:
        raise Misuse(f"no application given: write {written}, set ONWARD_APP, or set app in onward.toml")
    source = "ONWARD_APP" if os.environ.get("ONWARD_APP") else "onward.toml"
    say(f"using {settings_.redacted(known)} ({source})")
    return known


class SystemChoice(NamedTuple):
    app: str | None
    url: str | None  # None without an app: the url of the settings
    how: str


def choose(app: str | None, url: str | None, environment: Mapping[str, str]) -> SystemChoice:
    """The first that is given: an option, ONWARD_APP, ONWARD_URL, onward.toml, the default."""
    if app is not None and url is not None:
        raise Misuse("--app and --url cannot be used together; give one of them")
    if app is not None:
        return SystemChoice(app, None, f"--app {app}")
    if url is not None:
        return SystemChoice(None, url, "the given URL")
    known = settings_.load()
    if environment.get("ONWARD_APP"):
        return SystemChoice(known.app, None, f"ONWARD_APP={known.app}")
    if environment.get("ONWARD_URL"):
        return SystemChoice(None, None, "ONWARD_URL")
    if known.app:
        return SystemChoice(known.app, None, f"app {known.app} of onward.toml")
    if known.url != settings_.Settings().url:
        return SystemChoice(None, None, "url of onward.toml")
    return SystemChoice(None, None, "the default; choose with --app, --url, ONWARD_APP, ONWARD_URL or onward.toml")


def load(target: str) -> Onward:
    """The application that MODULE:APP names, looked up from the current folder first."""
    name, _, path = target.partition(":")
    _check_shape(target, name, path)
    module = _import(name)
    return _application(module, path)


def _check_shape(target: str, name: str, path: str) -> None:
    if "@" in target or "://" in target:  # it may hold a password
        raise Misuse(
            f"{settings_.redacted(target)!r} is not MODULE:APP; give a URL in ONWARD_URL, or with --url if there is one"
        )
    as_file = name.removesuffix(".py").replace("\\", "/").strip("/.")
    if name.endswith(".py") or "/" in name or "\\" in name:
        raise Misuse(f"{target!r} names a file; name the module: {as_file.replace('/', '.')}:{path or 'app'}")
    if not path or not all(name.split(".")) or not all(path.split(".")):
        raise Misuse(f"{target!r} is not MODULE:APP; for app = Onward(...) in shop.py write shop:app")


def _import(name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise Misuse(_no_module(error.name, name)) from error
        raise _broken(f"cannot import {name!r}", error) from error
    except OnwardError as error:
        raise _located(error) from None
    except Exception as error:  # a module may raise anything
        raise _broken(f"cannot import {name!r}", error) from error


def _no_module(missing: str, name: str) -> str:
    here = [path.stem for path in Path().glob("*.py")] + [path.parent.name for path in Path().glob("*/__init__.py")]
    near = difflib.get_close_matches(missing, here, 1)
    hint = f"did you mean {near[0]!r}?" if near else "run the command in the folder that contains it, or install it"
    part = "" if missing == name else f", needed for {name!r}"
    return f"no module {missing!r} in {os.getcwd()} or among the installed packages{part}; {hint}"


def _application(module: ModuleType, path: str) -> Onward:
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise Misuse(_no_attribute(module, path, found, name))
        found = getattr(found, name)
    made = _made(module, path, found) if _is_factory(found) else found
    if isinstance(made, Onward):
        return made
    verb = "returns" if made is not found else "is"
    raise Misuse(f"{module.__name__}:{path} {verb} {_kind(made)}, not an Onward; {_known(module)}")


def _is_factory(found: Any) -> bool:
    return (inspect.isroutine(found) or isinstance(found, functools.partial)) and not inspect.iscoroutinefunction(found)


def _made(module: ModuleType, path: str, factory: Callable[[], Any]) -> Any:
    where = f"{module.__name__}:{path}"
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise Misuse(f"{where} is a function that needs arguments ({error}); {_known(module)}") from error
    try:
        return factory()
    except OnwardError as error:
        raise _located(error) from None
    except Exception as error:  # a function may raise anything
        raise _broken(f"{where}() failed", error) from error


def _no_attribute(module: ModuleType, path: str, owner: Any, name: str) -> str:
    near = difflib.get_close_matches(name, dir(owner), 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    where = getattr(module, "__file__", None) or "a namespace package"
    return f"module {module.__name__!r} ({where}) has no {path!r}; {hint}{_known(module)}"


def _known(module: ModuleType) -> str:
    names = [f"{module.__name__}:{name}" for name, value in vars(module).items() if isinstance(value, Onward)]
    return f"it has {', '.join(names)}" if names else "it has no Onward at its top level"


def _kind(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"the class {name}" if isinstance(value, type) else f"a {name}"


def _broken(what: str, error: BaseException) -> Misuse:
    """`what` failed, and the traceback of the user's own code."""
    return Misuse(f"{what}\n{''.join(_user_traceback(error).format()).rstrip()}")


def _user_traceback(error: BaseException) -> traceback.TracebackException:
    pruned = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = pruned
    while link is not None:
        link.stack = traceback.StackSummary.from_list([frame for frame in link.stack if _is_users(frame)])
        link = link.__cause__ or link.__context__
    return pruned


def _is_users(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    return not name.startswith(("<frozen importlib", _OUR_FOLDER)) and name != importlib.__file__


def _located(error: OnwardError) -> OnwardError:
    """The error, with a note that names the line of the user's code where it was raised."""
    ours = str(Path(_OUR_FOLDER).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame) and not frame.filename.startswith(ours):
            error.add_note(f"in {frame.filename}, line {frame.lineno}: {frame.line}")
            break
    return error
