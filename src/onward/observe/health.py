"""Whether a running application is ready, and the log line with its counts."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from onward.observe.reading import Reading

log = logging.getLogger("onward")

EVERY_S = 10.0
_MOST_NAMED = 5  # handlers in one line


class Health(msgspec.Struct, frozen=True):
    """`ready`: the handlers run and make progress. If not, `troubles` has the reasons."""

    ready: bool
    troubles: tuple[str, ...] = ()


async def report(readings: Callable[[], Sequence[Reading]], every_s: float = EVERY_S) -> None:
    """Every `every_s`, log one line on all handlers if an event was handled since the last line, or is running."""
    before = (0, 0, 0)
    while True:
        await asyncio.sleep(every_s)
        found = readings()
        counts = _counts(found)
        if counts != before or any(reading.busy for reading in found):
            log.info(line(found))
        before = counts


def line(readings: Sequence[Reading]) -> str:
    ages_s = [reading.oldest_running_s for reading in readings if reading.oldest_running_s is not None]
    oldest = f", the oldest for {max(ages_s):.1f} s" if ages_s else ""
    restarted = sum(reading.restarted for reading in readings)
    workers = f"; {_counted(restarted, 'worker')} restarted" if restarted else ""
    return f"{_sums(readings)}; {sum(reading.busy for reading in readings):,} running{oldest}{workers}"


def last_line(readings: Sequence[Reading]) -> str:
    """The log line for when all handlers have stopped."""
    return f"stopped: {_sums(readings)}"


def _counted(number: int, noun: str) -> str:
    """The number and the noun, which takes an s unless there is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _sums(readings: Sequence[Reading]) -> str:
    done, retried, dead = _counts(readings)
    by_handler = [f"{reading.topic} for {reading.group} {reading.done:,}" for reading in readings[:_MOST_NAMED]]
    more = [f"{len(readings) - _MOST_NAMED} more"] if len(readings) > _MOST_NAMED else []
    each = f" ({', '.join([*by_handler, *more])})" if len(readings) > 1 else ""
    return f"{_counted(done, 'event')} done{each}, {retried:,} retried, {dead:,} dead"


def _counts(readings: Sequence[Reading]) -> tuple[int, int, int]:
    return (
        sum(reading.done for reading in readings),
        sum(reading.retried for reading in readings),
        sum(reading.dead for reading in readings),
    )
