"""The engine suite: one scenario for each promise of onward.engines.base, the same for all engines.

class TestMyEngine(EngineSuite):
    style = "async def"

    @pytest.fixture
    def engine_of(self):
        return lambda handler, **options: MyEngine(bind(handler, batch=options.pop("batch")), **options)
"""

import asyncio
import logging
import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import pytest

from onward.engines.base import Ended, Engine, Work
from onward.errors import GiveUp, HandlerTimeout, RemoteError, RetryLater, Skip, Undecodable, WorkerDied, kind_name
from onward.event import Delivery, Event, Partition
from onward.failure.retry import Retry
from onward.testing import engine_handlers as handlers
from onward.testing.engine_handlers import Note, Order

Style = Literal["def", "async def"]
EngineOf = Callable[..., Engine]
"""Called with a handler, `concurrency`, `timeout_s` and `batch` (True: the handler takes lists)."""

LIMIT_S = 60.0
LONG_S = 2.0  # longer than a busy machine delays this process, so all short runs end before
_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Trial:
    """A running engine, the runs that it reported as ended, and the log that the handlers write."""

    def __init__(self, engine: Engine, log: Path) -> None:
        self.engine = engine
        self.log = log
        self.ended: list[Ended] = []
        self.calls = 0
        self.lost: set[int] = set()  # positions that may no longer start
        self.sure_until = math.inf  # no work may start after this time
        self._submitted: list[Work] = []
        self._submitting = False

    async def __aenter__(self) -> Self:
        self._thread = threading.get_ident()
        self.engine.start(self._collect, self._may_start_until)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    def _collect(self, ended: Sequence[Ended]) -> None:
        assert threading.get_ident() == self._thread, "reported outside the event loop"
        assert not self._submitting, "reported from inside submit"
        self.ended.extend(ended)
        self.calls += 1

    def _may_start_until(self, work: Work) -> float:
        return 0.0 if first(work).position in self.lost else self.sure_until

    def order(self, number: int, **fields: Any) -> Delivery:
        return self.delivery(number, msgspec.json.encode(Order(log=str(self.log), **fields)))

    def delivery(self, number: int, value: bytes) -> Delivery:
        headers = {"traceparent": f"00-{_TRACE}-00f067aa0ba902b7-01"}
        event = Event(str(number), "orders", f"c-{number}", value, headers)
        return Delivery(event, Partition("orders", 3), number, 1, 2, 77)

    def submit(self, works: Sequence[Work]) -> None:
        self._submitted.extend(works)
        self._submitting = True
        self.engine.submit(works)
        self._submitting = False

    async def all(self, works: Sequence[Work] = ()) -> list[Ended]:
        """Submit these, wait until all submitted work has ended, and check that each ended once."""
        self.submit(works)
        await self.until(lambda: len(self.ended) >= len(self._submitted))
        assert await self.engine.drain(LIMIT_S)
        self.check()
        return self.ended

    def check(self) -> None:
        assert Counter(id(each.work) for each in self.ended) == Counter(map(id, self._submitted)), (
            "some work did not end exactly once"
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def notes(self, step: str) -> list[Note]:
        return [note for note in handlers.notes(self.log) if note.step == step]

    @property
    def errors(self) -> dict[int, BaseException]:
        return {first(each.work).position: each.error for each in self.ended if each.error is not None}


def first(work: Work) -> Delivery:
    return work if isinstance(work, Delivery) else work[0]


class EngineSuite:
    """A subclass sets the style of the handlers and what its engine can do. Its fixture `engine_of` builds one."""

    style: Style = "async def"
    ends_runs = True  # False: the engine cannot end a run that exceeds its timeout, only wait for it
    has_processes = False  # True: workers are processes, so a handler can kill its worker

    @pytest.fixture
    def engine_of(self) -> EngineOf:
        raise NotImplementedError

    @pytest.fixture
    def trial(self, engine_of: EngineOf, tmp_path: Path) -> Callable[..., Trial]:
        def make(*, batch: bool = False, concurrency: int = 4, timeout_s: float | None = 30.0) -> Trial:
            name = ("plain" if self.style == "def" else "suspending") + ("_batch" if batch else "")
            engine = engine_of(getattr(handlers, name), batch=batch, concurrency=concurrency, timeout_s=timeout_s)
            return Trial(engine, tmp_path / "log")

        return make

    def test_all_work_ends_once_and_is_reported_in_lists(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial() as t, asyncio.timeout(LIMIT_S):
                rounds, calls = 0, 200
                while calls >= 150:  # on a busy machine more events are reported alone: look at another round
                    before = t.calls
                    ended = await t.all([t.order(200 * rounds + n) for n in range(200)])
                    assert not t.errors
                    assert not any(each.cancelled for each in ended)
                    rounds, calls = rounds + 1, t.calls - before
                    assert len(t.notes("end")) == 200 * rounds

        asyncio.run(main())

    def test_the_number_of_concurrent_runs_reaches_the_limit_and_never_exceeds_it(
        self, trial: Callable[..., Trial]
    ) -> None:
        async def main() -> None:
            async with trial(concurrency=2) as t:
                peak, number = 0, 0
                async with asyncio.timeout(LIMIT_S):
                    while peak < 2:  # workers may start one after the other
                        await t.all([t.order(number + n, seconds=0.02) for n in range(6)])
                        number += 6
                        peak = _peak(t)
                await t.all([t.order(number + n, seconds=0.02) for n in range(12)])
                assert _peak(t) == 2

        asyncio.run(main())

    def test_waiting_work_starts_in_order(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial(concurrency=1) as t:
                t.submit([t.order(n) for n in range(30)])
                await t.all([t.order(n) for n in range(30, 60)])
                assert [int(note.event) for note in t.notes("begin")] == list(range(60))

        asyncio.run(main())

    def test_work_that_may_no_longer_start_ends_as_cancelled(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial(concurrency=2) as t:
                t.submit([t.order(n, seconds=LONG_S) for n in range(2)])
                await t.until(lambda: len(t.notes("begin")) == 2)
                t.submit([t.order(n) for n in range(2, 40)])
                t.lost = set(range(2, 40, 3))
                ended = await t.all([t.order(n) for n in range(40, 50)])
                assert {first(each.work).position for each in ended if each.cancelled} == t.lost
                assert not t.errors
                assert {int(note.event) for note in t.notes("begin")} == set(range(50)) - t.lost

        asyncio.run(main())

    def test_an_exception_of_any_kind_ends_only_its_own_event(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial() as t:
                names = list(handlers.ERRORS)
                good = [t.order(n) for n in range(len(names), 30)]
                await t.all([*(t.order(n, do="raise", what=name) for n, name in enumerate(names)), *good])
                assert set(t.errors) == set(range(len(names)))
                for number, name in enumerate(names):
                    assert name in kinds(t.errors[number])

        asyncio.run(main())

    def test_an_error_keeps_its_class_its_text_and_its_traceback(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial() as t:
                await t.all([t.order(1, do="raise", what="Refused")])
                error = t.errors[1]
                assert str(error) == "not today"
                assert "Refused('not today')" in repr(error)
                assert "_raise" in trace(error)
                for policy, again in ((Retry(on=(ValueError,)), True), (Retry(give_up_on=(handlers.Refused,)), False)):
                    assert (policy.delay_s(1, error, lambda: 0.0) is not None) == again
                assert Retry(on=(OSError,)).delay_s(1, error, lambda: 0.0) is None

        asyncio.run(main())

    def test_an_undecodable_value_is_reported_as_undecodable(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial() as t:
                await t.all([t.delivery(1, b"\xff"), t.order(2)])
                assert isinstance(t.errors[1], Undecodable)
                assert set(t.errors) == {1}

        asyncio.run(main())

    def test_retry_later_give_up_and_skip_are_reported_unchanged(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial() as t:
                await t.all(
                    [t.order(n, do="raise", what=what) for n, what in enumerate(("RetryLater", "GiveUp", "Skip"))]
                )
                later, give_up, skip = (t.errors[n] for n in range(3))
                assert (type(later), type(give_up), type(skip)) == (RetryLater, GiveUp, Skip)
                assert isinstance(later, RetryLater)
                assert (later.after_s, str(later), str(give_up)) == (7.5, "closed until noon", "no such customer")

        asyncio.run(main())

    def test_an_error_text_that_cannot_be_encoded_changes_no_decision(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial() as t:
                names = list(handlers.HALVES)
                await t.all([t.order(n, do="raise half", what=name) for n, name in enumerate(names)])
                for number, name in enumerate(names):
                    assert name in kinds(t.errors[number])
                    assert name == "Refused" or type(t.errors[number]).__name__ == name
                assert t.engine.health().restarted == 0

        asyncio.run(main())

    def test_a_child_process_that_a_handler_forks_ends_with_the_call(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial() as t:
                await t.all([t.order(n, do="fork" if n == 0 else "nothing") for n in range(6)])
                assert [note.text for note in t.notes("forked")] == ["7"]
                assert len(t.notes("end")) == 6

        asyncio.run(main())

    def test_a_handler_that_cancels_its_own_task_ends_only_its_own_event(self, trial: Callable[..., Trial]) -> None:
        if self.style == "def":
            pytest.skip("a def handler has no task")

        async def main() -> None:
            async with trial(concurrency=2) as t:
                await t.all([t.order(n, do="nothing" if n % 3 else "cancel", seconds=0.001) for n in range(30)])
                assert set(t.errors) == set(range(0, 30, 3))
                assert all("Refused" in kinds(error) for error in t.errors.values())

        asyncio.run(main())

    def test_each_run_has_a_fresh_context(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial() as t:
                await t.all([t.order(n, do="mark", seconds=0.001) for n in range(20)])
                assert {note.text for note in t.notes("context")} == {"nothing"}

        asyncio.run(main())

    def test_a_handler_can_read_the_facts_of_its_run(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial(timeout_s=20.0) as t:
                assert not (await t.all([t.order(5, do="ask")]))[0].error
                (note,) = t.notes("current")
                *facts, left_s, batch = msgspec.json.decode(note.text)
                assert facts == ["5", 2, ["orders", 3], 5, 77, _TRACE]
                assert 15 < left_s <= 20
                assert batch == 1

        asyncio.run(main())

    def test_a_batch_is_one_call(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial(batch=True) as t:
                good = tuple(t.order(n, do="ask") for n in range(3))
                bad = tuple(t.order(n, do="raise", what="Refused") for n in range(3, 6))
                await t.all([good, bad])
                assert set(t.errors) == {3}
                assert [msgspec.json.decode(note.text)[-1] for note in t.notes("current")] == [3, 3, 3]

        asyncio.run(main())

    def test_large_events_are_handled(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial() as t:
                await t.all([t.order(n, filling=b"\x00\xff" * 600_000) for n in range(8)])
                assert not t.errors

        asyncio.run(main())

    def test_a_run_that_exceeds_its_timeout_fails_and_others_do_not(
        self, trial: Callable[..., Trial], caplog: pytest.LogCaptureFixture
    ) -> None:
        async def main() -> None:
            async with trial(timeout_s=LONG_S, concurrency=2) as t:
                with caplog.at_level(logging.WARNING, "onward"):
                    await t.all([t.order(n, seconds=2 * LONG_S if n == 4 else 0.001) for n in range(30)])
                assert set(t.errors) == {4}
                assert isinstance(t.errors[4], HandlerTimeout)
                assert f"timeout_s={LONG_S:g}, at {handlers.__file__}:" in str(t.errors[4])
                assert f" in {'plain' if self.style == 'def' else 'suspending'}" in str(t.errors[4])
                started = next(note.at for note in t.notes("begin") if note.event == "4")
                finished = [note for note in t.notes("end") if note.event == "4"]
                if self.ends_runs:
                    assert not finished
                else:
                    assert finished[0].at - started > 1.9 * LONG_S
                    assert first(t.ended[-1].work).position == 4, "it was reported while its thread still ran"
                    assert "orders/3 position 4 key 'c-4' has run longer" in caplog.text
                    assert f", at {handlers.__file__}:" in caplog.text

        asyncio.run(main())

    def test_a_slow_run_does_not_delay_the_others(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial(concurrency=2) as t:
                await t.all([t.order(n, seconds=0.002) for n in range(20)])
                t.submit([t.order(n, seconds=LONG_S if n == 100 else 0.002) for n in range(100, 140)])
                await t.until(lambda: len(t.ended) == 59)
                assert 100 not in [first(each.work).position for each in t.ended]
                await t.all()

        asyncio.run(main())

    def test_health_reports_the_busy_workers_and_the_age_of_the_oldest_run(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial(concurrency=2) as t:
                await t.all([t.order(0)])
                await t.until(lambda: t.engine.health().busy == 0)
                assert t.engine.health().oldest_running_s is None
                t.submit([t.order(n, seconds=LONG_S) for n in (1, 2)])
                await t.until(lambda: len(t.notes("begin")) == 3)
                await asyncio.sleep(0.1)
                health = t.engine.health()
                assert (health.workers, health.busy, health.restarted) == (2, 2, 0)
                assert health.oldest_running_s is not None
                assert 0.1 <= health.oldest_running_s < LIMIT_S
                await t.all()

        asyncio.run(main())

    def test_drain_returns_false_at_its_deadline(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial() as t:
                t.submit([t.order(n, seconds=LONG_S) for n in range(3)])
                assert not await t.engine.drain(0.05)
                assert await t.engine.drain(LIMIT_S)
                assert len(t.ended) == 3

        asyncio.run(main())

    def test_close_ends_all_work_as_cancelled(self, trial: Callable[..., Trial]) -> None:
        async def main() -> None:
            async with trial(concurrency=2) as t:
                t.submit([t.order(n, seconds=5.0) for n in range(20)])
                await t.until(lambda: len(t.notes("begin")) == 2)
                await t.engine.close()
                await t.engine.close()
                t.check()
                assert all(each.cancelled and each.error is None for each in t.ended)
                await t.all([t.order(100)])
                assert t.ended[-1].cancelled
                assert t.engine.failure is None

        asyncio.run(main())

    def test_a_worker_that_dies_ends_only_the_run_that_it_had_begun(self, trial: Callable[..., Trial]) -> None:
        if not self.has_processes:
            pytest.skip("the workers of this engine are not processes")

        async def main() -> None:
            async with trial(concurrency=2) as t:
                await t.all([t.order(n) for n in range(40)])
                ways = {55: "SIGKILL", 70: "exit", 85: "segfault"}
                deadly = {n: {"do": "die", "what": way} for n, way in ways.items()}
                await t.all([t.order(n, **deadly.get(n, {})) for n in range(40, 100)])
                for n, words in ((55, "SIGKILL"), (70, "exited with 3"), (85, "SIGSEGV")):
                    assert isinstance(t.errors[n], WorkerDied)
                    assert words in str(t.errors[n])
                assert set(t.errors) == set(ways)
                runs = Counter(note.event for note in t.notes("begin"))
                assert runs.most_common(1)[0][1] == 1, "another event ran twice"
                assert t.engine.health().restarted == 3

        asyncio.run(main())


def _peak(t: Trial) -> int:
    """The largest number of runs at the same time."""
    steps = sorted([(n.at, 1) for n in t.notes("begin")] + [(n.at, -1) for n in t.notes("end")])
    return max(accumulate(change for _, change in steps))


def kinds(error: BaseException) -> str:
    """The names of an error's class and its bases."""
    names = error.kinds if isinstance(error, RemoteError) else map(kind_name, type(error).__mro__)
    return " ".join(names)


def trace(error: BaseException) -> str:
    return error.trace if isinstance(error, RemoteError) else "".join(traceback.format_exception(error))
