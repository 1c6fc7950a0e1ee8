"""The handlers of the engine suite, in a module that a worker process can import. The event decides what they do."""

import asyncio
import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from onward import context
from onward.clock import now
from onward.errors import GiveUp, RetryLater, Skip
from onward.event import Event


class Order(msgspec.Struct, frozen=True, kw_only=True):
    log: str  # a file: each run writes a line when it begins and when it ends
    do: str = "nothing"
    seconds: float = 0.0
    what: str = ""
    filling: bytes = b""


class Note(msgspec.Struct, frozen=True):
    """A line of the log."""

    event: str
    step: str
    at: float
    worker: int
    text: str = ""


class Unprintable(Exception):
    """An error that can be neither printed nor pickled."""

    def __init__(self, lock: object) -> None:
        super().__init__(lock)
        self.callback = lambda: lock

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Refused(ValueError):
    pass


class Exiting(Exception):
    """An error whose str() raises CancelledError."""

    def __str__(self) -> str:
        raise asyncio.CancelledError


class Masked(Exception):
    """An error for which isinstance() raises."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("no class")


class _Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__"):
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class Nameless(Exception, metaclass=_Nameless):
    """An error whose class name, text and notes all raise when they are read."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise SystemExit(3)


class Vague(RetryLater):
    """A RetryLater without `after_s`."""

    def __init__(self) -> None: ...


def plain(order: Order, event: Event) -> None:
    note(order, event, "begin")
    _DO[order.do](order, event)
    time.sleep(order.seconds)
    note(order, event, "end")


async def suspending(order: Order, event: Event) -> None:
    note(order, event, "begin")
    _DO[order.do](order, event)
    await asyncio.sleep(order.seconds)
    note(order, event, "end")


def plain_batch(orders: list[Order], events: list[Event]) -> None:
    for order, event in zip(orders, events, strict=True):
        plain(order, event)


async def suspending_batch(orders: list[Order], events: list[Event]) -> None:
    for order, event in zip(orders, events, strict=True):
        await suspending(order, event)


def note(order: Order, event: Event, step: str, text: str = "") -> None:
    line = msgspec.json.encode(Note(event.id, step, now(), os.getpid(), text)) + b"\n"
    with open(order.log, "ab", buffering=0) as log:
        log.write(line)


def notes(log: Path) -> list[Note]:
    lines = log.read_bytes().splitlines() if log.exists() else []
    return [msgspec.json.decode(line, type=Note) for line in lines]


# -- what an order can make its handler do ------------------------------------------------------------------------

_seen: ContextVar[str] = ContextVar("seen", default="nothing")
ERRORS: dict[str, Callable[[], BaseException]] = {
    "Refused": lambda: Refused("not today"),
    "Unprintable": lambda: Unprintable(object()),
    "Exiting": Exiting,
    "Masked": lambda: Masked("not today"),
    "Nameless": Nameless,
    "Vague": Vague,
    "CancelledError": asyncio.CancelledError,
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "RetryLater": lambda: RetryLater(7.5, "closed until noon"),
    "GiveUp": lambda: GiveUp("no such customer"),
    "Skip": lambda: Skip("seen before"),
}
HALF = "half a pair: \ud83d"  # a lone surrogate, which no encoding can represent
HALVES: dict[str, Callable[[], BaseException]] = {
    "Refused": lambda: Refused(HALF),
    "RetryLater": lambda: RetryLater(7.5, HALF),
    "GiveUp": lambda: GiveUp(HALF),
    "Skip": lambda: Skip(HALF),
}


def _raise(order: Order, event: Event) -> None:
    raise ERRORS[order.what]()


def _raise_half(order: Order, event: Event) -> None:
    raise HALVES[order.what]()


def _mark(order: Order, event: Event) -> None:
    """Note what the context held at the start of this run, then change it."""
    note(order, event, "context", _seen.get())
    _seen.set(event.id)


def _ask(order: Order, event: Event) -> None:
    run = context.current()
    left_s = None if run.deadline is None else run.deadline - now()
    facts = [run.event.id, run.attempt, run.partition, run.position, run.fence, run.trace_id, left_s, len(run.batch)]
    run.log.info("asked")
    note(order, event, "current", msgspec.json.encode(facts).decode())


def _die(order: Order, event: Event) -> None:
    """Kill the worker in the way that `what` names. Any other `what` is the path of a marker file: if it does not
    exist, create it and kill the worker."""
    ways: dict[str, Callable[[], Any]] = {
        "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit": lambda: os._exit(3),
        "segfault": lambda: ctypes.string_at(0),
    }
    if order.what in ways:
        ways[order.what]()
    marker = Path(order.what)
    if not marker.exists():
        marker.touch()
        ways["SIGKILL"]()


def _fork(order: Order, event: Event) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork in a process with threads
        pid = os.fork()
    if pid == 0:
        sys.exit(7)
    note(order, event, "forked", str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _cancel(order: Order, event: Event) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    raise Refused("not today")


def _stop(order: Order, event: Event) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


_DO: dict[str, Callable[[Order, Event], None]] = {
    "nothing": lambda order, event: None,
    "raise": _raise,
    "raise half": _raise_half,
    "mark": _mark,
    "ask": _ask,
    "die": _die,
    "stop": _stop,
    "fork": _fork,
    "cancel": _cancel,
}
