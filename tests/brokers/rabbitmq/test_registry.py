"""The registry of topics and groups: two processes agree, and a creation that was cut short is completed."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import GroupSpec, TopicSpec, Topology
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import ChannelClosed, Connection, Outbound, Properties, encoded_properties
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.registry import registry, registry_fold, topic_objects
from onward.brokers.rabbitmq.registry.registry_fold import (
    GenerationSet,
    GroupAdded,
    GroupRemoved,
    GroupRouted,
    RegistryEntry,
    RegistryFold,
    TopicChanged,
    TopicCreated,
    TopicEntry,
    TopicMade,
    decoded,
    encoded,
)
from onward.brokers.rabbitmq.stream_reader import end_of
from onward.errors import BrokerError, PartitionsDiffer, PublishError
from onward.testing.scenario import event
from tests.brokers.rabbitmq.stage import grounded, played, until
from tests.servers.rabbitmq import RabbitMQServer

NAMES = st.sampled_from(["a", "b"])
PLACES = st.integers(0, 1) | st.just("work")
ENTRIES: st.SearchStrategy[list[RegistryEntry]] = st.lists(
    st.one_of(
        st.builds(TopicCreated, NAMES, st.integers(1, 3), st.uuids().map(str), st.just({}), st.just({}), st.just(0.0)),
        st.builds(TopicMade, NAMES, st.just("?"), st.just(0.0)),
        st.builds(TopicChanged, NAMES, st.just("?"), st.sampled_from(["ready", "dropping", "dropped"])),
        st.builds(GroupAdded, NAMES, NAMES, st.sampled_from(["ordered", "work"])),
        st.builds(GroupRouted, NAMES, NAMES, st.just(("x",))),
        st.builds(GroupRemoved, NAMES, NAMES, st.integers(0, 9)),
        st.builds(GenerationSet, NAMES, NAMES, PLACES, st.integers(0, 9)),
    ),
    max_size=30,
)


def applied(*entries: RegistryEntry) -> RegistryFold:
    fold = RegistryFold()
    for entry in entries:
        read_back = decoded(encoded(entry))
        assert read_back == entry
        fold.apply(read_back)
    return fold


def created(name: str, log_id: str, partitions: int = 2) -> TopicCreated:
    return TopicCreated(name, partitions, log_id, {"x-queue-type": "stream"}, {}, 5.0)


class TestFold:
    def test_the_first_of_two_creators_wins(self) -> None:
        fold = applied(created("t", "one", 2), created("t", "two", 9), TopicChanged("t", "two", "ready"))
        assert (fold.topics["t"].log_id, fold.topics["t"].partitions) == ("one", 2)
        assert fold.topics["t"].state == "created", "an entry about another life has no effect"

    def test_a_missing_stream_is_created_only_in_a_new_topic(self) -> None:
        def may_lack(*entries: RegistryEntry, now: float) -> bool:
            return applied(created("t", "one"), *entries).topics["t"].may_lack_streams(now)

        made = TopicMade("t", "one", 100.0)
        assert may_lack(now=1e9), "a creation that was cut short is completed at any time"
        assert may_lack(made, now=140.0), "a killed server may have forgotten it"
        assert may_lack(made, now=70.0), "the clock of another machine"
        assert not may_lack(made, now=161.0)
        assert not may_lack(made, now=39.0)
        assert not may_lack(made, TopicMade("t", "one", 300.0), now=301.0), "it was made once"
        assert not may_lack(made, TopicChanged("t", "one", "ready"), now=101.0)
        assert may_lack(TopicMade("t", "two", 100.0), now=1e9), "an entry about another life has no effect"

    def test_a_topic_that_was_dropped_can_be_created_again(self) -> None:
        dropped: list[RegistryEntry] = [
            created("t", "one"),
            TopicChanged("t", "one", "dropping"),
            TopicChanged("t", "one", "dropped"),
        ]
        fold = applied(*dropped, created("t", "two", 5), TopicChanged("t", "one", "dropped"))
        assert (fold.topics["t"].log_id, fold.topics["t"].partitions) == ("two", 5)

    def test_a_topic_that_is_being_deleted_is_never_ready_again(self) -> None:
        fold = applied(created("t", "one"), TopicChanged("t", "one", "dropping"), TopicChanged("t", "one", "ready"))
        assert fold.topics["t"].state == "dropping"

    def test_a_group_starts_above_the_fences_of_its_former_life(self) -> None:
        fold = applied(GroupAdded("t", "g", "ordered"), GroupRemoved("t", "g", 7), GroupAdded("t", "g", "work"))
        assert fold.groups("t")["g"].fence_floor == fold.fence_floor("t", "g") == 7
        assert fold.topics_of("g") == ["t"]
        assert fold.groups("t")["g"].kind == "work"
        fold.apply(GroupRemoved("t", "g", 3))
        fold.apply(GroupAdded("t", "g", "work"))
        assert fold.groups("t")["g"].fence_floor == 7

    def test_a_dropped_group_leaves_no_aside_to_a_later_one(self) -> None:
        fold = applied(GroupAdded("t", "g", "ordered"), GenerationSet("t", "g", 0, 4), GroupRemoved("t", "g", 1))
        assert fold.generation("t", "g", 0) == fold.generation("t", "g", 1) == 6
        assert fold.generation("t", "g", "work") == 6
        fold.apply(GenerationSet("t", "g", 1, 3))
        assert fold.generation("t", "g", 1) == 6, "a late entry of the former owner"
        assert fold.generation("t", "other", 0) == 0

    def test_a_generation_never_goes_back(self) -> None:
        assert applied(GenerationSet("t", "g", 0, 4), GenerationSet("t", "g", 0, 2)).generation("t", "g", 0) == 4

    def test_the_routes_of_a_group_are_replaced(self) -> None:
        fold = applied(GroupRouted("t", "g", ("a",)), GroupAdded("t", "g", "work"), GroupRouted("t", "g", ("b", "c")))
        assert fold.groups("t")["g"].routes == ("b", "c")

    def test_entries_of_a_later_version_are_ignored(self) -> None:
        assert decoded(b"\x81\xa4type\xa6future") is None
        assert decoded(b"") is None
        assert decoded(b"\x81\xa4type\xa5topi\xff") is None, "text that is not UTF-8"

    @given(ENTRIES)
    def test_fences_and_generations_never_fall(self, entries: list[RegistryEntry]) -> None:
        fold = RegistryFold()
        floors: dict[tuple[str, str], int] = {}
        generations: dict[tuple[str, str, object], int] = {}
        for entry in entries:
            fold.apply(entry)
            for topic in ("a", "b"):
                for group, found in fold.groups(topic).items():
                    assert found.fence_floor >= floors.get((topic, group), 0)
                    floors[topic, group] = found.fence_floor
                for group in ("a", "b"):
                    for place in (0, 1, "work"):
                        now = fold.generation(topic, group, place)
                        assert now >= generations.get((topic, group, place), 0)
                        generations[topic, group, place] = now


@pytest.fixture
def url(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    with rabbitmq_server.vhost() as vhost:
        yield rabbitmq_server.url_of(vhost)


async def missing(each: RabbitGround, topic: str) -> list[int]:
    entry = each.registry.topic(topic)
    assert entry is not None

    async def look() -> list[int]:
        return await topic_objects.missing(await each.query(), entry)

    return await each.io.run(look())


def is_ready(each: RabbitGround, topic: str) -> bool:
    entry = each.registry.topic(topic)
    return entry is not None and entry.state == "ready"


async def deleted(each: RabbitGround, queue: str) -> None:
    async def delete() -> None:
        channel = await (await each.query()).channel()
        await channel.delete_queue(queue)
        await channel.close()

    await each.io.run(delete())


@pytest.mark.servers
class TestOnAServer:
    @played
    async def test_two_creators_race_and_agree(self, url: str) -> None:
        async with grounded(url) as one, grounded(url) as two:
            made = await asyncio.gather(
                *[each.io.run(each.registry.create_topic("t", count)) for each, count in ((one, 2), (two, 3))]
            )
            assert made[0].log_id == made[1].log_id
            assert made[0].partitions == made[1].partitions
            assert await missing(one, "t") == []
            for each in (one, two):
                await each.io.run(each.registry.catch_up())
                assert [topic.log_id for topic in each.registry.topics()] == [made[0].log_id]

    @played
    async def test_a_new_stream_has_a_founding_message(self, url: str) -> None:
        async with grounded(url) as one:
            await one.io.run(one.registry.create_topic("t", 2))

            async def check() -> list[int]:
                connection = await one.query()
                channel = await connection.channel()
                sent = Outbound("", names.stream("t", 1), encoded_properties(Properties()), b"")
                assert await channel.publish([sent, sent]) == [None, None]
                return [await end_of(connection, names.stream("t", index)) for index in range(2)]

            assert await one.io.run(check()) == [1, 3]

    @played
    async def test_a_creation_that_was_cut_short_is_completed_by_the_next_process(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def crash(*_: object, **__: object) -> None:
            raise BrokerError("the process dies here")

        async with grounded(url) as one, grounded(url) as two:
            with monkeypatch.context() as patch:
                patch.setattr(topic_objects, "create", crash)
                with pytest.raises(BrokerError):
                    await one.io.run(one.registry.create_topic("t", 2))
            assert await missing(one, "t") == [0, 1]
            entry = await two.io.run(two.registry.create_topic("t", 5))
            assert entry.partitions == 2, "the entry counts, not what the second process wants"
            assert await missing(two, "t") == []

    @played
    async def test_a_topic_is_ready_some_seconds_later_and_then_a_missing_stream_is_not_created_again(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registry, "SETTLED_S", 0.2)
        async with grounded(url) as one, grounded(url) as two:
            await one.io.run(one.registry.create_topic("t", 2))
            await deleted(one, names.stream("t", 1))
            await two.io.run(two.registry.create_topic("t", 2))
            assert await missing(one, "t") == [], "created and not ready: a missing stream is created again"
            await until(lambda: is_ready(one, "t"))
            await until(lambda: is_ready(two, "t"))
            await deleted(one, names.stream("t", 1))
            await two.io.run(two.registry.create_topic("t", 2))
            assert await missing(one, "t") == [1], "its events are gone, and that must be seen"

    @played
    async def test_a_creation_that_stopped_half_way_is_completed_long_after(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registry_fold, "SETTLED_S", 0.0)
        monkeypatch.setattr(registry_fold, "FORGOTTEN_S", 0.0)

        async def crash(connection: Connection, topic: TopicEntry, **_: object) -> None:
            channel = await connection.channel()
            await channel.declare_queue(names.stream("t", 0), arguments=topic.arguments)
            raise BrokerError("the process dies here")

        async with grounded(url) as one, grounded(url) as two:
            with monkeypatch.context() as patch:
                patch.setattr(topic_objects, "create", crash)
                with pytest.raises(BrokerError):
                    await one.io.run(one.registry.create_topic("t", 2))
            assert await missing(one, "t") == [1]
            await two.io.run(two.registry.create_topic("t", 2))
            assert await missing(two, "t") == []

    @played
    async def test_commands_that_end_at_once_do_not_create_a_deleted_stream_again(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No process lives long enough to mark the topic as ready some seconds after it was created."""
        monkeypatch.setattr(registry_fold, "SETTLED_S", 0.0)
        monkeypatch.setattr(registry_fold, "FORGOTTEN_S", 0.0)
        async with grounded(url) as command:
            await command.io.run(command.registry.create_topic("t", 2))

        async with grounded(url) as later:
            await deleted(later, names.stream("t", 1))
            await later.io.run(later.registry.create_topic("t", 2))
            assert await missing(later, "t") == [1]

        broker = await open_broker(settings.load(url))
        try:
            with pytest.raises(PublishError, match=r"stream onward\.t\.1 does not exist.*drop_topic\('t'\)"):
                await broker.publish([event("t", f"key-{number}", number) for number in range(20)])
            await broker.drop_topic("t")
            await broker.publish([event("t", "key", 1)])
        finally:
            await broker.close()

    @played
    async def test_the_second_command_marks_a_complete_topic_as_ready(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with grounded(url) as first:
            await first.io.run(first.registry.create_topic("t", 2))
            assert not is_ready(first, "t")
        monkeypatch.setattr(registry_fold, "SETTLED_S", 0.0)
        async with grounded(url) as second:
            await second.io.run(second.registry.create_topic("t", 2))
            assert is_ready(second, "t"), "before the command ends"

    @played
    async def test_a_topic_that_was_dropped_and_created_again_has_another_log_and_no_old_event(self, url: str) -> None:
        async with grounded(url) as one, grounded(url) as two:
            first = await one.io.run(one.registry.create_topic("t", 2))
            await one.io.run(one.registry.drop_topic("t"))
            await one.io.run(one.registry.drop_topic("t"))
            assert one.registry.topic("t") is None
            second = await two.io.run(two.registry.create_topic("t", 3))
            assert second.log_id != first.log_id
            assert second.partitions == 3
            assert await missing(two, "t") == []

    @played
    async def test_a_drop_that_was_cut_short_is_completed_by_the_next_creation(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def crash(*_: object, **__: object) -> None:
            raise BrokerError("the process dies here")

        async with grounded(url) as one, grounded(url) as two:

            async def publish() -> None:
                channel = await (await one.query()).channel()
                await channel.publish([Outbound("", names.stream("t", 0), encoded_properties(Properties()), b"old")])
                await channel.close()

            async def end() -> int:
                return await end_of(await two.query(), names.stream("t", 0))

            await one.io.run(one.registry.create_topic("t", 1))
            await one.io.run(publish())
            with monkeypatch.context() as patch:
                patch.setattr(topic_objects, "delete", crash)
                with pytest.raises(BrokerError):
                    await one.io.run(one.registry.drop_topic("t"))
            assert one.registry.topic("t") is None
            await two.io.run(two.registry.create_topic("t", 1))
            assert await two.io.run(end()) == 1, "only the founding message"

    @played
    async def test_groups_are_shared_and_have_one_kind(self, url: str) -> None:
        async with grounded(url) as one, grounded(url) as two:
            await one.io.run(one.registry.create_topic("t", 1))
            await one.io.run(one.registry.add_group("t", "g", "ordered"))
            await two.io.run(two.registry.catch_up())
            assert two.registry.groups("t")["g"].kind == "ordered"
            with pytest.raises(BrokerError, match=r"reads with order.*onward groups drop"):
                await two.io.run(two.registry.add_group("t", "g", "work"))
            await one.io.run(one.registry.drop_group("t", "g", 12))
            entry = await two.io.run(two.registry.add_group("t", "g", "work"))
            assert (entry.kind, entry.fence_floor) == ("work", 12)
            assert two.registry.generation("t", "g", "work") == 2
            await two.io.run(two.registry.set_generation("t", "g", "work", 3))
            await two.io.run(two.registry.set_routes("t", "g", ["0.#"]))
            await one.io.run(one.registry.catch_up())
            assert one.registry.generation("t", "g", "work") == 3
            assert one.registry.groups("t")["g"].routes == ("0.#",)

    @played
    async def test_the_registry_is_followed_again_after_a_cut(self, url: str, rabbitmq_server: RabbitMQServer) -> None:
        with rabbitmq_server.proxy() as proxy:
            vhost = url.rsplit("/", 1)[1]
            async with grounded(rabbitmq_server.url_of(vhost, proxy.url)) as one, grounded(url) as two:
                await one.io.run(one.registry.create_topic("a", 1))
                proxy.cut()
                await two.io.run(two.registry.create_topic("b", 1))
                proxy.mend()
                await until(lambda: [topic.name for topic in one.registry.topics()] == ["a", "b"])
                await one.io.run(one.registry.add_group("b", "g", "work"))

    @played
    async def test_an_exchange_of_another_kind_under_our_name_is_named(self, url: str) -> None:
        async with grounded(url) as one:

            async def take_the_name() -> None:
                channel = await (await one.query()).channel()
                await channel.declare_exchange(names.exchange("t"), "fanout")
                await channel.close()

            await one.io.run(take_the_name())
            with pytest.raises(BrokerError, match=r"exchange onward\.t: it exists and differs: type is fanout"):
                await one.io.run(one.registry.create_topic("t", 1))

    @played
    async def test_a_deleted_registry_is_an_error_with_a_cure(self, url: str) -> None:
        async with grounded(url) as one:
            await one.io.run(one.registry.create_topic("old", 1))
            await deleted(one, names.REGISTRY)
            with pytest.raises(BrokerError, match=r"onward\.registry.*start all applications again"):
                await one.io.run(one.registry.catch_up())
            with pytest.raises((BrokerError, ChannelClosed)):
                await one.io.run(one.registry.create_topic("t", 1))

    @played
    async def test_after_the_registry_was_deleted_a_topic_cannot_get_another_number_of_partitions(
        self, url: str
    ) -> None:
        """With fewer, the events of the other streams would never be read."""
        async with grounded(url) as one:
            await one.io.run(one.registry.create_topic("old", 3))
            await deleted(one, names.REGISTRY)
        async with grounded(url) as two:
            with pytest.raises(PartitionsDiffer, match=r"topic old has 3 streams.*partitions=3"):
                await two.io.run(two.registry.create_topic("old", 2))
            with pytest.raises(PartitionsDiffer):
                await two.io.run(two.registry.create_topic("old", 4))
            assert (await two.io.run(two.registry.create_topic("old", 3))).partitions == 3

    @played
    async def test_streams_that_another_process_is_just_creating_belong_to_a_listed_topic(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check = topic_objects.check_unlisted

        async with grounded(url) as one, grounded(url) as two:

            async def check_late(connection: Connection, name: str, partitions: int) -> None:
                monkeypatch.setattr(topic_objects, "check_unlisted", check)
                await one.io.run(one.registry.create_topic(name, 3))
                await check(connection, name, partitions)

            await two.io.run(two.registry.create_topic("first", 1))  # so that both follow the registry
            monkeypatch.setattr(topic_objects, "check_unlisted", check_late)
            assert (await two.io.run(two.registry.create_topic("t", 8))).partitions == 3

    @played
    async def test_a_process_that_only_looks_creates_nothing(self, url: str, rabbitmq_server: RabbitMQServer) -> None:
        vhost = url.rsplit("/", 1)[1]
        wanted = Topology([TopicSpec("t", 2)], groups=[GroupSpec("t", "g", "key", "earliest")])
        looking = await open_broker(settings.load(url))
        try:
            assert await looking.topics() == []
            assert [each.action for each in await looking.declare(wanted, apply=False)] == ["create", "create"]
            found = [(each.level, each.what) for each in await looking.diagnose()]
            none = f"there is no topic and no group: stream {names.REGISTRY}, which lists them, does not exist"
            assert ("ok", none) in found
            assert rabbitmq_server.queues(vhost) == {}
            async with grounded(url) as other:
                await other.io.run(other.registry.create_topic("t", 2))
            assert [each.name for each in await looking.topics()] == ["t"], "it sees what others create later"
        finally:
            await looking.close()

    @played
    async def test_two_processes_create_the_registry_at_the_same_time(self, url: str) -> None:
        async with grounded(url) as one, grounded(url) as two:
            await asyncio.gather(
                one.io.run(one.registry.add_group("a", "g", "work")),
                one.io.run(one.registry.add_group("b", "g", "work")),
                two.io.run(two.registry.add_group("c", "g", "work")),
            )
            for each in (one, two):
                await each.io.run(each.registry.catch_up())
                assert each.registry.group_topics("g") == ["a", "b", "c"]
