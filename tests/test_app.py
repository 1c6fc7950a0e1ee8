"""The application through its public API, on SQLite."""

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onward import Event, Onward, Retry
from onward.brokers import Scheme, open_broker
from onward.brokers.base import AsideRecord, Filter, State
from onward.errors import (
    BadHandler,
    BadName,
    BadSetting,
    BrokerError,
    Closed,
    ConfigError,
    MissingExtra,
    PublishError,
    TooLarge,
    UnknownScheme,
    Unserialisable,
)
from onward.payload import decoder


class Order(msgspec.Struct):
    n: int
    bad: bool = False


@pytest.fixture
def app(tmp_path: Path) -> Onward:
    return Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=1.0, takeover_grace_s=0.1, drain_timeout_s=2.0)


async def until(condition: Callable[[], bool], within_s: float = 40.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.01)


async def run_until(app: Onward, condition: Callable[[], bool]) -> None:
    running = asyncio.create_task(app.run())
    try:
        while not condition():
            done, _ = await asyncio.wait([running], timeout=0.01)
            assert not done, running.exception()
    finally:
        app.stop()
        await running


async def dead_letters(app: Onward, group: str) -> list[AsideRecord]:
    async with app:
        return list((await app.broker.aside(group).scan(Filter(), None, 100)).records)


def test_events_are_handled_once_each_in_key_order(app: Onward) -> None:
    seen: dict[str | None, list[int]] = defaultdict(list)

    @app.handler("orders", group="billing")
    async def bill(order: Order, event: Event) -> None:
        await asyncio.sleep(0.001 * (order.n % 3))
        seen[event.key].append(order.n)

    async def main() -> None:
        async with app:
            for n in range(0, 50, 10):
                await app.publish_many("orders", [(f"c-{k}", Order(m)) for m in range(n, n + 10) for k in range(20)])
        await run_until(app, lambda: sum(map(len, seen.values())) >= 1000)

    asyncio.run(main())
    assert dict(seen) == {f"c-{k}": list(range(50)) for k in range(20)}


def test_handled_events_are_not_handled_again_after_a_restart(app: Onward) -> None:
    seen: list[int] = []

    @app.handler("orders", group="billing")
    async def bill(order: Order) -> None:
        seen.append(order.n)

    async def main() -> None:
        async with app:
            await app.publish_many("orders", [("k", Order(n)) for n in range(10)])
        await run_until(app, lambda: len(seen) == 10)
        async with app:
            await app.publish("orders", Order(10), key="k")
        await run_until(app, lambda: len(seen) == 11)

    asyncio.run(main())
    assert seen == list(range(11))


def test_a_failing_event_is_retried_in_place_then_becomes_a_dead_letter_and_its_key_goes_on(app: Onward) -> None:
    tries: list[tuple[str | None, int]] = []

    @app.handler("orders", group="billing", retry=Retry(attempts=3, first_delay_s=0.05, jitter=0))
    async def bill(order: Order, event: Event) -> None:
        tries.append((event.key, order.n))
        if order.bad:
            raise ValueError("no such customer")

    async def main() -> list[AsideRecord]:
        async with app:
            await app.publish_many(
                "orders",
                [("a", Order(1)), ("a", Order(2, bad=True)), ("a", Order(3)), ("b", Order(1)), ("b", Order(2))],
            )
        await run_until(app, lambda: ("a", 3) in tries and ("b", 2) in tries)
        return await dead_letters(app, "billing")

    (letter,) = asyncio.run(main())
    assert [n for key, n in tries if key == "a"] == [1, 2, 2, 2, 3]
    assert tries.index(("b", 2)) < tries.index(("a", 3)), "another key waited for the failing one"
    assert letter.failure is not None
    assert (letter.failure.error, letter.failure.message) == ("ValueError", "no such customer")
    assert letter.failure.attempts == 3
    assert letter.failure.first < letter.failure.last
    assert "raise ValueError" in letter.failure.traceback
    assert letter.failure.handler.endswith("bill")
    assert (letter.event.key, letter.event.value) == ("a", b'{"n":2,"bad":true}')


