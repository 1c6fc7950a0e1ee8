"""How long an event takes from publish in one process to the start of its handler in another."""

import asyncio
import subprocess
import time

import msgspec

from bench.contestants.listener import READY, Delays, Tick
from bench.kit import CHILD_TIMEOUT_S, Bench, Figure, child_command, child_environment, percentile
from bench.workload import TOPIC, application

EVERY_S = 0.01


def run(bench: Bench) -> None:
    events = bench.sized(200, 100)
    path = bench.path("wakeup.db")
    bench.say(f"wakeup: {events} events, one each {EVERY_S * 1e3:.0f} ms")
    listener = subprocess.Popen(
        child_command("bench.contestants.listener", {"path": str(path), "events": events}),
        cwd=bench.folder,
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        took = asyncio.run(_publish(listener, str(path), events))
        output, _ = listener.communicate(timeout=CHILD_TIMEOUT_S)
    finally:
        listener.kill()
        listener.wait()
    result = msgspec.json.decode(output.splitlines()[-1], type=Delays)
    bench.judge("woken by another process", result.verdict)
    _report(bench, result.delays_ms, took)


async def _publish(listener: subprocess.Popen[str], path: str, events: int) -> list[float]:
    """Return how long each publish took. Events that are sent before the listener is ready only warm both up."""
    async with application(path) as app:
        ready = asyncio.create_task(asyncio.to_thread(_await_ready, listener))
        while not ready.done():
            await app.publish(TOPIC, Tick(-1, 0.0), key="warm-up")
            await asyncio.wait([ready], timeout=0.1)
        await ready
        took = []
        due = time.monotonic()
        for number in range(events):
            due += EVERY_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            sent = time.monotonic()
            await app.publish(TOPIC, Tick(number, sent), key="tick")
            took.append((time.monotonic() - sent) * 1e3)
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
