"""What the Redis broker counts: retention, backlog with what is aside, lost events, shares of a batch, metrics."""

import functools
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import pytest
from prometheus_client.parser import text_string_to_metric_families

from onward import Event, Onward
from onward.brokers.base import AsideRecord, Broker, FigureSample, State, Tries, record_id
from onward.brokers.core.partitioner import partition_of
from onward.brokers.redis import trimmer
from onward.brokers.redis.event_count import EventCount
from onward.brokers.redis.stream_figures import StreamFigures
from onward.errors import Backlogged
from onward.event import Delivery, Partition
from onward.observe.figures import of_broker
from onward.observe.metrics import exposition, folded
from onward.testing.scenario import Member, event
from tests.brokers.redis_stage import Stage, play, staged, until
from tests.observe.readings import partition, reading
from tests.servers.redis import RedisServer


def _value(broker: Broker, name: str, partition: Partition) -> float:
    sample = _samples(broker, name).get((partition.topic, str(partition.index)))
    return 0 if sample is None else sample.value


def _samples(broker: Broker, name: str) -> Mapping[tuple[str, ...], FigureSample]:
    (figure,) = [each for each in broker.figures() if each.name == name]
    return {sample.labels: sample for sample in figure.samples}


async def _filled(stage: Stage, broker: Broker, count: int) -> None:
    for start in range(0, count, 200):
        await broker.publish(stage.events(min(200, count - start), start=start))


# -- retention ------------------------------------------------------------------------------------------------------


def test_retention_keeps_so_many_finished_events(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.1)

    async def scene() -> None:
        async with staged(redis_server, retention_events=1_000, lease_s=1.0) as stage:
            broker, first = await stage.broker(), Partition(stage.topic, 0)
            await _filled(stage, broker, 4_000)
            member = await (await stage.member(broker)).hold(1)
            await member.take(4_000)
            assert not await member.settle(member.deliveries[:2_500])
            await until(lambda: _value(broker, "stream_trimmed", first) > 700)
            assert 2_500 <= stage.length <= 2_500 + 400, (
                "1,000 finished events should stay, and all that are unfinished"
            )
            assert _value(broker, "stream_kept_events", first) == 500, "1,500 are unfinished, 1,000 may stay"
            assert not await member.settle()
            await until(lambda: stage.length <= 1_000 + 400)
            await until(lambda: _value(broker, "stream_kept_events", first) == 0)
            assert stage.length >= 1_000, "more was trimmed than the limit asks for"
            assert _value(broker, "stream_trimmed", first) == 4_000 - stage.length

    play(scene())


@pytest.mark.parametrize("retention", [{"retention_s": 0.0}, {"retention_bytes": 1}, {"retention_events": 1}])
def test_a_metric_says_when_unfinished_work_keeps_a_stream_longer(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, retention: dict[str, Any]
) -> None:
    monkeypatch.setattr(trimmer, "_INTERVAL_S", 0.1)

    async def scene() -> None:
        async with staged(redis_server, lease_s=1.0, **retention) as stage:
            broker, first = await stage.broker(), Partition(stage.topic, 0)
            await _filled(stage, broker, 3_000)
            member = await (await stage.member(broker)).hold(1)
            await member.take(3_000)
            assert not await member.settle(member.deliveries[:1_000])
            await until(lambda: 1_200 < _value(broker, "stream_kept_events", first) <= 2_000)
            kept = _value(broker, "stream_kept_events", first)
            stage.group = "other"
            await stage.member(broker)
            await until(lambda: _value(broker, "stream_kept_events", first) > kept)

    play(scene())


# -- backlog --------------------------------------------------------------------------------------------------------


def _record(delivery: Delivery, state: State) -> AsideRecord:
    id_ = record_id("group", delivery.log_id, delivery.partition, delivery.position)
    return AsideRecord(id_, "group", delivery.partition, delivery.position, state, None, delivery.event, Tries(), None)