def test_an_undecodable_event_is_a_dead_letter_at_once_with_its_raw_value(app: Onward) -> None:
    seen: list[int] = []

    @app.handler("orders", group="billing", retry=Retry(attempts=5, first_delay_s=60))
    async def bill(order: Order) -> None:
        seen.append(order.n)

    async def main() -> list[AsideRecord]:
        async with app:
            await app.publish("orders", b"\xff not json", key="a", headers={"from": "legacy"})
            await app.publish("orders", Order(2), key="a")
        await run_until(app, lambda: seen == [2])
        return await dead_letters(app, "billing")

    (letter,) = asyncio.run(main())
    assert letter.event.value == b"\xff not json"
    assert dict(letter.event.headers) == {"from": "legacy"}
    assert letter.failure is not None
    assert letter.failure.reason == "undecodable"


def test_attempts_survive_a_restart(app: Onward) -> None:
    attempts: list[int] = []

    @app.handler("orders", group="billing", retry=Retry(attempts=4, first_delay_s=0.3, factor=1, jitter=0))
    async def bill(order: Order) -> None:
        attempts.append(order.n)
        raise ValueError("always")

    async def main() -> list[AsideRecord]:
        async with app:
            await app.publish("orders", Order(1), key="a")
        await run_until(app, lambda: len(attempts) >= 2)
        await run_until(app, lambda: len(attempts) >= 4)
        return await dead_letters(app, "billing")

    (letter,) = asyncio.run(main())
    assert letter.failure is not None
    assert letter.failure.attempts == 4
    assert len(attempts) == 4


def test_a_handler_that_exceeds_its_time_fails(app: Onward) -> None:
    calls: list[int] = []

    @app.handler("orders", group="billing", timeout_s=0.1, retry=Retry(attempts=2, first_delay_s=0.01))
    async def bill(order: Order) -> None:
        calls.append(order.n)
        if order.n == 1:
            await asyncio.sleep(30)

    async def main() -> list[AsideRecord]:
        async with app:
            await app.publish_many("orders", [("a", Order(1)), ("a", Order(2))])
        await run_until(app, lambda: 2 in calls)
        return await dead_letters(app, "billing")

    (letter,) = asyncio.run(main())
    assert calls == [1, 1, 2]
    assert letter.failure is not None
    assert letter.failure.error == "HandlerTimeout"


def test_a_stop_lets_running_events_end_and_releases_the_rest_without_an_attempt(app: Onward) -> None:
    started: list[int] = []
    ended: list[int] = []

    @app.handler("orders", group="billing", concurrency=3)
    async def bill(order: Order) -> None:
        started.append(order.n)
        await asyncio.sleep(0.2 if order.n < 100 else 30)
        ended.append(order.n)

    async def main() -> None:
        async with app:
            await app.publish_many("orders", [(None, Order(n)) for n in range(9)])
        running = asyncio.create_task(app.run())
        await until(lambda: len(started) >= 3)
        app.stop()
        await running
        assert sorted(started) == sorted(ended)
        assert len(ended) < 9
        await run_until(app, lambda: len(set(ended)) == 9)
        assert len(ended) == 9, "an event ran again after a clean stop"

    asyncio.run(main())


def test_a_stop_logs_the_calls_that_it_cancels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db", drain_timeout_s=0.2)
    started: list[int] = []

    @app.handler("orders", group="billing")
    async def bill(order: Order) -> None:
        started.append(order.n)
        await asyncio.sleep(30)

    async def main() -> None:
        async with app:
            await app.publish_many("orders", [(f"c-{n}", Order(n)) for n in range(3)])
            running = asyncio.create_task(app.run())
            await until(lambda: len(started) == 3)
            app.stop()
            await running

    asyncio.run(main())
    ending = "no attempt is charged, and the next owner runs them again"
    assert f"3 calls still run and are cancelled; {ending}" in caplog.text


def test_a_stop_logs_the_thread_that_it_abandons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db", drain_timeout_s=0.2)
    started, go = threading.Event(), threading.Event()

    @app.handler("orders", group="billing")
    def bill(order: Order) -> None:
        started.set()
        go.wait(30)

    async def main() -> None:
        async with app:
            await app.publish("orders", Order(1), key="c-1")
            running = asyncio.create_task(app.run())
            await until(started.is_set)
            app.stop()
            await running

    try:
        asyncio.run(main())
    finally:
        go.set()
    ending = "no attempt is charged, and the next owner runs it again"
    assert f"1 call still runs and is abandoned; {ending}" in caplog.text


