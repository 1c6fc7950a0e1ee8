"""A real cluster of three nodes that loses one of them, or two, or whose node is silent: nothing that was accepted is
lost, each key runs in order, and the application is ready again by itself."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from onward import Event, Onward, clock, settings
from onward.brokers import open_broker
from onward.brokers.base import Broker
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import Channel, Outbound, Received
from onward.brokers.rabbitmq.ordered.token import Token, decoded
from onward.brokers.rabbitmq.ordered.token_channel import TokenChannel
from onward.context import current
from onward.errors import PublishError
from onward.event import Partition
from onward.testing.scenario import Member, event, first_times
from tests.brokers.rabbitmq.fault_shop import GROUP, KINDS, SETTINGS, TOPIC, FaultShop, rarely_fail, some_fail, until
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq_cluster import ClusterNode, RabbitMQCluster
from tests.servers.server import until as until_held

pytestmark = [pytest.mark.servers, pytest.mark.more, pytest.mark.timeout(900)]

kinds = pytest.mark.parametrize("kind", KINDS)

STREAM = f"onward.{TOPIC}.0"
TOKEN = f"onward.{TOPIC}:{GROUP}:0.token"
WORK_QUEUE = f"onward.{TOPIC}:{GROUP}:work"
LEADING = {"ordered": STREAM, "work": WORK_QUEUE}  # by kind: the queue whose leader is killed

LEASE_S: float = SETTINGS["lease_s"]
HEARTBEAT_S: float = SETTINGS["client"]["heartbeat_s"]
AT_ONCE = 10  # calls
LATE_S = 1.0  # a busy machine starts an event so long after the decision to start it
FLOWS_S = 180.0  # a publish takes up to 30 s while streams have no leader, and may then begin again
# RabbitMQ 3.10 starts the streams of a silent node one after the other on the other nodes, and first waits 7 s for that
# node with each of them.
SILENCE_S = 120.0
OUTAGE_S = 65.0
ROUNDS = 2


@pytest.fixture
def vhost(rabbitmq_cluster: RabbitMQCluster) -> Iterator[str]:
    with rabbitmq_cluster.vhost() as name:
        yield name


@pytest.fixture
def other_vhost(rabbitmq_cluster: RabbitMQCluster) -> Iterator[str]:
    with rabbitmq_cluster.vhost() as name:
        yield name


def troubles(shop: FaultShop) -> str:
    return " ".join(shop.app.health().troubles)


@asynccontextmanager
async def load(*shops: FaultShop) -> AsyncIterator[None]:
    """Publish all the time, until the end of the block."""
    over = asyncio.Event()

    async def publish(shop: FaultShop) -> None:
        while not over.is_set():
            await shop.publish(10)
            await asyncio.sleep(0.1)

    publishing = [asyncio.create_task(publish(shop)) for shop in shops]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*publishing)


async def flows(*shops: FaultShop, within_s: float = FLOWS_S) -> None:
    """Wait until the applications are ready, and each has handled events that were published after this call."""
    for shop in shops:
        await until(lambda shop=shop: shop.app.health().ready, "the application is ready", shop, within_s)  # type: ignore[misc]
        first = shop._next
        await until(
            lambda shop=shop, first=first: sum(n >= first for _, n in shop.runs[-200:]) >= 20,  # type: ignore[misc]
            "events are published and handled",
            shop,
            within_s,
        )


async def founded(cluster: RabbitMQCluster, vhost: str, kind: str, partitions: int = 2) -> ClusterNode:
    """Create the topic and the group. Returns the node with the leader of its main queue."""
    async with FaultShop(cluster.url_of(vhost), kind, partitions=partitions).open() as shop:
        await shop.publish(10)
    leader = await asyncio.to_thread(cluster.leader, vhost, LEADING[kind])
    await asyncio.to_thread(leader.until_durable, vhost)
    return leader


def others(cluster: RabbitMQCluster, node: ClusterNode) -> list[ClusterNode]:
    return [each for each in cluster.nodes if each is not node]


# -- a node is killed -------------------------------------------------------------------------------------------------

LEADERS = {
    "of a stream, and our connections": ("ordered", STREAM, True),
    "of a token queue": ("ordered", TOKEN, False),
    "of a work queue": ("work", WORK_QUEUE, False),
}


@pytest.mark.parametrize("case", LEADERS)
def test_the_node_with_a_leader_is_killed_under_load_and_comes_back(
    rabbitmq_cluster: RabbitMQCluster, vhost: str, case: str
) -> None:
    kind, queue, is_ours = LEADERS[case]

    async def scene() -> None:
        await founded(rabbitmq_cluster, vhost, kind)
        leader = await asyncio.to_thread(rabbitmq_cluster.leader, vhost, queue)
        first = [leader] if is_ours else others(rabbitmq_cluster, leader)
        url = rabbitmq_cluster.url_of(vhost, *first)
        async with FaultShop(url, kind, rarely_fail).open() as shop, load(shop):
            await flows(shop)
            await asyncio.to_thread(leader.until_durable, vhost)
            await asyncio.to_thread(leader.kill)
            await flows(shop)
            assert not leader.running
            await asyncio.to_thread(leader.start)
            await flows(shop)

    asyncio.run(scene())


def test_two_nodes_go_on_while_the_third_is_dead_for_longer_than_a_minute(
    rabbitmq_cluster: RabbitMQCluster, vhost: str, other_vhost: str
) -> None:
    """Our connections are at that node when it dies."""
    cluster = rabbitmq_cluster

    async def scene() -> None:
        leader = await founded(cluster, vhost, "ordered")
        await founded(cluster, other_vhost, "work")
        async with (
            FaultShop(cluster.url_of(vhost, leader), "ordered", rarely_fail).open() as ordered,
            FaultShop(cluster.url_of(other_vhost, leader), "work", rarely_fail).open() as work,
            load(ordered, work),
        ):
            await flows(ordered, work)
            await asyncio.to_thread(leader.kill)
            back_at = clock.now() + OUTAGE_S
            while clock.now() < back_at:
                await flows(ordered, work)
                await asyncio.sleep(1.0)
            assert not leader.running
            await asyncio.to_thread(leader.start)
            await flows(ordered, work)

    asyncio.run(scene())


@kinds
def test_an_accepted_event_survives_the_death_of_its_leader_at_once(
    rabbitmq_cluster: RabbitMQCluster, vhost: str, kind: str
) -> None:
    """The node is killed at the moment when publish returns, while no member runs. It is dead while the others read."""
    cluster = rabbitmq_cluster

    async def scene() -> None:
        await founded(cluster, vhost, kind)
        for _ in range(ROUNDS):
            leader = await asyncio.to_thread(cluster.leader, vhost, LEADING[kind])
            shop = FaultShop(cluster.url_of(vhost, *others(cluster, leader)), kind, client={"cluster_nodes": 3})
            async with shop.app:
                assert shop.app.broker.features.durability == "replicated"
                await shop.publish(1)  # so that the next call only publishes
                await shop.publish(200)
                leader.kill()
                assert len(shop.accepted) == 201
            reader = FaultShop(cluster.url_of(vhost, *others(cluster, leader)), kind)
            reader.accepted = shop.accepted
            async with reader.open():
                await reader.settled()
            assert not leader.running
            await asyncio.to_thread(cluster.heal)

    asyncio.run(scene())


def test_the_management_api_of_any_node_says_that_there_are_copies(
    rabbitmq_cluster: RabbitMQCluster, vhost: str
) -> None:
    async def scene() -> None:
        for node in rabbitmq_cluster.nodes:
            async with broker_at(rabbitmq_cluster.url_of(vhost), management_url=node.management_url) as broker:
                assert broker.features.durability == "replicated"

    asyncio.run(scene())


@asynccontextmanager
async def broker_at(url: str, **client: Any) -> AsyncIterator[Broker]:
    given = {**SETTINGS, "partitions": 1, "client": {"heartbeat_s": HEARTBEAT_S, **client}}
    broker = await open_broker(settings.load(url, **given))
    try:
        yield broker
    finally:
        await broker.close()


# -- a node is silent -------------------------------------------------------------------------------------------------


@kinds
def test_a_node_that_stops_is_left_for_another_host(rabbitmq_cluster: RabbitMQCluster, vhost: str, kind: str) -> None:
    """It still accepts connections, and never answers. Our connections are there."""
    cluster = rabbitmq_cluster

    async def scene() -> None:
        node = await founded(cluster, vhost, kind, partitions=1)
        async with FaultShop(cluster.url_of(vhost, node), kind, rarely_fail, partitions=1).open() as shop, load(shop):
            await flows(shop)
            await asyncio.to_thread(node.pause)
            await until(lambda: not shop.app.health().ready, "readiness ends", shop)
            await flows(shop, within_s=SILENCE_S)
            assert node.paused
            await asyncio.to_thread(node.resume)
            await flows(shop)
            await asyncio.to_thread(cluster.heal)
            await flows(shop)

    asyncio.run(scene())


class EventStart(NamedTuple):
    """A handler was called."""

    member: str
    at: float
    partition: int
    fence: int
    key: str
    n: int


class SlowMember:
    """A member whose calls wait until it `may_go_on`, so that it has events in memory when it is cut off."""

    def __init__(self, name: str, url: str, kind: str, starts: list[EventStart]) -> None:
        self.app = Onward(url, **SETTINGS)
        self.may_go_on = asyncio.Event()

        @self.app.handler(TOPIC, group=GROUP, concurrency=AT_ONCE, **KINDS[kind])
        async def handle(n: int, event: Event) -> None:
            run = current()
            starts.append(EventStart(name, clock.now(), run.partition.index, run.fence or 0, event.key or "", n))
            await self.may_go_on.wait()
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def open(self) -> AsyncIterator["SlowMember"]:
        async with self.app:
            running = asyncio.create_task(self.app.run())
            try:
                await self.is_ready()
                yield self
            finally:
                self.app.stop()
                await running

    async def is_ready(self) -> None:
        async with asyncio.timeout(60):
            while not self.app.health().ready:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@kinds
def test_an_owner_that_is_cut_off_starts_nothing_after_its_lease(
    rabbitmq_cluster: RabbitMQCluster, vhost: str, kind: str
) -> None:
    """Nothing tells it that it is cut off. What it wrote meanwhile arrives late and has no effect."""
    near, *far = rabbitmq_cluster.nodes
    starts: list[EventStart] = []

    async def scene(proxy: Proxy) -> None:
        url = rabbitmq_cluster.url_of(vhost, *far)
        async with (
            SlowMember("cut off", near.url_of(vhost, proxy.url), kind, starts).open() as one,
            SlowMember("other", url, kind, starts).open() as two,
        ):
            two.may_go_on.set()
            await two.app.broker.publish([event(TOPIC, f"key-{n % 5}", n) for n in range(1_000)])
            await waited(lambda: {each.member for each in starts} == {"cut off", "other"})
            if kind == "work":  # what it got beside these is in memory
                await waited(lambda: sum(each.member == "cut off" for each in starts) == AT_ONCE)
            proxy.stall()
            stalled_at = clock.now()
            one.may_go_on.set()
            await waited(lambda: not one.app.health().ready)
            await waited(lambda: {each.n for each in starts} == set(range(1_000)))
            late = [each.at for each in starts if each.member == "cut off" and each.at > stalled_at]
            sure_s = LEASE_S if kind == "ordered" else 2 * HEARTBEAT_S
            assert late, "it had nothing in memory"
            assert max(late) < stalled_at + sure_s + LATE_S
            proxy.mend()
            await one.is_ready()
            await two.app.broker.publish([event(TOPIC, f"key-{n % 5}", n) for n in range(1_000, 1_200)])
            await waited(lambda: {each.n for each in starts} == set(range(1_200)))

    with near.proxy() as proxy:
        asyncio.run(scene(proxy))
    if kind == "ordered":
        check_owners(starts)


async def waited(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(FLOWS_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def check_owners(starts: list[EventStart]) -> None:
    """Each partition has one owner at a time, with ascending fences, and each key ran in order."""
    for partition in {each.partition for each in starts}:
        fences = [each.fence for each in starts if each.partition == partition]
        assert fences == sorted(fences), "a former owner has started an event"
    for before, after in pairwise(sorted(starts, key=lambda each: (each.partition, each.fence))):
        if (before.partition, before.fence) == (after.partition, after.fence):
            assert before.member == after.member, "two members have the same fence"
    for key, first in first_times((each.key, each.n) for each in starts).items():
        assert first == sorted(first), f"{key} ran out of order"


def test_a_late_token_of_a_former_owner_has_no_effect(
    rabbitmq_cluster: RabbitMQCluster, vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's node is silent, and the others give the token to the next member. Then the node goes on, and passes
    on what the former owner has written: its connection was never cut."""
    near, *far = rabbitmq_cluster.nodes
    seen: list[tuple[str, Token]] = []  # who got a token, and the token
    arrived = TokenChannel._arrived

    def watched(desk: TokenChannel, messages: list[Received]) -> None:
        tokens = [decoded(each.body) for each in messages]
        seen.extend((desk.name, each) for each in tokens if isinstance(each, Token))
        arrived(desk, messages)

    monkeypatch.setattr(TokenChannel, "_arrived", watched)

    async def scene() -> None:
        async with (
            broker_at(near.url_of(vhost), heartbeat_s=60) as one_broker,
            broker_at(rabbitmq_cluster.url_of(vhost, *far)) as two_broker,
        ):
            one = await (await Member.join(one_broker, TOPIC, GROUP)).hold(1)
            two = await Member.join(two_broker, TOPIC, GROUP)
            await two_broker.publish([event(TOPIC, "key", n) for n in range(20)])
            await one.take(20)
            assert not await one.settle(one.deliveries[:5])
            await asyncio.to_thread(near.pause)
            late = asyncio.create_task(one.settle())
            await two.hold(1)
            assert clock.now() > one.subscription.sure_until()
            assert await late == [Partition(TOPIC, 0)], "a settle counts although its token did not come back"
            (before,), (after,) = one.assigned.values(), two.assigned.values()
            assert (before.fence or 0) < (after.fence or 0)
            await two.take(15)
            assert two.values == list(range(5, 20)), "the late settle has an effect"
            await asyncio.to_thread(near.resume)
            healing = asyncio.create_task(asyncio.to_thread(rabbitmq_cluster.heal))
            await two.until(lambda: is_over(seen, before.fence or 0) or healing.done())
            assert not await two.settle(two.deliveries[:5])
            await healing
            assert not await two.settle()
            assert list(two.assigned.values()) == [after]
            print(f"the late token arrived: {is_over(seen, before.fence or 0)}")  # noqa: T201

    asyncio.run(scene())


