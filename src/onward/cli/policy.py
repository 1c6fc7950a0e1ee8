"""Exit codes, and a supervisor's decisions: when to replace a child, when to give up, which child is stuck. Pure."""

import signal
from typing import NamedTuple, Protocol

from onward.errors import Backlogged, BrokerError, ConfigError, GroupDropped, OutboxError, PayloadError

# The exit codes of every command, as documented in docs/start.md.
OK = 0
NO = 1  # the answer is no: refused, lost, gave up
USAGE = 2  # the command line, a setting or the application cannot work
UNREACHABLE = 3  # the broker cannot be reached or used
INTERRUPTED = 130  # Ctrl-C; a second stop signal ends with 128 + its number

WORKS_S = 1.0  # a child whose handlers joined their groups this long ago counts as working
SETTLED_S = 30.0  # after a child that lived this long, the ends in a row are counted from 1 again
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 30.0
_LOOKS = 3


def exit_code(error: BaseException) -> int:
    """The exit code for an error."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED
        case ConfigError() | PayloadError():
            return USAGE
        case Backlogged() | GroupDropped():
            return NO
        case BrokerError() | OutboxError():
            return UNREACHABLE
    return NO


class End(NamedTuple):
    """How a child ended that had not been asked to stop."""

    code: int  # negative: the signal that killed it
    lived_s: float
    greeted: bool  # it had sent its hello

    @property
    def at_start(self) -> bool:
        """It failed to start. A child that dies after its hello may have been killed by an event. That event becomes a
        dead letter only after several crashes, so such ends do not count as failed starts."""
        return not self.greeted

    def __str__(self) -> str:
        return f"was killed by {_signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"


def _signal_name(number: int) -> str:
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")


class Record(NamedTuple):
    """How a slot's latest children ended."""

    ends: int = 0  # in a row, each within SETTLED_S
    failed_starts: int = 0  # in a row


def after(record: Record, end: End) -> Record:
    return Record(
        ends=record.ends + 1 if end.lived_s < SETTLED_S else 1,
        failed_starts=record.failed_starts + 1 if end.at_start else 0,
    )


def delay_s(record: Record) -> float:
    """How long to wait before the next start: not at all after a first end, then twice as long each time."""
    if record.ends <= 1 and record.failed_starts == 0:
        return 0.0
    # The exponent is bounded: a slot that fails for weeks must not exceed the range of a float.
    doublings = min(record.ends, 16) - (1 if record.failed_starts else 2)
    return float(min(_FIRST_DELAY_S * 2**doublings, _MAX_DELAY_S))


def is_hopeless(record: Record, end: End, *, limit: int, ever_worked: bool, others_work: bool) -> bool:
    """Is another start pointless? Never while other children work: they go on, even if one cannot be replaced. Nor
    while the broker cannot be reached: it may be back for the next start."""
    if others_work or end.code == UNREACHABLE:
        return False
    return (end.at_start and record.failed_starts >= limit) or (end.code == USAGE and not ever_worked)


class Held(Protocol):
    """The process that holds the write lock, and since when (onward.clock.now)."""

    @property
    def pid(self) -> int: ...

    @property
    def since(self) -> float: ...


class Stall:
    """Detects a process that holds the lock for too long.

    After the machine was suspended, the clock alone would blame a healthy process. So several looks must also find it.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._seen: tuple[int, float] | None = None
        self._looks = 0

    def look(self, holder: Held, now: float) -> bool:
        """Has this holder been stuck for longer than the limit?"""
        seen = (holder.pid, holder.since)
        self._looks = self._looks + 1 if seen == self._seen else 1
        self._seen = seen
        return self._looks >= _LOOKS and now - holder.since > self.limit_s