def test_when_settling_fails_readiness_shows_it_and_a_stop_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise BrokerError("the disk is full")

    monkeypatch.setattr("onward.brokers.sqlite.subscription.SqliteSubscription.settle", refuse)
    monkeypatch.setattr("onward.flow.consumer._PATIENCE_S", 0.5)
    app = Onward(f"sqlite:///{tmp_path}/shop.db", drain_timeout_s=0.2)
    done: list[int] = []

    @app.handler("orders", group="billing")
    async def bill(order: Order) -> None:
        done.append(order.n)

    async def main() -> None:
        async with app:
            await app.publish("orders", Order(1), key="c")
            running = asyncio.create_task(app.run())
            await until(lambda: not app.health().ready and bool(done))
            assert app.health().troubles == ("the disk is full",)
            app.stop()
            await asyncio.wait_for(running, 20)

    asyncio.run(main())
    assert caplog.text.count("settling failed") == 1, "one cause was logged more than once"


def test_two_groups_each_handle_everything(app: Onward) -> None:
    billed: list[int] = []
    shipped: list[int] = []

    @app.handler("orders", group="billing")
    async def bill(order: Order) -> None:
        billed.append(order.n)

    @app.handler("orders", group="shipping")
    async def ship(order: Order) -> None:
        shipped.append(order.n)

    async def main() -> None:
        async with app:
            await app.publish_many("orders", [("k", Order(n)) for n in range(20)])
        await run_until(app, lambda: len(billed) == len(shipped) == 20)

    asyncio.run(main())
    assert billed == shipped == list(range(20))


def test_publish_sync_works_from_a_plain_script_and_from_a_thread(app: Onward, tmp_path: Path) -> None:
    seen: list[int] = []

    @app.handler("orders", group="billing")
    async def bill(order: Order) -> None:
        seen.append(order.n)
        if order.n == 1:
            await asyncio.to_thread(app.publish_sync, "orders", Order(2), key="k")
            with pytest.raises(ConfigError, match="await"):
                app.publish_sync("orders", Order(3))

    script = f"""
        from onward import Onward
        app = Onward("sqlite:///{tmp_path}/shop.db")
        app.publish_sync("orders", {{"n": 0}}, key="k")
        app.publish_sync("orders", {{"n": 1}}, key="k")
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(script)], check=True, timeout=60)
    asyncio.run(run_until(app, lambda: len(seen) == 3))
    assert seen == [0, 1, 2]


_PROGRAM = """
import asyncio, sys
from onward import Onward
app = Onward("sqlite:///shop.db", lease_s=1, drain_timeout_s={drain})
@app.handler("orders", group="g")
async def handle(order: dict) -> None:
    print("start", order["n"], flush=True)
    await asyncio.sleep(order["sleep"])
    print("end", order["n"], flush=True)
asyncio.run(app.run())
"""


def _program(folder: Path, drain_s: float, sleep_s: float) -> subprocess.Popen[str]:
    publisher = Onward(f"sqlite:///{folder}/shop.db")

    async def publish() -> None:
        async with publisher:
            await publisher.publish("orders", {"n": 1, "sleep": sleep_s}, key="k")

    asyncio.run(publish())
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(drain=drain_s)], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "start 1\n"
    return program


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_well(tmp_path: Path, number: signal.Signals) -> None:
    with _program(tmp_path, drain_s=10, sleep_s=0.5) as program:
        os.kill(program.pid, number)
        out, _ = program.communicate(timeout=60)
    assert program.returncode == 0
    assert out == "end 1\n"


def test_a_drain_ends_at_its_deadline(tmp_path: Path) -> None:
    with _program(tmp_path, drain_s=0.3, sleep_s=60) as program:
        started = time.monotonic()
        program.terminate()
        program.communicate(timeout=60)
    assert program.returncode == 0
    assert time.monotonic() - started < 30, "it waited for the handler"


def _pending(pid: int, number: signal.Signals) -> bool:
    """Whether the kernel has not delivered the signal to the process yet."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pending,) = [int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")]
    return bool(pending >> (number - 1) & 1)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with _program(tmp_path, drain_s=60, sleep_s=60) as program:
        program.terminate()
        time.sleep(0.5)
        while _pending(program.pid, signal.SIGTERM):
            time.sleep(0.01)  # two pending signals of one kind would be merged
        assert program.poll() is None
        program.terminate()
        program.communicate(timeout=30)
    assert program.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_a_stop_is_bounded_while_another_program_holds_a_transaction(tmp_path: Path) -> None:
    with (
        _program(tmp_path, drain_s=0.3, sleep_s=0.5) as program,
        contextlib.closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None, timeout=30)) as db,
    ):
        db.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        program.terminate()
        program.communicate(timeout=90)
        assert time.monotonic() - started < 45  # before the fix it took twice publish_timeout_s
    assert program.returncode == 0


