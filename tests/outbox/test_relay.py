"""The relay: what it publishes, what it parks, and how it behaves when the broker or the database is down."""

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest

from onward import Onward
from onward.brokers import open_broker
from onward.brokers.base import Broker, Features, TopicSpec
from onward.brokers.base import Relay as RelayTag
from onward.errors import (
    Backlogged,
    BadOutbox,
    BrokerError,
    OutboxUnreachable,
    PublishError,
    RelayFenced,
    TooLarge,
)
from onward.event import Event
from onward.outbox import Outbox
from onward.outbox.base import OutboxRow, OutboxStore
from onward.outbox.bell import OutboxBell
from onward.outbox.parking import ParkedLanes
from onward.outbox.postgresql import PostgresListener
from onward.outbox.relay import Relay, RelaySettings
from onward.outbox.relay_figures import RelayFigures
from onward.outbox.relays import Relays
from onward.outbox.status import release
from onward.outbox.store_thread import StoreThread
from onward.outbox.stores import open_store
from onward.settings import Settings
from tests.outbox.store_kit import OutboxKit, by_key, event, mode_of, url_of
from tests.servers.postgres import PostgresServer

LEASE_S = 1.0


class Sink:
    """A broker that records what is published, and refuses what a test says."""

    def __init__(self, *, fenced: bool = False) -> None:
        self.features = Features(
            stable_positions=True,
            fence=True,
            durability="memory",
            aside=True,
            starts=frozenset(),
            fenced_publish=fenced,
        )
        self.events: list[Event] = []
        self.tags: list[RelayTag | None] = []
        self.refuses: Callable[[Sequence[Event]], BaseException | None] = lambda events: None
        self.is_up = True
        self.fault: Exception = BrokerError("the broker is down")

    async def publish(self, events: Sequence[Event], *, relay: RelayTag | None = None) -> None:
        self.tags.append(relay)
        if not self.is_up:
            raise PublishError("the broker is down", refused=events)
        if error := self.refuses(events):
            raise error
        self.events += events

    async def topics(self) -> Sequence[TopicSpec]:
        if not self.is_up:
            raise self.fault
        return []


class Running:
    """A relay that runs in a task."""

    def __init__(self, kit: OutboxKit, sink: Sink | Broker, *, lease_s: float = LEASE_S) -> None:
        self.figures = RelayFigures(kit.table, max_age_s=1.0)
        settings = RelaySettings(f"relay-{uuid4().hex[:8]}", lease_s, 0.0, drain_timeout_s=5.0)
        self.relay = Relay(open_store(kit.url, kit.table), cast("Broker", sink), settings, self.figures)
        self.parked = self.relay._parked
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self.relay.run(self.begun.set))

    async def stop(self) -> None:
        self.relay.stop()
        await self.task


@asynccontextmanager
async def running(kit: OutboxKit, sink: Sink | Broker, **options: Any) -> AsyncIterator[Running]:
    run = Running(kit, sink, **options)
    try:
        yield run
        await run.stop()
    finally:
        run.task.cancel()
        await asyncio.wait([run.task])


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():  # noqa: ASYNC110 - it waits for threads too
            await asyncio.sleep(0.01)


@pytest.fixture(params=["sqlite", pytest.param("postgresql-log", marks=pytest.mark.servers)])
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutboxKit]:
    kit = OutboxKit(url_of(request.param, request, tmp_path), mode_of(request.param))
    yield kit
    kit.close()


@pytest.fixture
def file_kit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutboxKit]:
    kit = OutboxKit(url_of("sqlite", request, tmp_path), None)
    yield kit
    kit.close()


@in_loop
async def test_events_arrive_in_the_order_of_their_keys(kit: OutboxKit) -> None:
    sink = Sink()
    kit.commit(*[event(f"k{n % 3}", n) for n in range(30)])
    async with running(kit, sink):
        await until(lambda: len(sink.events) == 30)
        kit.commit(event("k0", 30))
        await until(lambda: len(sink.events) == 31)
    for key in range(3):
        assert by_key(sink.events, f"k{key}") == [f"k{key}:{n}" for n in range(31) if n % 3 == key]


@in_loop
async def test_a_relay_that_stops_gives_its_shards_to_another_at_once(kit: OutboxKit) -> None:
    sink = Sink()
    async with running(kit, sink, lease_s=60.0) as first:
        await until(lambda: first.relay.shards > 0)
    async with running(kit, sink, lease_s=60.0):
        kit.commit(event("a", 1))
        await until(lambda: len(sink.events) == 1)


