import asyncio
import logging
from pathlib import Path

import pytest

from onward import Onward, Retry, context
from onward.event import Delivery, Event, Partition

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def delivery(n: int, **headers: str) -> Delivery:
    return Delivery(Event(f"e-{n}", "orders", "c-1", b"", headers), Partition("orders", 2), n, 1, 3, 9)


def test_outside_of_a_handler_there_is_no_run() -> None:
    with pytest.raises(LookupError, match="no handler runs here"):
        context.current()


def test_log_records_carry_the_facts_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def handler(work: Delivery) -> None:
        context.current().log.info("charged %d", 5, extra={"amount": 5})

    with caplog.at_level(logging.INFO, "onward.handler"):
        context.enter(handler, delivery(4, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01"), None)
    (record,) = caplog.records
    facts = {name: getattr(record, name) for name in ("topic", "partition", "position", "key", "event_id", "attempt")}
    assert facts == {"topic": "orders", "partition": 2, "position": 4, "key": "c-1", "event_id": "e-4", "attempt": 3}
    assert (record.getMessage(), record.amount, record.trace_id) == ("charged 5", 5, TRACE)  # type: ignore[attr-defined]


def test_the_run_of_a_batch_describes_its_first_event() -> None:
    runs: list[context.Run] = []
    context.enter(lambda work: runs.append(context.current()), (delivery(4), delivery(5)), 7.5)
    (run,) = runs
    assert (run.event.id, run.position, run.fence, run.deadline) == ("e-4", 4, 9, 7.5)
    assert [each.position for each in run.batch] == [4, 5]
    assert run.trace_id is None


@pytest.mark.parametrize("header", ["", "nonsense", "00-short"])
def test_a_malformed_trace_header_gives_no_trace_id(header: str) -> None:
    runs: list[context.Run] = []
    context.enter(lambda work: runs.append(context.current()), delivery(1, traceparent=header), None)
    assert runs[0].trace_id is None


def test_an_event_that_was_parked_has_its_fence(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db", park_after_s=0.0)
    runs: list[context.Run] = []

    @app.handler("orders", retry=Retry(attempts=2, first_delay_s=0.05, jitter=0))
    async def bill(order: dict[str, int]) -> None:
        runs.append(context.current())
        if len(runs) == 1:
            raise OSError("not now")
        app.stop()

    async def main() -> None:
        async with app, asyncio.timeout(30):
            await app.publish("orders", {"n": 1}, key="k")
            await app.run()

    asyncio.run(main())
    assert [(run.attempt, run.fence) for run in runs] == [(1, 1), (2, 1)]