# -- bad input: an OnwardError before anything is written ----------------------------------------------------------


def test_an_event_that_cannot_be_published_is_refused(app: Onward) -> None:
    async def main() -> None:
        async with app:
            with pytest.raises(Unserialisable):
                await app.publish("orders", object())
            with pytest.raises(TooLarge, match="max_event_bytes"):
                await app.publish("orders", b"x" * 2_000_000)
            with pytest.raises(BadName, match="topic ''"):
                await app.publish("", {})
            with pytest.raises(BadName):
                await app.publish("or ders", {})
            with pytest.raises(BadSetting, match="key 7"):
                await app.publish("orders", {}, key=7)  # type: ignore[arg-type]
            with pytest.raises(BadSetting, match="header"):
                await app.publish("orders", {}, headers={"n": 1})  # type: ignore[dict-item]
            for odd in ([], [("a", "b")], "a", 3):
                with pytest.raises(BadSetting, match=r"headers=.* use a dict"):
                    await app.publish("orders", {}, headers=odd)  # type: ignore[arg-type]
            for name in ("", "ce_id\0x", "a\nb"):
                with pytest.raises(BadSetting, match=re.escape(f"header {name!r}")):
                    await app.publish("orders", {}, headers={name: "forged"})
            with pytest.raises(Unserialisable):
                await app.publish_many("orders", [("a", {"n": 1}), ("a", object())])
            assert not list(await app.broker.groups("orders"))
            member = await app.broker.subscribe(["orders"], group="g", member="m", ordering="key", start="earliest")
            received = [*await member.receive(10, 1 << 20, 0.3), *await member.receive(10, 1 << 20, 0.3)]
            assert not [message for message in received if hasattr(message, "event")]
            await member.close()

    asyncio.run(main())


class Line(msgspec.Struct):
    price: float | None


@pytest.mark.parametrize(
    ("value", "key", "says"),
    [
        ("half \ud83d", None, "a str for topic 'orders' cannot be published: value holds half a surrogate"),
        ({"a": [{"b": "\ud83d"}]}, None, r"value\.a\[0\]\.b holds half a surrogate"),
        ({"\ud83d": 1}, None, "a key of it holds half a surrogate"),
        ({"a": float("nan")}, None, r"a dict for topic 'orders' cannot be published: value\.a is not a finite number"),
        ([None, [Line(None), Line(float("inf"))]], None, r"value\[1\]\[1\]\.price is not a finite number"),
        (b"", "\ud83d", "its key holds half a surrogate"),
    ],
)
def test_a_value_without_bytes_is_refused_with_its_path(app: Onward, value: Any, key: str | None, says: str) -> None:
    async def main() -> None:
        async with app:
            await app.publish("orders", value, key=key)

    with pytest.raises(Unserialisable, match=says):
        asyncio.run(main())


def test_bytes_of_every_kind_are_published_as_they_are(app: Onward) -> None:
    for value in (b"\x00a", bytearray(b"\x00a"), memoryview(b"\x00a"), memoryview(b"-\x00-a-")[1::2]):
        assert app.event("orders", value).value == b"\x00a"
    for kind in (bytes, bytearray, memoryview):
        taken = decoder(kind)(b"\x00a")
        assert (type(taken), taken) == (kind, b"\x00a")


