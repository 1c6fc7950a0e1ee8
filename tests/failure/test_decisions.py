"""What happens to events in batches, with the policy of an application, and when they expire."""

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from onward import Event, GiveUp, Onward, Retry, Skip
from onward.errors import BadHandler
from onward.event import new_id
from onward.failure.expiry import EXPIRES, expires, is_expired
from onward.testing.failure_shop import until


@pytest.mark.parametrize(
    ("header", "expected"), [("1700000000.5", 1_700_000_000.5), ("0", 0.0), ("soon", None), ("nan", None), ("", None)]
)
def test_a_header_that_is_not_a_time_is_ignored(header: str, expected: float | None) -> None:
    event = Event(new_id(), "orders", None, b"", {EXPIRES: header})
    assert expires(event) == expected
    assert is_expired(event, 1_700_000_001.0) is (expected is not None)


def test_an_event_has_a_header_with_its_expiry(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db")
    event = app.event("orders", {}, headers={"a": "b"}, expires_s=60)
    assert event.headers["a"] == "b"
    assert expires(event) == pytest.approx(event.time + 60, abs=1e-3)
    assert EXPIRES not in app.event("orders", {}).headers


def test_a_policy_is_set_for_the_application_or_for_one_handler(tmp_path: Path) -> None:
    usual, own = Retry(attempts=2), Retry(attempts=9)
    app = Onward(f"sqlite:///{tmp_path}/shop.db", retry=usual)

    @app.handler("orders", group="a")
    async def first(event: Event) -> None: ...

    @app.handler("orders", group="b", retry=own)
    async def second(event: Event) -> None: ...

    assert [handler.retry for handler in app.handlers] == [usual, own]
    with pytest.raises(BadHandler, match="Retry"):
        app.handler("orders", group="c", retry=3)(first)  # type: ignore[arg-type]


def test_each_event_of_a_batch_gets_its_own_outcome_and_the_order_holds(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/shop.db", partitions=1)
    done: dict[str | None, list[int]] = defaultdict(list)
    late = [n for n in range(100) if n % 10 == 3]
    sick = [n for n in range(100) if n % 13 == 7 and n not in late]
    void = [n for n in range(100) if n % 13 == 5 and n not in late]

    @app.handler("orders", group="billing", batch_size=20, batch_wait_s=0.02)
    async def bill(orders: list[dict[str, int]], events: list[Event]) -> None:
        for order in orders:
            assert order["n"] not in late
            if order["n"] in void:
                raise Skip("nothing to do")
            if order["n"] in sick:
                raise GiveUp("never")
        for order, event in zip(orders, events, strict=True):
            done[event.key].append(order["n"])

    async def main() -> None:
        async with app:
            for n in range(100):
                await app.publish("orders", {"n": n}, key=f"c-{n % 3}", expires_s=-1 if n in late else None)
            running = asyncio.create_task(app.run())
            well = 100 - len(late) - len(sick) - len(void)
            await until(lambda: sum(map(len, done.values())) >= well, "all other events are handled")
            await until(lambda: app.readings()[0].declined >= len(void), "the skipped events are counted")
            await until(lambda: app.readings()[0].dead >= len(late) + len(sick), "the dead letters are counted")
            assert f'onward_events_declined_total{{group="billing",topic="orders"}} {len(void)}.0' in app.metrics()
            app.stop()
            await running
            letters = (await app.dead.list(limit=100)).letters
        reasons = [letter.failure.reason for letter in letters if letter.failure]
        assert sorted(reasons) == ["expired"] * len(late) + ["refused"] * len(sick)

    asyncio.run(main())
    gone = {*late, *sick, *void}
    assert dict(done) == {f"c-{k}": [n for n in range(100) if n % 3 == k and n not in gone] for k in range(3)}