def _aside_bytes(stage: Stage) -> tuple[int, int]:
    """Of waiting and held records: as the partition's counter has them, and as their sum."""
    client: Any = stage.client
    rows = client.hgetall(stage.keys.rows("group"))
    open_ = [place for place, row in rows.items() if b"dead" not in row[:8]]
    found = sum(client.hstrlen(stage.keys.bodies("group"), place) for place in open_)
    return int(client.hget(stage.keys.meta, "aside") or 0), found


def test_the_counter_of_aside_bytes_follows_every_change_of_a_record(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(4))
            member = await stage.member(broker)
            deliveries = await member.take(4)
            aside, records = broker.aside("group"), [_record(each, State.HELD) for each in deliveries]
            seen: list[int] = []

            def look() -> None:
                counter, found = _aside_bytes(stage)
                assert counter == found
                seen.append(counter)

            for written in (records, records, [_record(deliveries[1], State.DEAD)]):
                assert not await member.subscription.settle(member.progress(), aside=written)
                look()
            await aside.move([records[1].id], expect=State.DEAD, to=State.WAITING, due=1.0)
            look()
            await aside.remove([records[1].id], expect=State.WAITING)
            look()
            assert not await member.subscription.settle([], gone=[records[2].id])
            look()
            assert seen[0] == seen[1] > seen[2] < seen[3] > seen[4] > seen[5] > 0
            await member.subscription.close()
            await broker.drop_group(stage.topic, "group")
            look()
            assert seen[-1] == 0

    play(scene())


def test_what_waits_or_is_held_aside_counts_as_backlog(redis_server: RedisServer) -> None:
    """Guarantee G4: the backlog is what some group has not finished."""

    async def scene() -> None:
        async with staged(redis_server, max_backlog_bytes=15_000) as stage:
            broker = await stage.broker()
            await broker.publish(stage.events(100))
            member = await stage.member(broker)
            records = [_record(each, State.HELD) for each in await member.take(100)]
            assert not await member.subscription.settle(member.progress(), aside=records)
            with pytest.raises(Backlogged, match="group group is"):
                await broker.publish(stage.events(10, start=100))
            await broker.aside("group").remove([record.id for record in records], expect=State.HELD)
            await broker.publish(stage.events(10, start=100))

    play(scene())


def test_dead_letters_are_no_backlog(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, max_backlog_bytes=30_000) as stage:
            broker = await stage.broker()
            member = await stage.member(broker)
            for start in range(0, 400, 100):
                await broker.publish(stage.events(100, start=start))
                fresh = (await member.take(start + 100))[start:]
                dead = [_record(each, State.DEAD) for each in fresh]
                assert not await member.subscription.settle(member.progress(), aside=dead)

    play(scene())


# -- shares of a batch ----------------------------------------------------------------------------------------------


def _keys(partitions: int) -> list[str]:
    """A key of each partition."""
    keys = {partition_of(f"key-{n}", partitions): f"key-{n}" for n in range(100)}
    return [keys[index] for index in range(partitions)]


async def _spread(stage: Stage, broker: Broker, counts: Sequence[int]) -> None:
    """So many events for each partition."""
    for key, count in zip(_keys(len(counts)), counts, strict=True):
        for start in range(0, count, 500):
            events = [event(stage.topic, key, n) for n in range(start, min(count, start + 500))]
            await broker.publish(events)


def test_full_partitions_have_equal_shares_of_a_batch(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server, partitions=4) as stage:
            broker = await stage.broker()
            await _spread(stage, broker, [2_000] * 4)
            member = await (await stage.member(broker)).hold(4)
            while len(member.deliveries) < 4_000:
                await member.receive(limit=100)
            shares = Counter(each.partition.index for each in member.deliveries)
            assert all(900 <= shares[index] <= 1_100 for index in range(4)), shares
            sizes = _samples(broker, "xreadgroup_batch_size")
            assert sizes.keys() == {(stage.topic, str(index)) for index in range(4)}
            means = [sample.value / sum(sample.buckets) for sample in sizes.values()]
            assert max(means) < 1.5 * min(means), means

    play(scene())