def test_null_is_a_valid_value(app: Onward) -> None:
    for value in ({"a": None}, [None], Line(None), "null", {"null": 1.5}):
        assert app.event("orders", value).value


def test_publishing_while_the_application_is_closed_is_refused(app: Onward) -> None:
    with pytest.raises(Closed, match="async with app"):
        asyncio.run(app.publish("orders", {}))


def test_a_handler_that_cannot_run_is_refused_at_its_declaration(app: Onward) -> None:
    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    with pytest.raises(BadHandler, match=r"bill.*again|again.*bill"):

        @app.handler("orders", group="billing")
        async def again(order: dict[str, int]) -> None: ...

    for wrong in ("a b", ""):
        with pytest.raises(BadName):
            app.handler("orders", group=wrong)(bill)
    choices: list[dict[str, Any]] = [
        {"ordering": "sometimes"},
        {"concurrency": 0},
        {"timeout_s": 0},
        {"engine": "gpu"},
        {"start": "now"},
    ]
    for choice in choices:
        with pytest.raises(BadHandler, match=next(iter(choice))):
            app.handler("orders", group="other", **choice)(bill)
    assert len(app.handlers) == 1


def test_running_without_handlers_is_refused(app: Onward) -> None:
    with pytest.raises(ConfigError, match="no handler"):
        asyncio.run(app.run())


