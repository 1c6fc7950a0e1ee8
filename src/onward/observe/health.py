"""The log line by which a running application says how its handlers fare."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from onward.observe.metrics import Reading

log = logging.getLogger("onward")

EVERY_S = 10.0


async def tell(readings: Callable[[], Sequence[Reading]], every_s: float = EVERY_S) -> None:
    """A line for each handler that has done something since the last one, or is doing it."""
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
        f"{reading.group}: {reading.engine} {reading.workers:,} workers, {reading.busy:,} busy, "
        f"{reading.restarted:,} restarted{oldest}; "
        f"{reading.done:,} done, {reading.retried:,} retried, {reading.dead:,} dead"
    )
