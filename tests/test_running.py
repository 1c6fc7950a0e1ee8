"""`async with app.running()`: the handlers run while the body runs, in another program's event loop."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onward import Onward
from onward.brokers.base import TopicSpec, Topology
from onward.errors import ConfigError, PartitionsDiffer
from onward.flow.consumer import Consumer
from tests.test_app import until


@pytest.fixture
def app(tmp_path: Path) -> Onward:
    return Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=1.0, takeover_grace_s=0.1, drain_timeout_s=5.0)


def noting(app: Onward, *, takes_s: float = 0.0) -> tuple[list[int], list[int]]:
    """A handler that records which events it has begun and which it has finished."""
    begun: list[int] = []
    done: list[int] = []

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None:
        begun.append(order["n"])
        await asyncio.sleep(takes_s)
        done.append(order["n"])

    return begun, done


def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function. Once it was called, a consumer ends with an error as soon as it receives something."""

    def begin() -> None:
        def take(self: Consumer, messages: Any) -> None:
            raise RuntimeError("boom")

        monkeypatch.setattr(Consumer, "_take", take)

    return begin


def test_the_body_begins_after_joining_and_ends_after_everything_is_settled(app: Onward) -> None:
    begun, done = noting(app, takes_s=0.2)

    async def main() -> None:
        async with app.running() as same:
            assert same is app
            (group,) = await app.broker.groups("orders")
            assert (group.group, len(group.members)) == ("billing", 1)
            await app.publish("orders", {"n": 1}, key="k")
            await until(lambda: begun == [1])
        assert done == [1], "the body ended before the running event did"
        assert not app.health().ready
        async with app.running():
            await app.publish("orders", {"n": 2}, key="k")
            await until(lambda: 2 in done)

    asyncio.run(main())
    assert done == [1, 2], "a finished event was not settled"


def test_an_application_that_was_open_stays_open(app: Onward) -> None:
    _, done = noting(app)

    async def main() -> None:
        async with app:
            async with app.running():
                pass
            await app.publish("orders", {"n": 1}, key="k")
            async with app.running():
                await until(lambda: done == [1])

    asyncio.run(main())


def test_running_does_not_change_signal_handlers(app: Onward) -> None:
    noting(app)

    async def main() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        async with app.running():
            assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before

    asyncio.run(main())


