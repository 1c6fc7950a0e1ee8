"""Parting with a cluster that may be dead: librdkafka then waits for answers without an end."""

import asyncio
import threading
from collections.abc import Callable

from onward import clock

PART_S = 15.0
_LOOK_S = 0.01


async def parted(close: Callable[[], None]) -> bool:
    """Whether this has ended in its time. A thread that still hangs then is a daemon, and nobody waits for it: not the
    loop, whose own threads are waited for at its end, nor the interpreter."""
    thread = dismiss(close)
    end = clock.now() + PART_S
    while thread.is_alive() and clock.now() < end:  # noqa: ASYNC110 - a thread that outlives the loop rings nothing in it
        await asyncio.sleep(_LOOK_S)
    return not thread.is_alive()


def dismiss(close: Callable[[], object]) -> threading.Thread:
    """Part with a client that may hang, and go on at once."""
    thread = threading.Thread(target=close, name="onward-kafka-parting", daemon=True)
    thread.start()
    return thread