def test_a_full_partition_starves_no_quiet_one(redis_server: RedisServer) -> None:
    """The quiet ones have their place in the very next read."""

    async def scene() -> None:
        async with staged(redis_server, partitions=4) as stage:
            broker = await stage.broker()
            await _spread(stage, broker, [8_000, 0, 0, 0])
            member = await (await stage.member(broker)).hold(4)
            while len(member.deliveries) < 2_000:
                await member.receive(limit=200)
            for _ in range(5):
                before = len(member.deliveries)
                await _spread(stage, broker, [0, 3, 3, 3])
                for _ in range(3):  # what was read before comes first
                    await member.receive(limit=200)
                shares = Counter(each.partition.index for each in member.deliveries[before:])
                assert [shares[index] for index in (1, 2, 3)] == [3, 3, 3], "the quiet ones waited for the full one"
                assert shares[0] > 300, "the full one had to wait"

    play(scene())


# -- events that another program removed ----------------------------------------------------------------------------


async def _lag(member: Member) -> int | None:
    (lag,) = (await member.subscription.lag()).values()
    return lag.undelivered


@pytest.mark.parametrize("left", [1_000, 300, 7, 0])
def test_events_trimmed_before_they_were_read_are_counted(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    """Scenario 15. The owner has read 750 events when another program cuts the stream."""

    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker, first = await stage.broker(), Partition(stage.topic, 0)
            await _filled(stage, broker, 750)
            member = await stage.member(broker)
            await member.take(750)
            assert not await member.settle(member.deliveries[:500])
            await member.subscription.pause(list(member.assigned))
            await _filled(stage, broker, 1_500)
            assert await _lag(member) == 1_500
            assert _value(broker, "stream_lost", first) == 0
            stage.client.xtrim(stage.keys.stream, maxlen=left, approximate=False)
            assert await _lag(member) == left
            assert await _lag(member) == left
            assert _value(broker, "stream_lost", first) == 1_500 - left
            await member.subscription.resume(list(member.assigned))
            await broker.publish(stage.events(5))
            await member.take(750 + left + 5)
            assert not await member.settle()
            assert await _lag(member) == 0
            assert _value(broker, "stream_lost", first) == 1_500 - left

    with caplog.at_level(logging.ERROR, "onward"):
        play(scene())
    assert [record.message.count("were removed from stream") for record in caplog.records] == [1]
    assert f"{1_500 - left:,} events" in caplog.text


@pytest.mark.parametrize("handled", [0, 1, 333, 600])
@pytest.mark.parametrize("killed", [False, True])
def test_events_trimmed_while_the_group_was_stopped_are_counted(
    redis_server: RedisServer, handled: int, killed: bool
) -> None:
    """Scenario 15. The progress says how many events were finished: the next owner finds the difference."""

    async def scene() -> None:
        async with staged(redis_server, lease_s=1.0) as stage:
            broker, first = await stage.broker(), Partition(stage.topic, 0)
            await _filled(stage, broker, 1_000)
            member = await (await stage.member(broker)).hold(1)
            if handled:
                await member.take(handled)
                assert not await member.settle(member.deliveries[:handled])
            if not killed:
                await member.subscription.close()
            stage.client.xtrim(stage.keys.stream, maxlen=150, approximate=False)
            if killed:  # what it had read goes with it
                await member.subscription.close()
            other = await stage.broker()
            member = await (await stage.member(other)).hold(1)
            await member.take(150)
            assert await _lag(member) == 0
            assert _value(other, "stream_lost", first) == 850 - handled

    play(scene())


def test_deleted_events_are_counted_and_a_new_group_misses_nothing(redis_server: RedisServer) -> None:
    async def scene() -> None:
        async with staged(redis_server) as stage:
            broker, first = await stage.broker(), Partition(stage.topic, 0)
            await _filled(stage, broker, 1_000)
            member = await (await stage.member(broker)).hold(1)
            client: Any = stage.client
            ids = [id_ for id_, _ in client.xrange(stage.keys.stream)]
            client.xdel(stage.keys.stream, *ids[900:950], *ids[10:20])
            await member.take(940)
            assert not await member.settle()
            assert await _lag(member) == 0
            assert _value(broker, "stream_lost", first) == 60
            stage.group = "new"
            late = await stage.broker()
            new = await stage.member(late)
            await new.take(940)
            assert await _lag(new) == 0
            assert _value(late, "stream_lost", first) == 50, "a new group misses only what lies behind its beginning"

    play(scene())


def test_counting_survives_settles_that_are_repeated() -> None:
    count = EventCount(100)
    count.add([5, 9, 12])
    assert [count.before(9), count.before(9), count.before(13)] == [101, 101, 103]
    assert count.missing(103, 3) == 0
    assert count.missing(110, 3) == 7
    assert count.missing(110, 3) == 0
    assert count.before(13) == 110
    unknown = EventCount(None)
    unknown.add([5, 9])
    assert unknown.before(6) is None
    assert unknown.missing(50, 2) == 0
    assert unknown.before(6) == 49


# -- metrics --------------------------------------------------------------------------------------------------------

# The queries of the event router's dashboards.
QUERIES = """
sum by (domain) (
    rate(event_router_reclaim_messages_total[5m])
)

event_router_reclaim_messages_total{domain="scan"}

histogram_quantile(0.99,
    rate(event_router_reclaim_latency_seconds_bucket{domain="chat"}[5m])
)
"""


def _exported(text: str) -> dict[str, list[dict[str, str]]]:
    """The labels of each time series, by the name of its metric."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def test_the_queries_of_the_event_router_find_its_metrics() -> None:
    figures = StreamFigures()
    for topic in ("scan", "chat"):
        for index in range(4):
            figures.reclaimed(Partition(topic, index), 3, 0.02)
            figures.batch(Partition(topic, index), 100)
    exported = _exported(exposition(of_broker(figures.figures(), []), prefix="event_router"))
    selectors = re.findall(r"(event_router_\w+)(?:\{(\w+)=\"(\w+)\"\})?", QUERIES)
    assert len(selectors) == 3
    for name, label, value in selectors:
        series = [labels for labels in exported[name] if not label or labels[label] == value]
        assert {labels["shard"] for labels in series} == {"0", "1", "2", "3"}
        assert all(labels.keys() - {"le"} == {"domain", "shard"} for labels in series)
    assert "event_router_xreadgroup_batch_size_bucket" in exported


def test_the_figures_of_several_workers_are_combined() -> None:
    parts = []
    for kept in (7, 5):
        figures, first = StreamFigures(), Partition("scan", 0)
        figures.kept(first, kept)
        figures.lost(first, kept)
        figures.batch(first, kept)
        parts.append(of_broker(figures.figures(), [reading(partition())]))
    families = {family.name: family for family in folded(parts)}
    assert [families[name].samples[0].value for name in ("stream_kept_events", "stream_lost")] == [7, 12]
    (batches,) = families["xreadgroup_batch_size"].samples
    assert (batches.value, sum(batches.buckets)) == (12, 2)
    assert families["stream_pending"].labels == ("domain", "group", "shard")
    assert [sample.value for sample in families["stream_pending"].samples] == [6]


def test_an_application_exports_the_figures_of_its_streams(redis_server: RedisServer) -> None:
    async def scene() -> None:
        topic = f"scan-{uuid4().hex[:8]}"
        app = Onward(redis_server.url, metrics_prefix="event_router", partitions=2)
        handled = 0

        @app.handler(topic, group="router")
        async def route(event: Event) -> None:
            nonlocal handled
            handled += 1

        for wanted in (50, 100):  # the second run has the same metrics, once
            async with app.running():
                await app.publish_many(topic, [(f"key-{n}", n) for n in range(50)])
                await until(functools.partial(lambda count: handled >= count, wanted))
                exported = _exported(app.metrics())
            labels = [{"domain": topic, "shard": str(index)} for index in range(2)]
            assert exported["event_router_xreadgroup_batch_size_count"] == labels
            with_group = [each | {"group": "router"} for each in labels]
            assert exported["event_router_stream_pending"] == with_group

    play(scene())
