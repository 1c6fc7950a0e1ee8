"""What a running application reports: a log line, metrics, readings by partition, readiness."""

import asyncio
import contextlib
import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onward import GiveUp, Onward, Retry
from onward.brokers.sqlite.subscription import SqliteSubscription
from onward.errors import BrokerError
from onward.observe.health import line, report
from tests.observe.readings import reading
from tests.test_app import until

READING = reading()


def test_the_log_line_has_counts_and_the_oldest_run() -> None:
    assert line([READING]) == "12,345 events done, 3 retried, 0 dead; 12 running, the oldest for 0.4 s"
    idle = msgspec.structs.replace(READING, busy=0, oldest_running_s=None, restarted=2)
    assert line([idle]) == "12,345 events done, 3 retried, 0 dead; 0 running; 2 workers restarted"
    one = msgspec.structs.replace(idle, done=1, restarted=1)
    assert line([one]) == "1 event done, 3 retried, 0 dead; 0 running; 1 worker restarted"


def test_the_log_line_has_the_sums_of_all_handlers() -> None:
    other = msgspec.structs.replace(READING, group="mail", done=5, busy=1, oldest_running_s=2.0)
    assert line([READING, other]) == (
        "12,350 events done (orders for billing 12,345, orders for mail 5), 6 retried, 0 dead; 13 running, "
        "the oldest for 2.0 s"
    )
    assert "orders for billing 12,345, 2 more)" in line([READING] * 7)


def test_a_line_is_logged_only_if_something_happened(caplog: pytest.LogCaptureFixture) -> None:
    idle = msgspec.structs.replace(READING, busy=0, oldest_running_s=None)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(report(lambda: [idle], every_s=0.01), 0.2)

    with caplog.at_level(logging.INFO, "onward"):
        asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == [line([idle])]


def test_a_running_application_shows_each_handler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onward")
    app = Onward(f"sqlite:///{tmp_path}/shop.db")

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    @app.handler("orders", group="shipping")
    def ship(order: dict[str, int]) -> None: ...

    async def main() -> str:
        async with app:
            await app.publish_many("orders", [("k", {"n": n}) for n in range(5)])
            running = asyncio.create_task(app.run())
            async with asyncio.timeout(60):
                while [reading.done for reading in app.readings()] != [5, 5]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            text = app.metrics()
            app.stop()
            await running
            return text

    text = asyncio.run(main())
    assert 'onward_events_done_total{group="billing",topic="orders"} 5.0' in text
    assert 'onward_events_done_total{group="shipping",topic="orders"} 5.0' in text
    assert app.readings() == []
    stopped = [each.getMessage() for each in caplog.records if each.getMessage().startswith("stopped")]
    assert stopped == ["stopped: 10 events done (orders for billing 5, orders for shipping 5), 0 retried, 0 dead"]


def test_the_metrics_show_how_far_behind_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.flow.consumer._LAG_EVERY_S", 0.05)
    app = Onward(f"sqlite:///{tmp_path}/shop.db", partitions=1, max_in_flight=10, receive_batch=5, dead_check_s=0.05)
    go = asyncio.Event()

    @app.handler("orders", group="billing", concurrency=4, retry=Retry(attempts=2, first_delay_s=600, max_delay_s=600))
    async def bill(order: dict[str, str]) -> None:
        if order["do"] == "die":
            raise GiveUp("no")
        if order["do"] == "park":
            raise ValueError("later")
        await go.wait()

    async def scenario() -> None:
        orders = [("a", "die"), ("b", "park"), ("b", "held"), ("c", "block"), *[(f"d-{n}", "wait") for n in range(60)]]
        async with app:
            await app.publish_many("orders", [(key, {"do": do}) for key, do in orders])
            running = asyncio.create_task(app.run())
            labels = '{group="billing",topic="orders"}'
            expected = ["dead_letters", "parked_events", "parked_keys"]
            values = {"dead_letters": 1.0, "parked_events": 2.0, "parked_keys": 1.0}
            async with asyncio.timeout(60):
                while not all(f"onward_{name}{labels} {values[name]}" in app.metrics() for name in expected):
                    assert not running.done()
                    await asyncio.wait([running], timeout=0.02)
                while not (app.readings()[0].undelivered or 0) > 0:
                    await asyncio.wait([running], timeout=0.02)
            (reading,) = app.readings()
            assert reading.open > 0
            assert reading.oldest_open_s is not None
            assert reading.oldest_open_s > reading.blocked_s > 0
            assert reading.gap == 0
            go.set()
            async with asyncio.timeout(60):
                while app.readings()[0].undelivered != 0 or app.readings()[0].open:
                    await asyncio.wait([running], timeout=0.02)
            app.stop()
            await running

    asyncio.run(scenario())