def test_a_url_with_an_unknown_scheme_is_refused_without_showing_its_password() -> None:
    with pytest.raises(UnknownScheme, match="sqlite://"):
        asyncio.run(Onward("mongodb://user:secret@host/db").__aenter__())
    with pytest.raises(UnknownScheme) as raised:
        asyncio.run(Onward("mongodb://user:secret@host/db").__aenter__())
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("sqlite://shop.db", "sqlite:///shop.db"),
        ("sqlite:shop.db", "sqlite:///shop.db"),
        ("shop.db", "sqlite:///shop.db"),
        ("./data/shop.db", "sqlite:///data/shop.db"),
        ("/data/shop.sqlite3", "sqlite:////data/shop.sqlite3"),
        ("sqllite:///shop.db", "sqlite:///shop.db"),
        ("kafak://host:9092", "kafka://host:9092"),
        ("localhost:9092", "kafka://localhost:9092"),
        ("10.0.0.1:9092,b-2:9092,b-3", "kafka://10.0.0.1:9092,b-2:9092,b-3"),
    ],
)
def test_a_url_that_is_nearly_right_gives_a_hint(url: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {re.escape(meant)}\?"):
        asyncio.run(Onward(url).__aenter__())


@pytest.mark.parametrize("url", ["sqlite://user:secret@host/x", "kafak://user:secret@host/x", "host:9092", "sqlite://"])
def test_a_hint_shows_no_password_and_is_not_given_without_reason(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        asyncio.run(Onward(url).__aenter__())
    assert "secret" not in str(raised.value)
    assert "did you mean sqlite" not in str(raised.value)


def test_a_missing_extra_names_its_cure(app: Onward) -> None:
    schemes = {"sqlite": Scheme("onward.brokers.sqlite", "SQLite", needs="no_such_client", extra="kafka")}
    with pytest.raises(MissingExtra, match=r"pip install 'onward\[kafka\]'"):
        asyncio.run(open_broker(app.settings, schemes))


# -- the aside ------------------------------------------------------------------------------------------------------


def test_a_long_retry_parks_its_key_and_its_events_come_back_in_order(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db", park_after_s=0.1, lease_s=1.0, drain_timeout_s=2.0)
    seen: list[tuple[str | None, int]] = []
    failures = 0

    @app.handler("orders", group="billing", retry=Retry(attempts=5, first_delay_s=3.0, factor=1, jitter=0))
    async def bill(order: Order, event: Event) -> None:
        nonlocal failures
        if order.bad and failures < 2:
            failures += 1
            raise ValueError("not yet")
        seen.append((event.key, order.n))

    async def main() -> None:
        async with app:
            await app.publish_many("orders", [("a", Order(0, bad=True)), *[("a", Order(n)) for n in range(1, 5)]])
            await app.publish_many("orders", [("b", Order(n)) for n in range(5)])
            running = asyncio.create_task(run_until(app, lambda: len(seen) == 15))
            aside = app.broker.aside("billing")
            states: list[str] = []
            while states != ["waiting", "held", "held", "held", "held"]:
                states = [record.state.value for record in (await aside.scan(Filter(), None, 100)).records]
            await app.publish_many("orders", [("a", Order(n)) for n in range(5, 10)])
            await running
            assert not (await aside.scan(Filter(), None, 100)).records

    asyncio.run(main())
    assert [n for key, n in seen if key == "a"] == list(range(10))
    assert seen.index(("b", 4)) < seen.index(("a", 0)), "another key waited"


def test_a_parked_key_survives_a_restart(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db", park_after_s=0.1, lease_s=1.0, drain_timeout_s=2.0)
    seen: list[int] = []
    tries: list[int] = []

    @app.handler("orders", group="billing", retry=Retry(attempts=5, first_delay_s=1.0, factor=1, jitter=0))
    async def bill(order: Order) -> None:
        tries.append(order.n)
        if order.n == 0 and len(tries) == 1:
            raise ValueError("not yet")
        seen.append(order.n)

    async def main() -> None:
        async with app:
            await app.publish_many("orders", [("a", Order(n)) for n in range(4)])
        await run_until(app, lambda: 0 in tries)
        await run_until(app, lambda: len(seen) == 4)

    asyncio.run(main())
    assert seen == [0, 1, 2, 3]


def test_a_key_waits_behind_its_dead_event_until_it_is_replayed(app: Onward) -> None:
    seen: list[int] = []
    broken = True

    @app.handler("orders", group="billing", on_dead="hold", retry=Retry(attempts=1))
    async def bill(order: Order) -> None:
        if order.bad and broken:
            raise ValueError("no")
        seen.append(order.n)

    async def main() -> None:
        nonlocal broken
        async with app:
            await app.publish_many("orders", [("a", Order(0, bad=True)), ("a", Order(1)), ("b", Order(7))])
            aside = app.broker.aside("billing")
            running = asyncio.create_task(run_until(app, lambda: 1 in seen))
            await until(lambda: 7 in seen)
            found: Sequence[AsideRecord] = ()
            async with asyncio.timeout(40):
                while len(found) < 2:
                    await asyncio.sleep(0.01)
                    found = (await aside.scan(Filter(), None, 10)).records
            dead, held = found
            assert (dead.state, held.state) == (State.DEAD, State.HELD)
            assert seen == [7]
            broken = False
            assert await aside.move([dead.id], expect=State.DEAD, to=State.WAITING, due=time.time()) == 1
            await running

    asyncio.run(main())
    assert seen == [7, 0, 1]


def test_a_batch_handler_gets_lists_and_one_bad_event_fails_alone(app: Onward) -> None:
    batches: list[list[int]] = []
    done: dict[str | None, list[int]] = defaultdict(list)

    @app.handler("orders", group="billing", batch_size=10, batch_wait_s=0.05, retry=Retry(attempts=1))
    async def bill(orders: list[Order], events: list[Event]) -> None:
        batches.append([order.n for order in orders])
        if any(order.bad for order in orders):
            raise ValueError("one of them is bad")
        for order, event in zip(orders, events, strict=True):
            done[event.key].append(order.n)

    async def main() -> list[AsideRecord]:
        async with app:
            await app.publish_many("orders", [("a", Order(n, bad=n == 13)) for n in range(30)])
        await run_until(app, lambda: sum(map(len, done.values())) == 29)
        return await dead_letters(app, "billing")

    (letter,) = asyncio.run(main())
    assert done == {"a": [n for n in range(30) if n != 13]}
    assert letter.event.value == b'{"n":13,"bad":true}'
    assert max(map(len, batches)) == 10


# -- found by trying to break it --------------------------------------------------------------------------------------


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this exception has no text")


@pytest.mark.parametrize("error", [ValueError("half a pair: \ud83d"), Odd()])
def test_an_error_without_readable_text_still_makes_a_dead_letter(app: Onward, error: Exception) -> None:
    seen: list[int] = []

    @app.handler("orders", group="billing", retry=Retry(attempts=1))
    async def bill(order: Order) -> None:
        if order.bad:
            raise error
        seen.append(order.n)

    async def main() -> list[AsideRecord]:
        async with app:
            await app.publish_many("orders", [("a", Order(0, bad=True)), ("a", Order(1)), ("b", Order(2))])
        await run_until(app, lambda: sorted(seen) == [1, 2])
        return await dead_letters(app, "billing")

    (letter,) = asyncio.run(main())
    assert letter.failure is not None
    assert letter.failure.error == type(error).__qualname__


def test_a_stop_before_the_consumers_start_takes_effect(app: Onward) -> None:
    @app.handler("orders", group="billing")
    async def bill(order: Order) -> None: ...

    async def main() -> None:
        running = asyncio.create_task(app.run())
        app.stop()
        await asyncio.wait_for(running, 10)

    asyncio.run(main())


def test_headers_count_against_the_limits(app: Onward) -> None:
    assert app.event("orders", b"", headers={"a": "b" * 100}).size == 101
    with pytest.raises(TooLarge):
        app.event("orders", b"", headers={"a": "b" * 2_000_000})


def test_publish_sync_works_in_a_forked_child(tmp_path: Path) -> None:
    script = f"""
import os
from onward import Onward
app = Onward("sqlite:///{tmp_path}/shop.db")
app.publish_sync("orders", b"1", key="k")
child = os.fork()
app.publish_sync("orders", b"2", key="k")
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stderr) == (0, "")


def test_a_child_forked_while_the_application_is_open_opens_its_own_broker(tmp_path: Path) -> None:
    script = f"""
import asyncio, os
from onward import Onward
app = Onward("sqlite:///{tmp_path}/shop.db", publish_timeout_s=20)
async def main():
    async with app:
        await app.publish("orders", b"0", key="k")
        child = os.fork()
        if child == 0:
            try:
                app.publish_sync("orders", b"1", key="k")
                os._exit(0)
            finally:
                os._exit(1)
        assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        await app.publish("orders", b"2", key="k")
        found = []
        member = await app.broker.subscribe(["orders"], group="g", member="m", ordering="key", start="earliest")
        while len(found) < 3:
            found += [each.event.value for each in await member.receive(10, 9999, 1.0) if hasattr(each, "event")]
        assert found == [b"0", b"1", b"2"], found
asyncio.run(main())
"""
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stderr) == (0, "")


def test_publish_sync_does_not_wait_for_ever_for_a_blocked_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.door._LOOP_PATIENCE_S", 0.1)
    app, over = Onward(f"sqlite:///{tmp_path}/shop.db", publish_timeout_s=0.1), threading.Event()

    def publish() -> None:
        try:
            app.publish_sync("orders", b"1", key="k")
        finally:
            over.set()

    async def main() -> None:
        async with app:
            publishing = asyncio.ensure_future(asyncio.to_thread(publish))
            await asyncio.sleep(0)
            assert over.wait(40)  # blocks the event loop, as a bad handler does
            with pytest.raises(PublishError, match="event loop is blocked") as raised:
                await publishing
            assert [event.value for event in raised.value.unknown] == [b"1"]

    asyncio.run(main())


_SLEEPER = """
import asyncio, sys, time
from onward import Event, Onward, Retry
app = Onward("sqlite:///shop.db", lease_s=1.0, takeover_grace_s=0.1, partitions=4)
tried = set()
@app.handler("orders", group="g", timeout_s=None, retry=Retry(attempts=5, first_delay_s=1.5, jitter=0))
async def handle(event: Event) -> None:
    if event.key == "retry" and event.id not in tried:
        tried.add(event.id)
        print("failed", flush=True)
        raise ValueError("first")
    print("start", event.key, time.monotonic(), flush=True)
    if event.key != "retry":
        time.sleep(0.05)
asyncio.run(app.run())
"""


def _asleep(tmp_path: Path, orders: list[tuple[str | None, bytes]], first: str) -> subprocess.Popen[str]:
    async def publish() -> None:
        async with Onward(f"sqlite:///{tmp_path}/shop.db", partitions=4) as publisher:
            await publisher.publish_many("orders", orders)

    asyncio.run(publish())
    program = subprocess.Popen([sys.executable, "-c", _SLEEPER], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline().startswith(first)
    return program


@pytest.mark.slow
def test_a_retry_that_became_due_while_ownership_was_uncertain_runs_later(tmp_path: Path) -> None:
    """The process was suspended for longer than its lease, but no other member took over: it continues by itself."""
    with _asleep(tmp_path, [("retry", b"1")], "failed") as program:
        os.kill(program.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(program.pid, signal.SIGCONT)
        assert program.stdout is not None
        assert program.stdout.readline().startswith("start retry ")
        program.kill()


@pytest.mark.slow
def test_work_that_waits_in_an_engine_does_not_start_after_its_partition_was_lost(tmp_path: Path) -> None:
    with _asleep(tmp_path, [(f"k{n}", b"0") for n in range(100)], "start") as program:
        os.kill(program.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED)
        stopped = time.monotonic()
        app = Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=1.0, takeover_grace_s=0.1, partitions=4)
        seen: set[str | None] = set()

        @app.handler("orders", group="g")
        async def handle(event: Event) -> None:
            seen.add(event.key)

        asyncio.run(run_until(app, lambda: len(seen) >= 50))
        os.kill(program.pid, signal.SIGCONT)
        time.sleep(1.0)
        program.kill()
        out, _ = program.communicate(timeout=60)
        starts = [line.split() for line in out.splitlines() if line.startswith("start")]
        late = [key for _, key, at in starts if float(at) > stopped]
        assert len(late) <= 1, f"started after the partition was lost: {late}"  # one may just have been starting


def test_arguments_of_a_wrong_type_are_refused_and_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    app = Onward(url)
    odd: Any = 3
    with pytest.raises(BadSetting, match="retry=3"):
        Onward(url, retry=odd)
    with pytest.raises(BadSetting, match=r"alert\(3\)"):
        app.alert(odd)
    with pytest.raises(BadSetting, match="expires_s='soon'"):
        app.event("orders", {}, expires_s="soon")  # type: ignore[arg-type]
    with pytest.raises(BadHandler, match="inbox=3 is not an inbox"):
        app.handler("orders", inbox=odd)(lambda order: None)
    with pytest.raises(Closed, match="not open"):
        _ = app.dead

    async def main() -> None:
        async with app:
            with pytest.raises(BadSetting, match=r"\(key, value\) pairs"):
                await app.publish_many("orders", [odd])

    asyncio.run(main())


def test_two_applications_of_one_program_are_two_members_of_the_group(tmp_path: Path) -> None:
    """One of them stops in the middle and starts again: no event is lost, and each key stays in order."""
    url, took = f"sqlite:///{tmp_path}/shop.db", dict[str, list[int]]()
    shares: list[list[int]] = [[], []]

    def application(number: int) -> Onward:
        app = Onward(url, partitions=8, lease_s=5.0)

        @app.handler("orders", group="billing", concurrency=20)
        async def bill(order: dict[str, int], event: Event) -> None:
            await asyncio.sleep(0.002)
            shares[number].append(order["n"])
            took.setdefault(event.key or "", []).append(order["n"])

        return app

    async def scenario() -> int:
        first, second, count = application(0), application(1), 0
        async with first, second:
            running = [asyncio.create_task(app.run()) for app in (first, second)]

            async def publish_until(condition: Callable[[], bool]) -> None:
                nonlocal count
                async with asyncio.timeout(60):
                    while not condition():
                        events = [(f"k-{n % 40}", {"n": n}) for n in range(count, count + 40)]
                        await first.publish_many("orders", events)
                        count += 40
                        await asyncio.wait(running, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
                        assert not running[0].done()

            await publish_until(lambda: all(shares))  # both have partitions
            second.stop()
            await running[1]
            before = len(shares[0])
            await publish_until(lambda: len(shares[0]) > before + 100)
            shares[1].clear()
            running[1] = asyncio.create_task(second.run())
            await publish_until(lambda: len(shares[1]) > 100)
            async with asyncio.timeout(60):
                while sum(map(len, took.values())) < count:
                    await asyncio.wait(running, timeout=0.01)
            first.stop()
            second.stop()
            await asyncio.gather(*running)
        return count

    count = asyncio.run(scenario())
    assert took == {f"k-{k}": list(range(k, count, 40)) for k in range(40)}