def is_over(seen: list[tuple[str, Token]], fence: int) -> bool:
    """Whether another member than its writer got a token of this fence, after a token with a higher one."""
    higher = [at for at, (_, token) in enumerate(seen) if token.fence > fence]
    return any(token.fence == fence and name != token.tenure for name, token in seen[higher[0] :]) if higher else False


# -- a node without a replica -----------------------------------------------------------------------------------------


@kinds
def test_a_node_without_a_replica_is_left_for_the_next_host(
    rabbitmq_cluster: RabbitMQCluster, vhost: str, kind: str
) -> None:
    """First under a running application, then for one that starts."""
    near, *far = rabbitmq_cluster.nodes
    url = rabbitmq_cluster.url_of(vhost, near)

    async def scene() -> None:
        async with FaultShop(rabbitmq_cluster.url_of(vhost, *far), kind, some_fail).open() as shop:
            await shop.publish(50)
        async with FaultShop(url, kind, some_fail).open() as shop:
            await shop.publish(50)
            await shop.settled()
            async with load(shop):
                await asyncio.to_thread(remove_replicas, near, vhost)
                await flows(shop)
        async with FaultShop(url, kind, some_fail).open() as shop:
            await shop.publish(50)
            await shop.settled()

    asyncio.run(scene())


def remove_replicas(node: ClusterNode, vhost: str) -> None:
    """The node loses its copies of all streams of the virtual host, as `rabbitmq-streams delete_replica` does it."""
    streams = [name for name, each in node.queues(vhost).items() if each["type"] == "stream"]
    for name in streams:
        said = node.ctl("eval", f'rabbit_stream_queue:delete_replica(<<"{vhost}">>, <<"{name}">>, \'{node.node}\').')
        assert "ok" in said, f"{name}: {said}"