def test_readings_have_the_numbers_of_each_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.flow.consumer._LAG_EVERY_S", 0.05)
    app = Onward(f"sqlite:///{tmp_path}/shop.db", partitions=2)
    go, done = asyncio.Event(), 0

    @app.handler("orders", group="billing", concurrency=4)
    async def bill(order: dict[str, bool]) -> None:
        nonlocal done
        if order["block"]:
            await go.wait()
        done += 1

    async def main() -> None:
        async with app:
            await app.publish("orders", {"block": True}, key="stuck")
            await app.publish_many("orders", [("stuck", {"block": False})] * 2)
            await app.publish_many("orders", [(f"k-{n}", {"block": False}) for n in range(100)])
            async with app.running():
                await until(lambda: done == 100)
                await until(lambda: [part.undelivered for part in app.readings()[0].partitions] == [0, 0])
                (reading,) = app.readings()
                blocked, free = sorted(reading.partitions, key=lambda part: part.blocking_position is None)
                assert (blocked.open, blocked.running, blocked.blocking_state) == (3, 1, "running")
                assert blocked.gap > 10
                assert blocked.lag == blocked.open + blocked.gap
                assert blocked.blocked_s > 0
                assert (free.open, free.gap, free.lag, free.blocked_s) == (0, 0, 0, 0)
                label = f'{{group="billing",partition="{blocked.partition}",topic="orders"}}'
                assert f"onward_partition_lag{label} {blocked.lag}.0" in app.metrics()
                go.set()
                await until(lambda: all(part.lag == 0 for part in app.readings()[0].partitions))

    asyncio.run(main())


def test_a_partition_that_is_stuck_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.observe.standstill.LEAST_S", 0.5)
    app = Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=1.0)
    go = threading.Event()

    @app.handler("orders", group="billing", timeout_s=0.2, retry=Retry(attempts=1, max_delay_s=0.1, first_delay_s=0.1))
    def bill(order: dict[str, int]) -> None:
        go.wait(60)  # a thread cannot be ended

    async def main() -> None:
        async with app.running():
            assert app.health().ready
            await app.publish("orders", {"n": 1}, key="k")
            await until(lambda: not app.health().ready)
            (trouble,) = app.health().troubles
            assert "bill: orders/" in trouble
            assert "is stuck at position" in trouble
            go.set()
            await until(lambda: app.health().ready)

    asyncio.run(main())


def test_a_receive_that_fails_is_not_ready_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onward.flow.consumer._RECEIVE_WAIT_S", 0.02)
    app, failed, done = Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=1.0), 0, 0

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None:
        nonlocal done
        done += 1

    async def main() -> None:
        nonlocal failed
        async with app.running():
            await until(lambda: app.health().ready)
            kind = SqliteSubscription
            with monkeypatch.context() as patched:

                async def refuse(*_: Any) -> None:
                    nonlocal failed
                    failed += 1
                    raise BrokerError("page 7 is damaged")

                patched.setattr(kind, "receive", refuse)
                await until(lambda: failed > 5)
                assert app.health().troubles == ("page 7 is damaged",)
            await app.publish("orders", {"n": 1}, key="k")
            await until(lambda: done == 1 and app.health().ready)

    asyncio.run(main())
    assert caplog.text.count("receiving failed, trying again until it succeeds: page 7 is damaged") == 1


def test_an_application_that_has_not_joined_its_groups_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, go = Onward(f"sqlite:///{tmp_path}/shop.db"), asyncio.Event()

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    async def main() -> None:
        async with app:
            subscribe = app.broker.subscribe

            async def slowly(*topics: Any, **options: Any) -> Any:
                await go.wait()
                return await subscribe(*topics, **options)

            monkeypatch.setattr(app.broker, "subscribe", slowly)
            running = asyncio.create_task(app.run())
            await until(lambda: app.health().troubles == ("the handlers are starting",))
            go.set()
            await until(lambda: app.health().ready)
            app.stop()
            await running

    asyncio.run(main())


def test_an_application_that_stops_is_not_ready(tmp_path: Path) -> None:
    app, began = Onward(f"sqlite:///{tmp_path}/shop.db"), asyncio.Event()

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None:
        began.set()
        await asyncio.sleep(0.3)

    async def main() -> None:
        assert app.health().troubles == ("no handler runs",)
        async with app.running():
            await app.publish("orders", {"n": 1}, key="k")
            await began.wait()
            app.stop()
            assert app.health().troubles == ("the handlers are stopping",)
            await until(lambda: not app.readings())

    asyncio.run(main())


def test_a_trouble_with_characters_that_cannot_be_encoded_can_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db")

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    async def main() -> None:
        async with app.running():
            monkeypatch.setattr("onward.flow.consumer.Consumer.troubles", ["half \ud83d"])
            assert msgspec.json.encode(app.health()) == rb'{"ready":false,"troubles":["half \\ud83d"]}'

    asyncio.run(main())


def test_ownership_that_is_not_renewed_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.flow.consumer._UNSURE_S", 0.1)
    app = Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=0.5)

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    async def main() -> None:
        async with app.running():
            await until(lambda: app.health().ready and bool(app.readings()[0].partitions))
            with contextlib.closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")  # like a program that does not use our lock file
                await until(lambda: any("ownership has been uncertain" in each for each in app.health().troubles))
            await until(lambda: app.health().ready)

    asyncio.run(main())
