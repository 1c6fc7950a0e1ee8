"""What only the thread engine does. The suite tests the rest."""

import asyncio
import logging
import threading
import time
from contextvars import ContextVar

import pytest

from onward.engines.base import Ended
from onward.engines.threads import ThreadEngine
from onward.errors import HandlerTimeout
from onward.event import Delivery, Event, Partition


def deliveries(count: int) -> list[Delivery]:
    return [Delivery(Event(str(n), "t", None, b""), Partition("t", 0), n, 1) for n in range(count)]


async def until_ended(ended: list[Ended], count: int) -> None:
    async with asyncio.timeout(20):
        while len(ended) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_threads_get_the_context_variables_of_the_starter() -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="none")
    seen: set[str] = set()

    async def main() -> None:
        tenant.set("acme")
        ended: list[Ended] = []
        engine = ThreadEngine(lambda work: seen.add(tenant.get()), concurrency=3, timeout_s=None)
        engine.start(ended.extend)
        tenant.set("later")
        engine.submit(deliveries(20))
        await until_ended(ended, 20)
        await engine.close()

    asyncio.run(main())
    assert seen == {"acme"}


def test_a_thread_that_exceeds_its_time_is_logged_once_and_keeps_its_slot(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    def handler(work: Delivery) -> None:
        if work.position == 0:
            gate.wait(20)

    async def main() -> None:
        ended: list[Ended] = []
        engine = ThreadEngine(handler, concurrency=2, timeout_s=0.9)
        engine.start(ended.extend)
        engine.submit(deliveries(10))
        await until_ended(ended, 9)
        async with asyncio.timeout(20):
            while "position 0" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert all(each.error is None for each in ended), "the stuck run was reported before it ended"
        assert (engine.health().workers, engine.health().busy) == (2, 1)
        gate.set()
        await until_ended(ended, 10)
        assert isinstance(ended[-1].error, HandlerTimeout)
        await engine.close()

    with caplog.at_level(logging.WARNING, "onward"):
        asyncio.run(main())
    assert caplog.text.count("has run longer than timeout_s=0.9") == 1


def test_completions_reach_the_loop_in_bursts() -> None:
    async def main() -> None:
        ended: list[Ended] = []
        calls = 0

        def report(results: object) -> None:
            nonlocal calls
            calls += 1
            ended.extend(results)  # type: ignore[arg-type]

        handled: list[object] = []
        engine = ThreadEngine(handled.append, concurrency=4, timeout_s=None)
        engine.start(report)
        engine.submit(deliveries(2000))
        deadline = time.monotonic() + 20
        while len(handled) < 2000 and time.monotonic() < deadline:  # the loop is busy elsewhere
            time.sleep(0.01)  # noqa: ASYNC251
        await until_ended(ended, 2000)
        assert calls < 20
        await engine.close()

    asyncio.run(main())


def test_a_thread_that_outlives_close_reports_nothing_more() -> None:
    gate = threading.Event()

    async def main() -> None:
        ended: list[Ended] = []
        engine = ThreadEngine(lambda work: gate.wait(20), concurrency=1, timeout_s=None)
        engine.start(ended.extend)
        engine.submit(deliveries(2))
        await asyncio.sleep(0.05)
        await engine.close()
        assert [each.cancelled for each in ended] == [True, True]
        gate.set()
        await asyncio.sleep(0.05)
        assert len(ended) == 2

    asyncio.run(main())
    gate.set()
