"""What only the process engine does. The suite tests the rest."""

import asyncio
import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from onward.clock import now
from onward.engines.processes import ProcessEngine, wire
from onward.engines.processes.child import WorkerLoop as ChildWorker
from onward.engines.target import target_of
from onward.errors import BadHandler, HandlerTimeout, WorkerDied
from onward.event import Delivery
from onward.testing import engine_handlers as handlers
from onward.testing.engine import Trial, first

pytestmark = pytest.mark.slow  # real processes, seconds each

TARGET = target_of(handlers.plain)


@pytest.fixture
def trial(tmp_path: Path) -> Callable[..., Trial]:
    def make(target: str = TARGET, **options: Any) -> Trial:
        options = {"workers": 2, "concurrency": 8, "timeout_s": 30.0} | options
        return Trial(ProcessEngine(target, **options), tmp_path / "log")

    return make


def children() -> set[int]:
    """Our child processes, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    """Check that no worker process outlives its test. Servers of other tests may be running."""
    before = children()
    yield
    assert children() <= before


def test_a_worker_is_replaced_after_max_events_per_worker(trial: Callable[..., Trial]) -> None:
    async def main() -> None:
        async with trial(max_events_per_worker=10) as t:
            await t.all([t.order(n) for n in range(40)])
            assert not t.errors
            runs = Counter(note.worker for note in t.notes("begin"))
            assert len(runs) >= 4
            assert max(runs.values()) <= 10
            assert t.engine.health().restarted == 0

    asyncio.run(main())


def test_only_the_event_of_a_suspended_worker_fails(trial: Callable[..., Trial]) -> None:
    async def main() -> None:
        async with trial(timeout_s=4.0) as t:
            await t.until(lambda: t.engine.health().workers == 2)
            await t.all([t.order(n) for n in range(20)])
            await t.all([t.order(n, do="stop" if n == 20 else "nothing", seconds=0.005) for n in range(20, 80)])
            assert set(t.errors) == {20}
            assert isinstance(t.errors[20], HandlerTimeout)
            stopped = next(note for note in t.notes("begin") if note.event == "20")
            beside = [note for note in t.notes("end") if stopped.at < note.at < stopped.at + 3.9]
            assert beside
            assert stopped.worker not in {note.worker for note in beside}
            assert Counter(note.event for note in t.notes("begin")).most_common(1)[0][1] == 1

    asyncio.run(main())


def test_a_worker_suspended_before_a_run_begins_costs_no_attempt(trial: Callable[..., Trial]) -> None:
    async def main() -> None:
        async with trial(workers=1, timeout_s=2.0) as t:
            await t.all([t.order(1)])
            os.kill(t.notes("end")[0].worker, signal.SIGSTOP)
            await t.all([t.order(2), t.order(3)])
            assert not t.errors
            assert t.engine.health().restarted == 1

    asyncio.run(main())


def test_work_that_waits_behind_a_slow_run_is_recalled(trial: Callable[..., Trial]) -> None:
    async def main() -> None:
        async with trial(timeout_s=None) as t:
            await t.until(lambda: t.engine.health().workers == 2)
            await t.all([t.order(n) for n in range(200)])  # so fast that a worker then gets much work at once
            t.submit([t.order(n, seconds=5.0 if n == 200 else 0.0) for n in range(200, 400)])
            await t.until(lambda: len(t.ended) == 399)
            assert 200 not in [first(each.work).position for each in t.ended]
            await t.all()
            assert Counter(note.event for note in t.notes("begin")).most_common(1)[0][1] == 1

    asyncio.run(main())


def test_a_worker_begins_nothing_after_sure_until_even_if_its_parent_is_blocked(
    trial: Callable[..., Trial],
) -> None:
    async def main() -> None:
        async with trial(workers=1, concurrency=64) as t:
            await t.all([t.order(n) for n in range(200)])  # so fast that a worker then gets much work at once
            t.sure_until = now() + 3.0
            t.submit([t.order(n, seconds=3.5 if n == 200 else 0.0) for n in range(200, 220)])
            time.sleep(5.0)  # noqa: ASYNC251  # the engine cannot recall work meanwhile
            assert [note.event for note in t.notes("begin") if int(note.event) >= 200] == ["200"]
            ended = await t.all()
            assert {first(each.work).position for each in ended if each.cancelled} == set(range(201, 220))
            t.sure_until = math.inf
            await t.all([t.order(300)])
            assert not t.errors

    asyncio.run(main())


def test_many_large_events_reach_the_workers(trial: Callable[..., Trial]) -> None:
    async def main() -> None:
        async with trial(concurrency=64) as t:
            await t.all([t.order(n, filling=os.urandom(750_000)) for n in range(64)])
            assert not t.errors

    asyncio.run(main())


@pytest.mark.slow
def test_a_huge_event_arrives_and_a_huge_error_is_cut(trial: Callable[..., Trial]) -> None:
    async def main() -> None:
        async with trial(workers=1) as t:
            await t.all([t.delivery(1, b'"' + b"x" * 50_000_000 + b'"'), t.order(2)])
            assert set(t.errors) == {1}
            assert len(str(t.errors[1])) < 20_000

    asyncio.run(main())


def test_a_handler_that_cannot_be_imported_ends_the_engine_with_the_reason(
    trial: Callable[..., Trial], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with trial("tests.engines.broken:handle") as t:
            t.submit([t.order(1), t.order(2)])
            await t.until(lambda: t.engine.failure is not None)
            await t.until(lambda: t.calls > 0)
            t.check()
            assert isinstance(t.engine.failure, BadHandler)
            assert "no database, no module" in str(t.engine.failure)
            assert "tests.engines.broken:handle" in str(t.engine.failure)
            await t.all([t.order(3)])
            assert all(each.cancelled for each in t.ended)

    asyncio.run(main())


@pytest.mark.slow
def test_a_handler_name_that_does_not_exist_ends_the_engine(trial: Callable[..., Trial]) -> None:
    async def main() -> None:
        async with trial("tests.engines.programs:no_such") as t:
            await t.until(lambda: t.engine.failure is not None)
            assert "no_such" in str(t.engine.failure)

    asyncio.run(main())


def test_signals_for_the_parent_do_not_end_a_worker(trial: Callable[..., Trial]) -> None:
    async def main() -> None:
        async with trial(workers=1) as t:
            t.submit([t.order(1, seconds=0.5)])
            await t.until(lambda: len(t.notes("begin")) == 1)
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(t.notes("begin")[0].worker, number)
            await t.all()
            assert not t.errors

    asyncio.run(main())


def test_close_leaves_no_process_behind(trial: Callable[..., Trial]) -> None:
    async def main() -> None:
        async with trial() as t:
            t.submit([t.order(n, seconds=30) for n in range(2)])
            await t.until(lambda: len(t.notes("begin")) == 2)
            begun = time.monotonic()
        assert time.monotonic() - begun < 20, "close waited for a running event"

    asyncio.run(main())


@pytest.mark.slow
def test_workers_that_are_killed_while_idle_are_replaced(trial: Callable[..., Trial]) -> None:
    async def main() -> None:
        async with trial(workers=1) as t:
            for n in range(6):
                await t.all([t.order(n)])
                os.kill(t.notes("end")[-1].worker, signal.SIGKILL)
            await t.all([t.order(6)])
            assert not any(isinstance(error, WorkerDied) for error in t.errors.values())
            assert t.engine.failure is None

    asyncio.run(main())


def test_nothing_starts_between_a_recall_and_its_answer() -> None:
    """If a run ended in between, the engine would count the returned work as ended too, and lose it."""
    ours, theirs = socket.socketpair()
    worker = ChildWorker(theirs, wire.StatusPage(wire.new_page()))
    worker._inbox.extend((number, cast("Delivery", None), math.inf) for number in range(3))
    reading, writing = os.pipe()  # never closed: a closed leash ends the process
    sending, may_send = threading.Event(), threading.Event()
    sent: list[wire.Up] = []

    def send(message: wire.Up) -> None:
        sending.set()
        assert may_send.wait(10)
        sent.append(message)

    worker._send = send  # type: ignore[method-assign]
    threading.Thread(target=worker.watch, args=(reading,), daemon=True).start()
    os.write(writing, b"r")
    assert sending.wait(10)
    worker._inbox.append((3, cast("Delivery", None), math.inf))  # as if the engine had just sent it
    started: list[object] = []
    runner = threading.Thread(target=lambda: started.append(worker._next()))
    runner.start()
    runner.join(0.2)
    assert started == [], "it started work before it sent the answer to the recall"
    may_send.set()
    runner.join(10)
    assert sent == [wire.Returned([0, 1, 2])]
    assert cast("tuple[int, object, float]", started[0])[0] == 3
    ours.close()
