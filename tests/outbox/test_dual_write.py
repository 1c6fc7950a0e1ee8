"""With `debug`, a direct publish beside an open transaction of the outbox is reported with both lines."""

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest

from onward import Onward
from onward.outbox import Outbox
from tests.outbox.shop import Order, Shop, maybe


class Observed:
    """A shop with `debug`, and the warnings that it logs."""

    def __init__(self, shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
        self.shop, self.caplog = shop, caplog
        self.app = Onward(f"sqlite:///{shop.folder}/events.db", debug=True, outbox_relay=False)
        self.outbox = Outbox(self.app, shop.engine, table=shop.table)

    def warnings(self) -> list[str]:
        found = [each.getMessage() for each in self.caplog.records if each.levelname == "WARNING"]
        self.caplog.clear()
        return found


@pytest.fixture
def observed(file_shop: Shop, caplog: pytest.LogCaptureFixture) -> Observed:
    return Observed(file_shop, caplog)


def line() -> int:
    """The line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_both_lines_are_named(observed: Observed) -> None:
    shop = observed.shop

    async def scenario() -> None:
        session = shop.session()
        async with observed.app as app:
            added = line() + 1
            observed.outbox.add(session, "orders", "a")
            observed.outbox.add(session, "orders", "b")
            published = line() + 1
            await app.publish("orders", "direct")
            (warning,) = observed.warnings()
            assert f"{Path(__file__)}:{published} publishes directly" in warning
            assert f"{Path(__file__)}:{added} added an event" in warning
            await app.publish_many("orders", [("k", "direct")])
            assert len(observed.warnings()) == 1
        await maybe(session.close())

    shop.play(scenario)


@pytest.mark.parametrize("ending", ["commit", "rollback", "close"])
def test_after_the_transaction_there_is_no_warning(observed: Observed, ending: str) -> None:
    shop = observed.shop

    async def scenario() -> None:
        session = shop.session()
        async with observed.app as app:
            for _ in range(3):
                await app.publish("orders", "before")
                observed.outbox.add(session, "orders", "a")
                await maybe(getattr(session, ending)())
                session.add(Order(id=1))
                await app.publish("orders", "after")
                await maybe(session.rollback())
        await maybe(session.close())

    shop.play(scenario)
    assert observed.warnings() == []


def test_after_the_rollback_of_the_only_savepoint_with_events_there_is_no_warning(observed: Observed) -> None:
    shop = observed.shop

    async def scenario() -> None:
        session = shop.session()
        async with observed.app as app:
            nested = await maybe(session.begin_nested())
            observed.outbox.add(session, "orders", "a")
            await maybe(nested.rollback())
            await app.publish("orders", "direct")
            assert observed.warnings() == []
            nested = await maybe(session.begin_nested())
            observed.outbox.add(session, "orders", "b")
            await maybe(nested.commit())
            await app.publish("orders", "direct")
            assert len(observed.warnings()) == 1
        await maybe(session.close())

    shop.play(scenario)


def test_other_tasks_and_threads_may_publish(observed: Observed) -> None:
    shop = observed.shop

    async def scenario() -> None:
        session = shop.session()
        async with observed.app as app:
            observed.outbox.add(session, "orders", "a")
            await asyncio.create_task(app.publish("orders", "of another task"))
            await asyncio.to_thread(app.publish_sync, "orders", "of another thread")
            assert observed.warnings() == []
        await maybe(session.close())

    shop.play(scenario)


def test_a_thread_is_warned_of_its_own_transaction(sqlite_shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop, observed = sqlite_shop, Observed(sqlite_shop, caplog)
    found: dict[str, list[str]] = {}
    begun, published = threading.Event(), threading.Event()

    def transaction() -> None:
        with shop.session() as session:
            observed.outbox.add(session, "orders", "a")
            begun.set()
            assert published.wait(30)
            observed.app.publish_sync("orders", "direct")
            found["in the transaction"] = observed.warnings()

    thread = threading.Thread(target=transaction)
    thread.start()
    assert begun.wait(30)
    observed.app.publish_sync("orders", "of another thread")
    found["beside it"] = observed.warnings()
    published.set()
    thread.join()
    assert found["beside it"] == []
    assert len(found["in the transaction"]) == 1


def test_without_debug_there_is_no_warning(file_shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop = file_shop

    async def scenario() -> None:
        session = shop.session()
        async with shop.app as app:
            shop.outbox.add(session, "orders", "a")
            await app.publish("orders", "direct")
        await maybe(session.close())

    shop.play(scenario)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_a_context_that_is_used_for_long_does_not_collect_transactions(observed: Observed) -> None:
    from onward.outbox import open_transactions

    shop = observed.shop

    async def scenario() -> None:
        session = shop.session()
        for _ in range(100):
            observed.outbox.add(session, "orders", "a")
            await maybe(session.rollback())
        assert len(kept()) <= 1
        await maybe(session.close())

    def kept() -> Any:
        return open_transactions._opened.get()

    shop.play(scenario)
