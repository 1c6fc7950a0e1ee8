"""The monitor: hooks of every kind, hooks that fail, and the monitor of a running application."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from onward import Event, GiveUp, Onward
from onward.failure.monitor import Hook, Monitor
from onward.failure.watch import Alert, Tally, Thresholds
from onward.testing.engine_handlers import ERRORS
from onward.testing.failure_shop import eventually


class Depth:
    def __init__(self) -> None:
        self.value = 0
        self.error: Exception | None = None

    async def read(self) -> list[Tally]:
        if self.error is not None:
            raise self.error
        return [Tally("orders", "billing", self.value)]


def monitor(depth: Depth, *hooks: Hook) -> Monitor:
    return Monitor(depth.read, hooks, thresholds=Thresholds(), every_s=0.01)


def checked(depth: Depth, hooks: Sequence[Hook], *values: int | Exception) -> None:
    async def main() -> None:
        watching = monitor(depth, *hooks)
        for value in values:
            depth.error = value if isinstance(value, Exception) else None
            depth.value = value if isinstance(value, int) else depth.value
            await watching.check()

    asyncio.run(main())


def test_hooks_may_be_async_or_plain_and_plain_ones_do_not_block() -> None:
    received: list[tuple[str, str]] = []

    async def soft(alert: Alert) -> None:
        received.append(("soft", alert.kind))

    def plain(alert: Alert) -> None:
        assert threading.current_thread() is not threading.main_thread()
        received.append(("plain", alert.kind))

    checked(Depth(), [soft, plain], 200, 10)
    assert received == [("soft", "high"), ("plain", "high"), ("soft", "recovered"), ("plain", "recovered")]


def test_a_check_that_fails_is_reported() -> None:
    received: list[str] = []
    checked(Depth(), [lambda alert: received.append(alert.text)], ValueError("the disk is full"), OSError(), 0)
    assert received == ["the dead letters cannot be counted: the disk is full", "the dead letters can be counted again"]


@pytest.mark.parametrize(("name", "why"), [("Masked", "not today"), ("Nameless", "its text cannot be read")])
def test_a_hook_may_raise_an_error_that_cannot_be_read(name: str, why: str) -> None:
    received: list[str] = []

    def plain(alert: Alert) -> None:
        raise ERRORS[name]()

    async def soft(alert: Alert) -> None:
        raise ERRORS[name]()

    checked(Depth(), [plain, soft, lambda alert: received.append(alert.text)], 200)
    for hook, text in zip(("plain", "soft"), received[1:], strict=True):
        assert text.startswith(f"the alert hook {hook} failed: {why}")


def test_a_failed_hook_gets_its_alert_again_and_the_others_get_an_alert_about_it() -> None:
    received: list[str] = []
    got: list[str] = []
    broken = True

    def shaky(alert: Alert) -> None:
        if broken:
            raise ConnectionError("no route")
        got.append(alert.kind)

    async def main() -> None:
        nonlocal broken
        depth = Depth()
        watching = monitor(depth, shaky, lambda alert: received.append(alert.text))
        depth.value = 200
        await watching.check()
        await watching.check()
        assert [text.split(":")[0] for text in received] == ["orders", "the alert hook shaky failed"]
        assert "no route" in received[1]
        broken = False
        await watching.check()

    asyncio.run(main())
    assert got == ["high"]
    assert received[2:] == ["the alert hook shaky works again"]


def test_a_running_application_counts_its_dead_letters(tmp_path: Path) -> None:
    received: list[Alert] = []
    app = Onward(f"sqlite:///{tmp_path}/shop.db", partitions=2, lease_s=1.0, dead_threshold=5, dead_check_s=0.1)

    @app.handler("orders", group="billing")
    async def bill(event: Event) -> None:
        raise GiveUp("never")

    @app.alert
    async def tell(alert: Alert) -> None:
        received.append(alert)

    async def main() -> None:
        async with app:
            running = asyncio.create_task(app.run())
            for n in range(8):
                await app.publish("orders", {"n": n}, key=f"c-{n}")
            await eventually(_received(1), "the alert")
            assert (await app.dead.drop(limit=6)).dropped == 6
            await eventually(_received(2), "the notice")
            app.stop()
            await running

    def _received(count: int):  # type: ignore[no-untyped-def]
        async def seen() -> bool:
            return len(received) >= count

        return seen

    begun = time.time()
    asyncio.run(main())
    assert [alert.kind for alert in received] == ["high", "recovered"]
    tally = received[0].tally
    assert tally is not None
    assert (tally.topic, tally.group) == ("orders", "billing")
    assert 5 < tally.depth <= 8
    assert 0 <= tally.oldest_age_s <= time.time() - begun


def test_an_application_with_a_threshold_of_zero_alerts_on_the_first_dead_letter(tmp_path: Path) -> None:
    received: list[Alert] = []
    app = Onward(f"sqlite:///{tmp_path}/shop.db", dead_threshold=0, dead_check_s=0.1)
    app.alert(received.append)

    @app.handler("orders", group="billing")
    async def bill(event: Event) -> None:
        raise GiveUp("never")

    async def alerted() -> bool:
        return bool(received)

    async def main() -> None:
        async with app.running():
            await app.publish("orders", {"n": 1}, key="c-1")
            await eventually(alerted, "the alert")

    asyncio.run(main())
    assert received[0].kind == "high"
    assert received[0].tally is not None
    assert received[0].tally.depth == 1