# -- a node lags behind -----------------------------------------------------------------------------------------------

# What sends a stream from its leader to the copy at another node. In Erlang, for `rabbitmqctl eval`.
_SENDERS = """[P || {_, P, _, _} <- supervisor:which_children(osiris_replica_reader_sup), is_pid(P),
    S <- [sys:get_state(P)], lists:any(fun(X) -> is_pid(X) andalso node(X) =:= '%s' end, tuple_to_list(S)),
    string:find(lists:flatten(io_lib:format("~p", [S])), "%s") =/= nomatch]"""


def hold_back(cluster: RabbitMQCluster, node: ClusterNode, stream: str) -> None:
    """This node gets nothing more of the stream."""
    senders = _SENDERS % (node.node, re.sub("[^a-z0-9-]", "_", f"{stream}_"))

    def is_held() -> bool:
        counts = [each.ctl("eval", f"length([sys:suspend(P) || P <- {senders}]).") for each in others(cluster, node)]
        return any(int(count) for count in counts)

    until_held(is_held, FLOWS_S, f"{stream} is not copied to {node.node}", node.log)


def go_on(cluster: RabbitMQCluster, node: ClusterNode) -> None:
    for each in others(cluster, node):
        each.ctl("eval", "[sys:resume(P) || {_, P, _, _} <- supervisor:which_children(osiris_replica_reader_sup)].")


