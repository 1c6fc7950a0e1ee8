"""Traps of both kinds of group that no other file tests: limits of queues, stops, and events delivered twice."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text

from onward import Onward
from onward.brokers.base import Progress
from onward.brokers.core.subscription import SubscriptionShell
from onward.brokers.rabbitmq.ordered.ordered import OrderedSubscription
from onward.brokers.rabbitmq.work.work_subscription import WorkSubscription
from onward.event import Delivery
from onward.inbox import SqlInbox
from onward.testing.failure_shop import until
from onward.testing.scenario import Member, event
from tests.brokers.rabbitmq.fault_shop import GROUP, KINDS, TOPIC, FaultShop, some_fail
from tests.brokers.rabbitmq.harness import RabbitHarness, harness
from tests.brokers.rabbitmq.stage import played
from tests.brokers.trap_tables import stopped_in_the_middle

__all__ = ["harness"]

kinds = pytest.mark.parametrize("kind", KINDS)
SETTINGS: dict[str, Any] = {"partitions": 2, "lease_s": 2.0, "takeover_grace_s": 0.2, "drain_timeout_s": 5.0}


async def joined(app: Onward, kind: str) -> Member:
    """A member that owns all partitions, or the shared one."""
    member = await Member.join(app.broker, TOPIC, GROUP, ordering=KINDS[kind]["ordering"])
    return await member.hold(2 if kind == "ordered" else 1)


async def create_group(url: str, kind: str) -> None:
    """A group without order gets the events that are published from then on."""
    async with Onward(url, **SETTINGS) as app:
        member = await joined(app, kind)
        await member.release(list(member.assigned))
        await member.subscription.close()


@pytest.mark.servers
@kinds
@played
async def test_no_queue_of_ours_has_a_limit_that_deletes_messages(harness: RabbitHarness, kind: str) -> None:
    """Neither a time to live nor a length, and no limit of deliveries that is ever reached. Only rungs have a time."""
    async with FaultShop(harness.url, kind, some_fail).open() as shop:
        await shop.publish(30)
    found = {name: each["arguments"] for name, each in harness.server.queues(harness.vhost).items()}
    quorum = {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000_000}
    token = {**quorum, "x-single-active-consumer": True}
    stream = {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": 64 << 20}
    places = ["0", "1"] if kind == "ordered" else ["work"]
    prefix = f"onward.{TOPIC}:{GROUP}:"
    expected = {"onward.registry": stream}
    expected |= {f"onward.{TOPIC}.{n}": {**stream, "x-max-age": "604800s"} for n in range(2)}
    expected |= {f"{prefix}{place}.token": token for place in places}
    expected |= {f"{prefix}{place}.aside.0": stream for place in places}
    if kind == "work":
        expected |= {f"{prefix}{name}": quorum for name in ("work", "suspects")}
        rungs = [name for name in found if ".rung." in name]
        assert rungs, "no retry has waited"
        back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{prefix}work"}
        safe = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        expected |= {name: {**quorum, **back, **safe, "x-message-ttl": int(name.split(".")[-1])} for name in rungs}
    assert {name: found[name] for name in expected} == expected
    without_events = {f"{prefix}members", f"{prefix}suspects.starts"}
    assert set(found) - set(expected) <= without_events


@pytest.mark.servers
@kinds
@played
async def test_handlers_that_stop_finish_what_they_began_and_the_next_member_repeats_nothing(
    harness: RabbitHarness, kind: str
) -> None:
    """A stop cancels no run, settles what has ended, and gives the rest back. Nothing is charged an attempt."""
    await create_group(harness.url, kind)
    declared = {"group": GROUP, **KINDS[kind]}
    started, ended = await stopped_in_the_middle(Onward(harness.url, **SETTINGS), TOPIC, 60, **declared)
    assert sorted(started) == sorted(ended)
    assert len(ended) < 60
    async with Onward(harness.url, **SETTINGS) as app:
        member = await joined(app, kind)
        await member.take(60 - len(ended))
        await member.quiet(0.3)
        assert sorted(member.values + ended) == list(range(60))
        assert not any(assigned.unclean for assigned in member.assigned.values())
        assert not any(each.tries and each.tries.failed for each in member.deliveries)


class HeldSettles:
    """While `gate` is closed, nothing is settled. Counts what is delivered and what is settled."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gate = asyncio.Event()
        self.deliveries = self.settled = 0
        for kind in (OrderedSubscription, WorkSubscription):
            patch.setattr(kind, "settle", self._held(kind.settle))
        patch.setattr(SubscriptionShell, "receive", self._counted(SubscriptionShell.receive))

    def _held(self, settle: Any) -> Any:
        async def held(of: Any, progress: Sequence[Progress], **more: Any) -> Any:
            await self.gate.wait()
            lost = await settle(of, progress, **more)
            self.settled += sum(len(each.fresh) for each in progress if each.partition not in lost)
            return lost

        return held

    def _counted(self, receive: Any) -> Any:
        async def counted(*args: Any) -> Any:
            messages = await receive(*args)
            self.deliveries += sum(type(each) is Delivery for each in messages)
            return messages

        return counted


@pytest.mark.servers
@kinds
@played
async def test_with_an_inbox_an_event_that_is_delivered_twice_has_its_effect_once(
    harness: RabbitHarness, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effects are committed, and the connection is lost before an event is settled."""
    engine = create_engine(f"sqlite:///{tmp_path}/effects.db", connect_args={"timeout": 30})
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effect (n INTEGER NOT NULL)"))
    inbox = SqlInbox(engine)
    inbox.create()
    await create_group(harness.url, kind)
    proxy = harness.server.proxy()
    app, settles = Onward(harness.server.url_of(harness.vhost, proxy.url), **SETTINGS), HeldSettles(monkeypatch)

    @app.handler(TOPIC, group=GROUP, inbox=inbox, **KINDS[kind])
    def bill(n: int, connection: Connection) -> None:
        connection.execute(text("INSERT INTO effect VALUES (:n)"), {"n": n})

    def made() -> list[int]:
        with engine.begin() as connection:
            return sorted(row[0] for row in connection.execute(text("SELECT n FROM effect")))

    with proxy:
        async with app.running():
            await app.broker.publish([event(TOPIC, f"key-{n % 5}", n) for n in range(20)])
            await until(lambda: len(made()) == 20, "all effects are there")
            await asyncio.to_thread(proxy.cut)
            await until(lambda: not app.health().ready, "readiness ends")
            await asyncio.to_thread(proxy.mend)
            settles.gate.set()
            await until(lambda: settles.settled == 20, "all events are settled")
    assert settles.deliveries == 40
    assert made() == list(range(20))
    async with Onward(harness.url, **SETTINGS) as next_app:
        await (await joined(next_app, kind)).quiet()
    engine.dispose()
