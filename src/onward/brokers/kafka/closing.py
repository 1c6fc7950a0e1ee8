"""Closes clients of a cluster that may be dead. librdkafka itself waits for its answers without a limit."""

import asyncio
import threading
from collections.abc import Callable

from onward import clock

CLOSE_S = 15.0
_LOOK_S = 0.01


async def close_in_time(close: Callable[[], object]) -> bool:
    """Call `close` in a daemon thread, and return whether it ended within CLOSE_S.

    If it did not, the thread goes on. Neither the event loop, which waits for its own threads, nor the interpreter
    waits for a daemon thread when it ends."""
    thread = close_in_background(close)
    end = clock.now() + CLOSE_S
    while thread.is_alive() and clock.now() < end:  # noqa: ASYNC110 - the thread may outlive the loop
        await asyncio.sleep(_LOOK_S)
    return not thread.is_alive()


def close_in_background(close: Callable[[], object]) -> threading.Thread:
    """Close a client that may hang, and go on at once."""
    thread = threading.Thread(target=close, name="onward-kafka-close", daemon=True)
    thread.start()
    return thread
