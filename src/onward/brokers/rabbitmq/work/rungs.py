"""Rungs: the queues in which retries of a work queue wait. Pure.

A rung is a queue whose messages expire after a fixed time, all after the same time, and then go back to the work queue.
A wait is made of several rungs: a message goes to the largest one that fits, comes back, and goes to the next one. The
member that gets it in between charges no attempt.
"""

import math
import sys
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from onward.event import Tries

RUNGS_MS = (50, 100, 200, 500, *(1_000 << step for step in range(13)))  # the last one is 4,096 s
DUE_MS = 10  # a retry that is due within this time is due
_LATE = 0.1  # of the time that is left: how late the last rung may bring a retry back
_LONGEST_MS = 365 * 86_400_000  # that headers can make a message wait
_LATEST = 253_402_300_799.0  # the end of the year 9999
_MOST_TRIES = 2**31 - 1  # tries are stored as integers; a higher number is damaged

TRIES_HEADER = "onward-tries"
DUE_HEADER = "onward-due"
FIRST_HEADER = "onward-first-failure"


def rung_for(left_ms: float) -> int | None:
    """The rung for a retry that has to wait so long. None: it is due.

    The largest rung that is not longer. If the next longer one ends only a little late, that one, so that a wait does
    not end with many short rungs."""
    if left_ms <= DUE_MS:
        return None
    late_ms = max(DUE_MS, left_ms * _LATE)
    best = RUNGS_MS[0]
    for rung_ms in RUNGS_MS:
        if rung_ms > left_ms + late_ms:
            break
        best = rung_ms
    return best


class Retrying(msgspec.Struct, frozen=True):
    """What a message tells about the earlier attempts of its event. `due` is Unix time; `left_ms`: how long the rungs
    may still make it wait, so that no clock can make it wait longer than was asked for."""

    tries: Tries = Tries()
    due: float = 0.0
    left_ms: float = 0.0
    first_failure: float | None = None

    def waits_ms(self, wall: float) -> float:
        """How long the retry still has to wait."""
        return max(0.0, min((self.due - wall) * 1_000, self.left_ms))

    def after(self, rung_ms: int | None) -> "Retrying":
        """The state to send with the message when it goes to this rung."""
        return msgspec.structs.replace(self, left_ms=max(0.0, self.left_ms - (rung_ms or 0)))


def retrying(tries: Tries, due: float | None, wait_s: float | None, wall: float, first: float | None) -> Retrying:
    """The state of a retry that begins to wait now, until `due` and no longer than `wait_s`."""
    left_s = math.inf if due is None else due - wall
    if wait_s is not None:
        left_s = min(left_s, wait_s)
    left_s = max(0.0, left_s) if left_s < math.inf else 0.0
    return Retrying(tries, wall + left_s, left_s * 1_000, first)


def headers_of(state: Retrying) -> dict[str, str]:
    tries = state.tries
    headers = {
        TRIES_HEADER: f"{tries.failed},{tries.started},{tries.crashes}",
        DUE_HEADER: f"{state.due:.3f},{state.left_ms:.0f}",
    }
    if state.first_failure is not None:
        headers[FIRST_HEADER] = f"{state.first_failure:.3f}"
    return headers


def parsed(headers: Mapping[str, object]) -> Retrying:
    """The state in these headers. What is missing or damaged counts as not there: the event is then due. Another
    program may have written them, so no wait is longer than a year."""
    failed, started, crashes = _numbers(headers.get(TRIES_HEADER), 3, most=_MOST_TRIES)
    due, left_ms = _numbers(headers.get(DUE_HEADER), 2)
    (first,) = _numbers(headers.get(FIRST_HEADER), 1, most=_LATEST)
    return Retrying(
        Tries(int(failed), int(started), int(crashes)), min(due, _LATEST), min(left_ms, _LONGEST_MS), first or None
    )


def _numbers(text: object, count: int, *, most: float = sys.float_info.max) -> tuple[float, ...]:
    """That many numbers, none below 0 or above `most`."""
    try:
        found = tuple(float(part) for part in str(text).split(","))
    except ValueError:
        found = ()
    if len(found) != count or not all(0 <= each <= most for each in found):
        return (0.0,) * count
    return found


class RungName(NamedTuple):
    """One rung of one queue."""

    queue: str  # where its messages go when they expire
    ms: int
