"""Runs a handler in this process, with a deadline and in its own context."""

from contextvars import Context, copy_context

from onward.context import enter
from onward.engines import forks
from onward.engines.base import Call, Work
from onward.error_report import harmless
from onward.errors import HandlerTimeout
from onward.event import Delivery


class Runner:
    """Runs one handler. Each run gets a fresh copy of the context in which the engine was started."""

    def __init__(self, call: Call, timeout_s: float | None) -> None:
        self.call = call
        self.timeout_s = timeout_s
        self.context = Context()
        self.forks = forks.count

    def start(self) -> None:
        """Remember the context, and the process, in which the engine starts."""
        self.context = copy_context()
        self.forks = forks.count

    def run(self, work: Work, deadline: float | None) -> BaseException | None:
        """Run a `def` handler in this thread. Returns its error."""
        try:
            self.context.copy().run(enter, self.call, work, deadline)
        except BaseException as raised:  # the name ends with the clause, so the error is in no reference cycle
            error = harmless(raised)
            self._check_fork(error)
            return error
        self._check_fork(None)
        return None

    def overrun(self, where: str, cause: BaseException | None) -> HandlerTimeout:
        """The error of a run that exceeded `timeout_s`. `where`: the line that it had reached then; empty: unknown."""
        timeout = HandlerTimeout(overrun(self.timeout_s, where))
        timeout.__cause__ = cause
        return timeout

    def _check_fork(self, error: BaseException | None) -> None:
        if forks.count != self.forks:
            forks.end(error)


def overrun(timeout_s: float | None, where: str) -> str:
    return f"the handler ran longer than timeout_s={timeout_s:g}{f', at {where}' if where else ''}"


def described(work: Work) -> str:
    """A description of the run, for the log."""
    first = work if isinstance(work, Delivery) else work[0]
    return f"the handler of {first.partition} position {first.position} key {first.event.key!r}"
