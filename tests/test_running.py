"""`async with app.running()`: the handlers beside a body, in another program's event loop."""

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
    """A handler that notes what it has begun and what it has finished."""
    begun: list[int] = []
    done: list[int] = []

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None:
        begun.append(order["n"])
        await asyncio.sleep(takes_s)
        done.append(order["n"])

    return begun, done


def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, a consumer ends with an error as soon as it receives something."""

    def begin() -> None:
        def take(self: Consumer, messages: Any) -> None:
            raise RuntimeError("boom")

        monkeypatch.setattr(Consumer, "_take", take)

    return begin


def test_the_body_begins_as_a_member_and_ends_with_everything_settled(app: Onward) -> None:
    begun, done = noting(app, takes_s=0.2)

    async def main() -> None:
        async with app.running() as same:
            assert same is app
            (group,) = await app.broker.groups("orders")
            assert (group.group, len(group.members)) == ("billing", 1)
            await app.publish("orders", {"n": 1}, key="k")
            await until(lambda: begun == [1])
        assert done == [1], "what runs is finished before the body's end is over"
        assert not app.health().ready
        async with app.running():
            await app.publish("orders", {"n": 2}, key="k")
            await until(lambda: 2 in done)

    asyncio.run(main())
    assert done == [1, 2], "what was done was settled"


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


def test_signals_are_left_alone(app: Onward) -> None:
    noting(app)

    async def main() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        async with app.running():
            assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before

    asyncio.run(main())


def test_run_names_the_program_whose_signals_it_takes(app: Onward, caplog: pytest.LogCaptureFixture) -> None:
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
        assert raised.value.__context__ is None, "the cancellation explains nothing"
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling(), "what follows is not cancelled"
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
                    body.cancel()  # and another task does so too
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


def test_a_cancelled_body_drains_and_a_second_cancellation_cuts(app: Onward) -> None:
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


def test_what_cannot_start_is_raised_and_the_body_does_not_begin(app: Onward, tmp_path: Path) -> None:
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


def test_the_handlers_run_once(app: Onward) -> None:
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
def test_of_two_that_open_the_application_at_once_one_is_refused(app: Onward, first: Any, second: Any) -> None:
    """Declaring a topology takes a moment, in which the application is not open yet."""
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
    assert threading.active_count() == threads, "every broker was closed"


def test_an_application_whose_opening_was_cut_or_failed_can_be_opened_again(app: Onward) -> None:
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


def test_a_stop_that_comes_after_a_run_does_not_concern_the_next(app: Onward) -> None:
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
def test_a_stop_while_a_run_begins_is_not_forgotten(app: Onward, steps: int) -> None:
    """The run was called; it has not taken a step, it opens the application, or it declares the topology."""
    noting(app)
    app.topology(TopicSpec("orders", 4))

    async def main() -> None:
        running = asyncio.create_task(app.run())
        for _ in range(steps):
            await asyncio.sleep(0)
        app.stop()
        with pytest.raises(ConfigError):
            await asyncio.create_task(app.run())  # the stop still concerns the first
        await running

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_stop_before_the_handlers_of_an_open_application_start(app: Onward) -> None:
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


def test_the_shortest_lease_is_long_enough_to_work_with(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=0.1, takeover_grace_s=0.1)
    _, done = noting(app)

    async def main() -> None:
        async with app.running():
            for n in range(20):
                await app.publish("orders", {"n": n}, key=str(n))
            await until(lambda: set(done) == set(range(20)))

    asyncio.run(asyncio.wait_for(main(), 20))
