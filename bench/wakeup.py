"""How long an event takes from publish in one process to the start of its handler in another."""

import asyncio
import subprocess
import time

import msgspec

from bench.contestants.lap import looped
from bench.contestants.listener import READY, Delays, Tick
from bench.kit import CHILD_TIMEOUT_S, Bench, Figure, child_command, child_environment, percentile
from bench.workload import TOPIC, application
from onward import Onward
from onward.brokers.base import Ordering

EVERY_S = 0.01


class Ticks(msgspec.Struct, frozen=True):
    """What is published: events of some keys in turn, one at each time."""

    topic: str
    events: int
    every_s: float
    keys: int = 1
    ordering: Ordering = "key"


def run(bench: Bench) -> None:
    events = bench.sized(200, 100)
    bench.say(f"wakeup: {events} events, one each {EVERY_S * 1e3:.0f} ms")
    app = application(bench.path("wakeup.db"))
    result, took = measure(bench, app, Ticks(TOPIC, events, EVERY_S))
    bench.judge("woken by another process", result.verdict)
    _report(bench, result.delays_ms, took)


def measure(bench: Bench, app: Onward, ticks: Ticks) -> tuple[Delays, list[float]]:
    """What the listening process found, and how long each publish took in ms."""
    arguments = {"url": app.settings.url, "topic": ticks.topic, "events": ticks.events, "ordering": ticks.ordering}
    listener = subprocess.Popen(
        child_command("bench.contestants.listener", arguments),
        cwd=bench.folder,
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        took = looped(_publish(listener, app, ticks))
        output, _ = listener.communicate(timeout=CHILD_TIMEOUT_S)
    finally:
        listener.kill()
        listener.wait()
    return msgspec.json.decode(output.splitlines()[-1], type=Delays), took


async def _publish(listener: subprocess.Popen[str], app: Onward, ticks: Ticks) -> list[float]:
    """Return how long each publish took. Events that are sent before the listener is ready only warm both up."""
    took: list[float] = []

    async def tick(at: int) -> None:
        key, sent = f"tick-{at % ticks.keys}", time.monotonic()
        await app.publish(ticks.topic, Tick(key, at // ticks.keys, sent), key=key)
        took.append((time.monotonic() - sent) * 1e3)

    async with app:
        ready = asyncio.create_task(asyncio.to_thread(_await_ready, listener))
        while not ready.done():
            await app.publish(ticks.topic, Tick("warm-up", -1, 0.0), key="warm-up")
            await asyncio.wait([ready], timeout=0.1)
        await ready
        async with asyncio.TaskGroup() as group:
            due = time.monotonic()
            for at in range(ticks.events):
                due += ticks.every_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(tick(at))  # a slow publish does not delay the next
    return took


def _await_ready(listener: subprocess.Popen[str]) -> None:
    assert listener.stdout is not None
    line = listener.stdout.readline().strip()
    if line != READY:
        raise RuntimeError(f"the listening process did not get ready: {line!r}")


def _report(bench: Bench, delays_ms: list[float], took_ms: list[float]) -> None:
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        delay, publish = percentile(delays_ms, share), percentile(took_ms, share)
        bench.add(
            Figure(
                what=f"wake-up in another process, {name}",
                measured=f"{delay:.2f} ms",
                value=delay,
                beside=f"the publish call itself (fsync): {publish:.2f} ms",
                samples={"delays_ms": delays_ms, "publish_ms": took_ms},
            )
        )
