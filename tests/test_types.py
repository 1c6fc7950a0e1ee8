"""Event types: publishing with a type, and handlers that select by type."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onward import Event, Onward, Retry
from onward.brokers.base import Asks
from onward.errors import BadHandler, BadSetting
from onward.handler import type_filter
from tests.test_app import run_until, until


class Order(msgspec.Struct):
    n: int


@pytest.fixture
def app(tmp_path: Path) -> Onward:
    return Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=1.0, takeover_grace_s=0.1, drain_timeout_s=2.0)


def test_an_event_has_the_type_that_it_was_published_with(app: Onward) -> None:
    seen: list[tuple[int, str]] = []

    @app.handler("orders", group="billing")
    async def bill(order: Order, event: Event) -> None:
        seen.append((order.n, event.type))

    async def main() -> None:
        async with app:
            await app.publish("orders", Order(0), key="k")
            await app.publish("orders", Order(1), key="k", type="order.placed")
            await app.publish_many("orders", [("k", Order(2)), ("k", {"n": 3})], type="order.paid")
            await app.publish("orders", {"n": 4}, key="k")
            await asyncio.to_thread(app.publish_sync, "orders", Order(5), key="k", type="order.shipped")
        await run_until(app, lambda: len(seen) == 6)

    asyncio.run(main())
    types = ["Order", "order.placed", "order.paid", "order.paid", "", "order.shipped"]
    assert seen == list(enumerate(types))
    assert app.event("orders", b"", type="x" * 200).type == "x" * 200


@pytest.mark.parametrize("odd", ["", "x" * 201, "a\nb", "half \ud83d", 7])
def test_a_type_that_no_broker_could_carry_is_refused(app: Onward, odd: Any) -> None:
    with pytest.raises(BadSetting, match="type="):
        app.event("orders", b"", type=odd)
    with pytest.raises(BadSetting, match="type="):
        asyncio.run(app.publish_many("orders", [], type=odd))


@pytest.mark.parametrize(
    ("pattern", "takes", "leaves"),
    [
        ("order.placed", ["order.placed"], ["order.placed.v2", "order_placed", "Order.placed", ""]),
        ("order.*", ["order.placed", "order.placed.v2", "order."], ["order", "reorder.placed"]),
        ("*.failed", ["payment.failed", "a.b.failed"], ["payment.failed.again"]),
        ("a.*.z", ["a.b.z", "a.b.c.z"], ["a.z"]),
        ("*", ["", "anything"], []),
        ("a+b(c)", ["a+b(c)"], ["aab(c)"]),
    ],
)
def test_a_star_matches_any_text_and_the_rest_is_literal(pattern: str, takes: list[str], leaves: list[str]) -> None:
    wants = type_filter(["nothing.else", pattern], "bill")
    assert [type_ for type_ in (*takes, *leaves) if wants(type_)] == takes


@pytest.mark.parametrize("odd", ["order.*", [], [""], [7], ["order.#"], ["order.?"], ["[a]"], ["a\n"], {"order.*"}, 3])
def test_invalid_patterns_are_refused(app: Onward, odd: Any) -> None:
    async def bill(order: dict[str, int]) -> None: ...

    with pytest.raises(BadHandler, match="types"):
        app.handler("orders", types=odd)(bill)
    assert app.handlers == []


@pytest.mark.parametrize("options", [{}, {"batch_size": 10}, {"engine": "threads"}, {"ordering": "none"}])
def test_a_handler_gets_its_types_and_the_others_are_done(app: Onward, options: dict[str, Any]) -> None:
    seen: list[int] = []

    def note(orders: Any) -> None:
        seen.extend(order.n for order in (orders if isinstance(orders, list) else [orders]))

    async def one(order: Order) -> None:
        note(order)

    async def many(orders: list[Order]) -> None:
        note(orders)

    def plain(order: Order) -> None:
        note(order)

    function = many if "batch_size" in options else plain if "engine" in options else one
    app.handler("orders", group="billing", types=["order.placed", "notification.slack.*"], **options)(function)

    async def main() -> None:
        async with app:
            for n, type_ in enumerate(
                ["order.placed", "order.paid", "notification.slack.new", "notification.mail"] * 5
            ):
                await app.publish("orders", Order(n), key="k", type=type_)
            async with app.running():
                await until(lambda: app.readings()[0].filtered == 10 and app.readings()[0].done == 10)
                (reading,) = app.readings()
                assert (reading.delivered, reading.done, reading.filtered) == (20, 10, 10)
                assert 'onward_events_filtered_total{group="billing",topic="orders"} 10.0' in app.metrics()
            async with app.running():
                await app.publish("orders", Order(20), key="k", type="order.placed")
                await until(lambda: 20 in seen)
                assert app.readings()[0].filtered == 0, "filtered events were delivered again"

    asyncio.run(main())
    assert sorted(seen) == [n for n in range(20) if n % 2 == 0] + [20]
    if options.get("ordering") != "none":
        assert seen == sorted(seen)


def test_a_failing_event_holds_its_key_but_not_filtered_events(app: Onward) -> None:
    tries: list[int] = []

    @app.handler("orders", group="billing", types=["order.*"], retry=Retry(attempts=2, first_delay_s=0.3, jitter=0))
    async def bill(order: Order) -> None:
        tries.append(order.n)
        if order.n == 0 and len(tries) == 1:
            raise ValueError("not yet")

    async def main() -> None:
        async with app:
            for n, type_ in enumerate(["order.a", "mail.a", "order.b", "mail.b"]):
                await app.publish("orders", Order(n), key="k", type=type_)
        await run_until(app, lambda: len(tries) == 3)

    asyncio.run(main())
    assert tries == [0, 0, 2]


@pytest.mark.parametrize(
    "tiers",
    [{"urgent": "a.*"}, {"critical": "crit*"}, {"critical": "a..b"}, {"critical": ""}, {"bulk": "a.#"}, ["critical"]],
)
def test_a_tier_that_cannot_be_a_route_is_refused(app: Onward, tiers: Any) -> None:
    with pytest.raises(BadHandler, match=r"tiers|types"):

        @app.handler("orders", ordering="none", tiers=tiers)
        async def bill(order: Order) -> None: ...


def test_tiers_are_refused_where_no_event_can_overtake_another(app: Onward) -> None:
    @app.handler("orders", ordering="none", tiers={"critical": "order.*.urgent"})
    async def bill(order: Order) -> None: ...

    with pytest.raises(BadHandler, match="this broker has no tiers"):
        asyncio.run(app.run())


def test_a_broker_learns_what_a_handler_asks_for(app: Onward) -> None:
    @app.handler(
        "orders", concurrency=7, timeout_s=None, types=["order.*"], ordering="none", tiers={"bulk": "order.old"}
    )
    async def bill(order: Order) -> None: ...

    (handler,) = app.handlers
    assert handler.asks == Asks(7, None, ("order.*",), {"bulk": "order.old"})
