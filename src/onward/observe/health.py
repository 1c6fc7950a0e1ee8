"""How a running application is doing: whether it is ready, and the log line that says so."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from onward.observe.reading import Reading

log = logging.getLogger("onward")

EVERY_S = 10.0


class Health(msgspec.Struct, frozen=True):
    """`ready`: handlers run and make progress; else `troubles` says what stops them."""

    ready: bool
    troubles: tuple[str, ...] = ()


async def report(readings: Callable[[], Sequence[Reading]], every_s: float = EVERY_S) -> None:
    """Log a line for each handler that has done something since the last one, or is doing it."""
    before: dict[tuple[str, str], tuple[int, ...]] = {}
    while True:
        await asyncio.sleep(every_s)
        for reading in readings():
            name, counts = (reading.topic, reading.group), (reading.done, reading.retried, reading.dead)
            if reading.busy or counts != before.get(name, (0, 0, 0)):
                log.info(line(reading))
            before[name] = counts


def line(reading: Reading) -> str:
    oldest = "" if reading.oldest_running_s is None else f", oldest {reading.oldest_running_s:.1f} s"
    return (
        f"{reading.topic} for {reading.group}: {reading.engine} {reading.workers:,} workers, {reading.busy:,} busy, "
        f"{reading.restarted:,} restarted{oldest}; "
        f"{reading.done:,} done, {reading.retried:,} retried, {reading.dead:,} dead"
    )