@in_loop
async def test_two_relays_share_the_shards(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    kit = OutboxKit(url_of("postgresql-log", request, tmp_path), "log")
    sink = Sink()
    async with running(kit, sink) as first:
        await until(lambda: first.relay.shards == 8)
        async with running(kit, sink) as second:
            await until(lambda: first.relay.shards == second.relay.shards == 4)
            kit.commit(*[event(f"k{n}", n) for n in range(50)])
            await until(lambda: len(sink.events) == 50)
        await until(lambda: first.relay.shards == 8)
    kit.close()


@in_loop
async def test_while_the_broker_is_down_rows_wait_and_then_flow(file_kit: OutboxKit) -> None:
    sink = Sink()
    sink.is_up = False
    async with running(file_kit, sink) as run:
        file_kit.commit(event("a", 1), event("b", 1))
        await until(lambda: len(sink.tags) >= 4)
        assert any("down" in trouble for trouble in run.figures.troubles())
        assert run.figures.oldest_s > 1
        sink.is_up = True
        await until(lambda: len(sink.events) == 2)
        await until(lambda: not run.figures.troubles())


@in_loop
async def test_a_broker_that_fails_in_an_unknown_way_only_makes_rows_wait(file_kit: OutboxKit) -> None:
    sink = Sink()
    sink.is_up, sink.fault = False, ConnectionError("reset")
    async with running(file_kit, sink):
        file_kit.commit(event("a", 1))
        await until(lambda: len(sink.tags) >= 4)
        sink.is_up = True
        await until(lambda: len(sink.events) == 1)


@in_loop
async def test_a_client_that_cancels_its_own_work_does_not_stop_the_relay(file_kit: OutboxKit) -> None:
    sink = Sink()
    broken = [asyncio.CancelledError()]
    sink.refuses = lambda events: broken.pop() if broken else None
    async with running(file_kit, sink):
        file_kit.commit(event("a", 1))
        await until(lambda: len(sink.events) == 1)


@in_loop
async def test_a_reason_that_no_database_can_store_does_not_stop_the_relay(kit: OutboxKit) -> None:
    sink = Sink()
    sink.refuses = lambda events: TooLarge("bad\0 \ud800 text") if by_key(events, "a") else None
    async with running(kit, sink):
        kit.commit(event("a", 1), event("b", 1))
        await until(lambda: len(sink.events) == 1)
        kit.commit(event("b", 2))
        await until(lambda: len(sink.events) == 2)
    assert by_key(sink.events, "b") == ["b:1", "b:2"]


@in_loop
async def test_a_row_that_is_too_large_parks_its_key_while_the_rest_flows(kit: OutboxKit) -> None:
    sink = Sink()
    sink.refuses = lambda events: TooLarge("b:1 is too large") if by_key(events, "b")[:1] == ["b:1"] else None
    kit.commit(event("a", 1), event("b", 1), event("a", 2), event("b", 2))
    async with running(kit, sink):
        await until(lambda: len(sink.events) == 2)
        kit.commit(event("b", 3), event("a", 3))
        await until(lambda: len(sink.events) == 3)
        assert by_key(sink.events, "a") == ["a:1", "a:2", "a:3"]
        assert by_key(sink.events, "b") == []
        sink.refuses = lambda events: None
        assert release(kit.url, table=kit.table, key="b") == 1
        await until(lambda: len(sink.events) == 6)
        kit.commit(event("b", 4))
        await until(lambda: len(sink.events) == 7)
    assert by_key(sink.events, "b") == ["b:1", "b:2", "b:3", "b:4"]


@in_loop
async def test_a_full_topic_does_not_hold_up_the_others(kit: OutboxKit) -> None:
    sink = Sink()
    full = [True]
    sink.refuses = lambda events: (
        Backlogged("full", refused=events) if full[0] and any(each.topic == "full" for each in events) else None
    )
    kit.commit(event("k", 1, topic="full"), event("k", 2, topic="full"))
    async with running(kit, sink):
        await until(lambda: len(sink.tags) >= 3)
        kit.commit(event("k", 3, topic="full"), event("k", 1, topic="free"))
        await until(lambda: [each.topic for each in sink.events] == ["free"])
        full[0] = False
        await until(lambda: len(sink.events) == 4)
    assert [each.value for each in sink.events if each.topic == "full"] == [b"k:1", b"k:2", b"k:3"]


@in_loop
async def test_parked_rows_of_a_topic_that_stays_full_do_not_hold_up_those_of_another(kit: OutboxKit) -> None:
    sink = Sink()
    full = {"one", "two"}
    sink.refuses = lambda events: (
        Backlogged("full", refused=events) if full.intersection(each.topic for each in events) else None
    )
    kit.commit(*[event(f"k{n}", n, topic="one") for n in range(600)], event("k", 1, topic="two"))
    async with running(kit, sink) as run:
        await until(lambda: sum(map(len, run.parked._lanes.values())) == 601)
        full.remove("two")
        await until(lambda: [each.topic for each in sink.events] == ["two"])
        full.clear()
        await until(lambda: len(sink.events) == 601)


@in_loop
async def test_new_keys_of_a_topic_that_fails_as_a_whole_are_parked_without_a_try(file_kit: OutboxKit) -> None:
    """A topic whose publishes hang would otherwise hold up the others with each new key."""
    sink = Sink()
    tried: list[str | None] = []

    def full(events: Sequence[Event]) -> Exception | None:
        found = [each for each in events if each.topic == "full"]
        tried.extend(each.key for each in found)
        return Backlogged("full", refused=events) if found else None

    sink.refuses = full
    file_kit.commit(*[event(f"k{n}", n, topic="full") for n in range(30)])
    async with running(file_kit, sink) as run:
        await until(lambda: run.parked._failing == {"full"})
        file_kit.commit(event("new", 1, topic="full"), event("a", 1, topic="free"))
        await until(lambda: len(sink.events) == 1)
        await until(lambda: sum(map(len, run.parked._lanes.values())) == 31)
        assert tried.count("new") <= 1  # with the other parked rows


class UncleanStore:
    """A store that cannot delete more than a few rows in time."""

    def __init__(self) -> None:
        self.limits: list[int] = []

    def clean(self, *, keep_s: float, limit: int) -> int:
        self.limits.append(limit)
        if limit > 100:
            raise OutboxUnreachable("canceling statement due to statement timeout")
        return 0


@in_loop
async def test_rows_that_cannot_be_deleted_in_time_are_deleted_in_smaller_steps() -> None:
    store = UncleanStore()
    settings = RelaySettings("a", 1.0, 0.0, 1.0)
    relay = Relay(cast("OutboxStore", store), cast("Broker", Sink()), settings, RelayFigures("t", 1.0))
    await relay._clean()
    assert store.limits == [5_000, 1_250, 312, 78]
    relay._thread.end()


@in_loop
async def test_two_outbox_objects_of_one_table_have_one_relay(file_kit: OutboxKit, tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/events.db")
    for _ in range(2):
        Outbox(app, file_kit.url, table=file_kit.table)
    async with app:
        assert len(Relays(app.outboxes, app.broker, app.settings, "name")) == 1


@in_loop
async def test_a_shard_continues_above_the_fence_that_the_broker_has_seen(file_kit: OutboxKit) -> None:
    sink = Sink(fenced=True)

    def fenced(events: Sequence[Event]) -> Exception | None:
        tag = sink.tags[-1]
        assert tag is not None
        return RelayFenced("fenced", refused=events, seen=100) if tag[1] <= 100 else None

    sink.refuses = fenced
    file_kit.commit(event("a", 1), event("a", 2))
    async with running(file_kit, sink):
        await until(lambda: len(sink.events) == 2)
    assert sink.tags[-1] is not None
    assert sink.tags[-1][1] == 101


@in_loop
async def test_two_outboxes_never_share_a_shard_name(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    sink = Sink(fenced=True)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        kit = OutboxKit(url_of("sqlite", request, tmp_path / name), None)
        kit.commit(event("a", 1))
        async with running(kit, sink):
            await until(lambda name=name: len(sink.events) == {"one": 1, "two": 2}[name])  # type: ignore[misc]
        kit.close()
    assert len({tag[0] for tag in sink.tags if tag is not None}) == 2


@in_loop
async def test_missing_tables_are_an_error_at_the_start(file_kit: OutboxKit) -> None:
    file_kit.table = "missing"
    with pytest.raises(BadOutbox, match="onward outbox init"):
        async with running(file_kit, Sink()) as run:
            await run.task


@in_loop
async def test_the_relay_survives_a_restart_of_the_database(postgres_server: PostgresServer) -> None:
    kit = OutboxKit(postgres_server.url, "log")
    sink = Sink()
    async with running(kit, sink):
        kit.commit(event("a", 1))
        await until(lambda: len(sink.events) == 1)
        await asyncio.to_thread(postgres_server.restart)
        kit.commit(event("a", 2))
        await until(lambda: bool(by_key(sink.events, "a")[-1:] == ["a:2"]))


@in_loop
async def test_a_relay_that_starts_before_its_database_waits_for_it(postgres_server: PostgresServer) -> None:
    kit = OutboxKit(postgres_server.url, "log")
    kit.commit(event("a", 1))
    await asyncio.to_thread(postgres_server.kill)
    sink = Sink()
    async with running(kit, sink) as run:
        await run.begun.wait()
        await asyncio.to_thread(postgres_server.restart)
        await until(lambda: len(sink.events) == 1)


@in_loop
async def test_a_stop_does_not_wait_for_a_broker_that_is_down(file_kit: OutboxKit) -> None:
    sink = Sink()
    sink.is_up = False
    file_kit.commit(event("a", 1))
    async with running(file_kit, sink) as run:
        await until(lambda: len(sink.tags) >= 2)
        async with asyncio.timeout(30):
            await run.stop()
    sink.is_up = True
    async with running(file_kit, sink):
        await until(lambda: by_key(sink.events, "a") == ["a:1"])


@in_loop
async def test_a_ring_wakes_an_idle_relay_of_this_process(file_kit: OutboxKit) -> None:
    sink = Sink()
    async with running(file_kit, sink) as run:
        await until(lambda: run.relay.shards > 0)
        file_kit.commit(event("a", 1))
        run.relay.ring()
        await until(lambda: len(sink.events) == 1)


@in_loop
async def test_a_relay_publishes_into_a_real_broker(file_kit: OutboxKit, tmp_path: Path) -> None:
    broker = await open_broker(Settings(url=f"sqlite:///{tmp_path}/events.db"))
    subscription = await broker.subscribe(["orders"], group="g", member="m", ordering="key", start="earliest")
    file_kit.commit(*[event(f"k{n % 4}", n) for n in range(100)])
    got: list[Event] = []
    async with running(file_kit, broker):
        async with asyncio.timeout(60):
            while len(got) < 100:
                messages = await subscription.receive(1000, 1 << 20, 1.0)
                got += [each.event for each in messages if hasattr(each, "event")]
    for key in range(4):
        assert by_key(got, f"k{key}") == [f"k{key}:{n}" for n in range(100) if n % 4 == key]
    await broker.close()


class ParkedKeys:
    """A store that only knows its parked lanes, and counts how often it was asked for them."""

    def __init__(self) -> None:
        self.lanes: dict[int, list[tuple[str, str]]] = {}
        self.asked = 0

    def parked_lanes(self, held: Mapping[int, int]) -> Mapping[int, Sequence[tuple[str, str]]]:
        self.asked += 1
        return self.lanes


@in_loop
async def test_a_shard_that_was_lost_and_claimed_again_in_one_turn_loads_its_parked_lanes_again() -> None:
    """Between the two ownerships another relay may have parked rows. Without them, later rows would go first."""
    store = ParkedKeys()
    thread = StoreThread(cast("OutboxStore", store), "test")
    parked = ParkedLanes(thread)
    later = [OutboxRow(9, 3, Event("e", "orders", "k", b""))]
    await parked.learn({3: 5})
    await parked.learn({3: 5})
    assert (store.asked, parked.lanes_of(later)) == (1, set())
    store.lanes = {3: [("orders", "k")]}
    await parked.learn({3: 7})
    assert parked.lanes_of(later) == {("orders", "k")}
    thread.end()


def test_the_bell_is_heard_if_the_name_of_the_table_has_capitals(postgres_server: PostgresServer) -> None:
    listener = PostgresListener(postgres_server.url, "MixedOutbox")
    waiting = threading.Thread(target=listener.wait, args=(60.0,))
    started = time.monotonic()
    waiting.start()
    bell = OutboxBell(lambda: postgres_server.url, "MixedOutbox")
    while waiting.is_alive():
        bell.ring()
        waiting.join(0.05)
    assert time.monotonic() - started < 50
    listener.close()