LAGGING = {"of a partition": ("ordered", STREAM), "of topics and groups": ("work", names.REGISTRY)}


@pytest.mark.parametrize("case", LAGGING)
def test_a_copy_that_lags_behind_is_not_taken_for_a_log_that_lost_its_end(
    rabbitmq_cluster: RabbitMQCluster,
    vhost: str,
    case: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a node which has just come back. The application moves to that node, and waits for what it lacks."""
    kind, stream = LAGGING[case]
    sent: list[str] = []
    send = Channel.send

    def watched(channel: Channel, messages: Sequence[Outbound]) -> int:
        sent.extend(each.routing_key for each in messages)
        return send(channel, messages)

    def has_lost() -> list[str]:
        return [each.message for each in caplog.records if "has lost" in each.message]

    async def scene() -> None:
        await founded(rabbitmq_cluster, vhost, kind)
        leader = await asyncio.to_thread(rabbitmq_cluster.leader, vhost, stream)
        near = others(rabbitmq_cluster, leader)[0]
        async with FaultShop(rabbitmq_cluster.url_of(vhost, leader, near), kind).open() as shop:
            await shop.publish(50)
            await shop.settled()
            await asyncio.to_thread(hold_back, rabbitmq_cluster, near, f"{vhost}_{stream}")
            await shop.publish(50)
            await shop.settled()
            await shop.app.publish("other", 0)  # so that this process knows more topics than that node
            sent.clear()
            await asyncio.to_thread(leader.close_connections, vhost)
            await until(lambda: stream in sent or bool(has_lost()), "it asks for the end of the stream", shop)
            await asyncio.to_thread(go_on, rabbitmq_cluster, near)
            await shop.publish(50)
            await shop.settled()
            assert not has_lost()

    monkeypatch.setattr(Channel, "send", watched)
    asyncio.run(scene())


# -- the majority is lost ---------------------------------------------------------------------------------------------


def test_without_a_majority_events_are_refused_and_it_goes_on_afterwards(
    rabbitmq_cluster: RabbitMQCluster, vhost: str, other_vhost: str
) -> None:
    """The node that is left stops serving."""
    cluster = rabbitmq_cluster

    async def refused(shop: FaultShop) -> None:
        lost = 1_000_000  # the number of an event whose fate is unknown
        shop.unknown.add(lost)
        began = clock.now()
        with pytest.raises(PublishError) as error:
            await shop.app.broker.publish([event(TOPIC, "lost", lost)])
        assert clock.now() - began < 8
        # It may have been sent to the node that is left, before that closed its connections.
        assert re.search("not accepted: .*cannot be reached|it is unknown whether 1 event was", str(error.value))

    async def scene() -> None:
        await founded(cluster, vhost, "ordered")
        await founded(cluster, other_vhost, "work")
        async with (
            FaultShop(cluster.url_of(vhost), "ordered", publish_timeout_s=4.0).open() as ordered,
            FaultShop(cluster.url_of(other_vhost), "work", publish_timeout_s=4.0).open() as work,
        ):
            async with load(ordered, work):
                await flows(ordered, work)
                for node in cluster.nodes[:2]:
                    await asyncio.to_thread(node.kill)
                for shop in (ordered, work):
                    await until(lambda shop=shop: not shop.app.health().ready, "readiness ends", shop)  # type: ignore[misc]
            await asyncio.gather(refused(ordered), refused(work))
            for shop in (ordered, work):
                assert not shop.app.health().ready
                await until(lambda shop=shop: "cannot be reached" in troubles(shop), "the cause is named", shop)  # type: ignore[misc]
            await asyncio.to_thread(cluster.heal)
            async with load(ordered, work):
                await flows(ordered, work)

    asyncio.run(scene())
