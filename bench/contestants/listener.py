"""A process that waits for events and measures how long each took to arrive."""

import asyncio
import time

import msgspec

from bench.contestants.lap import looped
from bench.witness import Verdict, Witness
from onward import Onward
from onward.brokers.base import Ordering

READY = "ready"
STUCK_S = 60.0


class Tick(msgspec.Struct):
    key: str
    number: int  # of this key's ticks, from 0; below 0: to warm up
    sent: float  # time.monotonic, which all processes of a machine share


class Delays(msgspec.Struct, frozen=True):
    delays_ms: list[float]
    verdict: Verdict


def run(url: str, topic: str, events: int, ordering: Ordering = "key") -> Delays:
    app = Onward(url)
    witness = Witness(events)
    delays_ms: list[float] = []
    ready = False

    @app.handler(topic, group="listener", ordering=ordering)
    async def handle(tick: Tick) -> None:
        nonlocal ready
        now = time.monotonic()
        if tick.number >= 0:
            delays_ms.append((now - tick.sent) * 1e3)
            if witness.saw(tick.key, tick.number):
                app.stop()
        elif not ready:
            ready = True
            print(READY, flush=True)

    async def bounded() -> None:
        asyncio.get_running_loop().call_later(STUCK_S, app.stop)
        await app.run()

    looped(bounded())
    return Delays(delays_ms, witness.verdict())