def test_run_logs_the_signal_handler_that_it_replaces(app: Onward, caplog: pytest.LogCaptureFixture) -> None:
    noting(app)

    def mine(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        running = app.run()
        app.stop()
        asyncio.run(running)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "replaces the SIGTERM handler <function" in caplog.text
    assert "async with app.running()" in caplog.text


def test_a_consumer_that_fails_ends_the_body_with_its_error(app: Onward, monkeypatch: pytest.MonkeyPatch) -> None:
    noting(app)
    began = failing(monkeypatch)

    async def main() -> None:
        async def body() -> None:
            async with app.running():
                began()
                await asyncio.sleep(60)

        with pytest.raises(RuntimeError, match="boom") as raised:
            await body()
        assert raised.value.__context__ is None, "the error shows the cancellation that it replaced"
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling(), "the code after the body is still cancelled"
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_cancellation_from_outside_is_not_replaced_by_a_failure(
    app: Onward, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noting(app)
    began = failing(monkeypatch)

    async def main() -> None:
        body = asyncio.current_task()
        assert body is not None
        async with app.running():
            began()
            while not body.cancelling():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    body.cancel()  # as if another task had cancelled it too
                    raise

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert "the handlers also failed" in caplog.text


def test_a_body_that_fails_lets_the_handlers_finish(app: Onward) -> None:
    begun, done = noting(app, takes_s=0.2)

    async def main() -> None:
        async with app.running():
            await app.publish("orders", {"n": 1}, key="k")
            await until(lambda: begun == [1])
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(main())
    assert done == [1]


def test_a_cancelled_body_drains_and_a_second_cancellation_ends_the_drain(app: Onward) -> None:
    begun, done = noting(app, takes_s=2.0)

    async def body() -> None:
        async with app.running():
            await app.publish("orders", {"n": len(begun)}, key="k")
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(body())
        await until(lambda: begun == [0])
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert done == [0]
        task = asyncio.create_task(body())
        await until(lambda: begun == [0, 1])
        started = time.monotonic()
        task.cancel()
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        assert done == [0]
        assert time.monotonic() - started < 1.9, "it waited for the handler"

    asyncio.run(main())


def test_an_error_at_the_start_is_raised_and_the_body_does_not_begin(app: Onward, tmp_path: Path) -> None:
    noting(app)
    other = Onward(f"sqlite:///{tmp_path}/shop.db", partitions=3)
    noting(other)

    async def main() -> None:
        async with app:
            await app.publish("orders", {"n": 1})
        async with other.running():
            pytest.fail("the body began")

    with pytest.raises(ConfigError, match="8 partitions"):
        asyncio.run(main())


def test_a_stop_ends_the_handlers_and_not_the_body(app: Onward) -> None:
    begun, _ = noting(app)

    async def main() -> None:
        async with app.running():
            app.stop()
            await until(lambda: not app.readings())
            await app.publish("orders", {"n": 1}, key="k")
        async with app.running():
            await until(lambda: begun == [1])

    asyncio.run(main())


def test_the_handlers_cannot_run_twice_at_once(app: Onward) -> None:
    noting(app)

    async def main() -> None:
        async with app.running():
            with pytest.raises(ConfigError, match=r"already run.* once"):
                await app.run()
            with pytest.raises(ConfigError, match=r"already run.* once"):
                async with app.running():
                    pass

    asyncio.run(main())


async def entered(app: Onward, end: asyncio.Event) -> None:
    async with app:
        await end.wait()


async def beside(app: Onward, end: asyncio.Event) -> None:
    async with app.running():
        await end.wait()


@pytest.mark.parametrize("second", [entered, beside, lambda app, _: app.run()])
@pytest.mark.parametrize("first", [entered, beside])
def test_if_two_tasks_open_the_application_at_once_one_is_refused(app: Onward, first: Any, second: Any) -> None:
    """Declaring a topology takes a moment. During it the application is not open yet."""
    _, done = noting(app)
    app.topology(TopicSpec("orders", 4))

    async def main() -> None:
        end = asyncio.Event()
        one, two = asyncio.create_task(first(app, end)), asyncio.create_task(second(app, end))
        with pytest.raises(ConfigError, match=r"already open.*`async with app:` once"):
            await two
        await until(lambda: app._opened is not None or one.done())
        await app.publish("orders", {"n": 1}, key="k")
        end.set()
        await one
        async with app.running():
            await until(lambda: done == [1])

    threads = threading.active_count()
    asyncio.run(asyncio.wait_for(main(), 20))
    assert threading.active_count() == threads, "a broker was not closed"


def test_an_application_whose_opening_was_cancelled_or_failed_can_be_opened_again(app: Onward) -> None:
    _, done = noting(app)
    app.topology(TopicSpec("orders", 4))

    async def main() -> None:
        cut = asyncio.create_task(entered(app, asyncio.Event()))
        await asyncio.sleep(0)  # it has begun to open
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        async with app:
            await app.publish("orders", {"n": 1}, key="k")
        declared, app.declared = app.declared, Topology([TopicSpec("orders", 5)])
        with pytest.raises(PartitionsDiffer):
            await entered(app, asyncio.Event())
        app.declared = declared
        async with app.running():
            await until(lambda: done == [1])

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_stop_after_a_run_has_no_effect_on_the_next_run(app: Onward) -> None:
    _, done = noting(app)

    async def main() -> None:
        app.stop()
        async with app.running():
            app.stop()
            app.stop()
            await until(lambda: not app.readings())
        app.stop()
        async with app.running():
            await app.publish("orders", {"n": 1}, key="k")
            await until(lambda: done == [1])
        app.stop()
        running = asyncio.create_task(app.run())
        await until(lambda: app.health().ready)
        app.stop()
        await running

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_stop_while_a_run_begins_takes_effect(app: Onward, steps: int) -> None:
    """`run` was called, and has not taken a step, is opening the application, or is declaring the topology."""
    noting(app)
    app.topology(TopicSpec("orders", 4))

    async def main() -> None:
        running = asyncio.create_task(app.run())
        for _ in range(steps):
            await asyncio.sleep(0)
        app.stop()
        with pytest.raises(ConfigError):
            await asyncio.create_task(app.run())  # the stop still ends the first run
        await running

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_stop_before_the_handlers_of_an_open_application_start_takes_effect(app: Onward) -> None:
    begun, done = noting(app)

    async def main() -> None:
        async with app:
            await app.publish("orders", {"n": 1}, key="k")
            beside = app.running()
            app.stop()
            async with beside:
                await until(lambda: not app.readings())
                assert not app.health().ready
            async with app.running():
                await until(lambda: done == [1])
        assert begun == [1]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_shortest_allowed_lease_works(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=0.1, takeover_grace_s=0.1)
    _, done = noting(app)

    async def main() -> None:
        async with app.running():
            for n in range(20):
                await app.publish("orders", {"n": n}, key=str(n))
            await until(lambda: set(done) == set(range(20)))

    asyncio.run(asyncio.wait_for(main(), 20))
