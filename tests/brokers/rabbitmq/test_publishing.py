"""Publishing to RabbitMQ: what is returned, refused, cut off or blocked is named, and what is accepted is stored."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Broker, TopicSpec, Topology
from onward.brokers.core.publishing import BEHIND, Outgoing, Window
from onward.brokers.rabbitmq import Binding, Exchange, Queue, names
from onward.brokers.rabbitmq.address import RabbitAddress
from onward.brokers.rabbitmq.amqp import ChannelClosed, Connection, ConnectionLost, Outbound, PublishAnswer, Received
from onward.brokers.rabbitmq.connecting import connected
from onward.brokers.rabbitmq.message import from_stream, packed
from onward.brokers.rabbitmq.publish.sending import RabbitPacked, RabbitSending, RabbitWindow
from onward.brokers.rabbitmq.stream_reader import end_of, read
from onward.errors import Backlogged, BrokerError, Closed, PartitionsDiffer, PublishError, TooLarge
from onward.event import Event
from onward.testing.failure_shop import eventually
from onward.testing.scenario import event
from tests.brokers.rabbitmq.harness import RabbitHarness, harness
from tests.brokers.rabbitmq.stage import played, until
from tests.servers.proxy import Proxy

__all__ = ["harness"]

TOPIC = "orders"


def window(*keys: str | None) -> RabbitWindow:
    events = [event(TOPIC, key, n) for n, key in enumerate(keys)]
    streams = [RabbitPacked("onward.orders.0", "onward.orders", packed(each)) for each in events]
    return Window([Outgoing(each, 0, 10, found) for each, found in zip(events, streams, strict=True)], 0.0)


def fates(found: RabbitWindow) -> list[str]:
    """What became of each event, in a word."""
    words = []
    for at in range(len(found.items)):
        refusal = found.answers[at]
        words.append("accepted" if refusal is None else "unknown" if refusal.unknown else "refused")
    return words


class TestSending:
    """Pure: which events are accepted, refused or unknown."""

    def begun(self, found: RabbitWindow, copies: int = 1) -> RabbitSending:
        """`copies`: how many messages each event is."""
        sending = RabbitSending(found)
        sending.sent(1, [at for at in sending.burst(100, 1 << 20) for _ in range(copies)])
        return sending

    def answer(
        self, sending: RabbitSending, first: int, last: int, why: str | None = None, *, unknown: bool = False
    ) -> None:
        sending.answered(PublishAnswer(first, last, why, unknown), lambda why, _: why)

    def test_confirmed_events_are_accepted(self) -> None:
        found = window("a", "b", None)
        sending = self.begun(found)
        self.answer(sending, 1, 2)
        assert sending.in_flight == 1
        self.answer(sending, 3, 3)
        assert sending.is_done
        assert fates(found) == ["accepted"] * 3

    def test_behind_a_returned_event_its_key_is_not_accepted(self) -> None:
        found = window("a", "b", "a", None, "a", "b")
        sending = RabbitSending(found)
        sending.sent(1, sending.burst(4, 1 << 20))
        self.answer(sending, 1, 1, "no route")
        self.answer(sending, 2, 4)
        assert sending.burst(100, 1 << 20) == [5], "the event of the failed key is not sent"
        sending.sent(5, [5])
        self.answer(sending, 5, 5)
        assert fates(found) == ["refused", "accepted", "unknown", "accepted", "refused", "accepted"]
        assert found.answers[4] is BEHIND

    def test_a_nacked_event_may_be_stored(self) -> None:
        found = window("a")
        self.answer(self.begun(found), 1, 1, "nack", unknown=True)
        assert fates(found) == ["unknown"]

    def test_what_the_server_ignored_is_sent_again(self) -> None:
        found = window("a", "b", "c", "c", "b")
        items = list(found.items)
        items[2] = items[2]._replace(packed=items[2].packed._replace(exchange="nowhere"))
        found.items = items
        sending = self.begun(found)
        self.answer(sending, 1, 1)
        sending.ended(ChannelClosed("closed", code=404, text="NOT_FOUND - no exchange 'nowhere' in vhost '/'"))
        assert sending.burst(100, 1 << 20) == [], "c failed for sure, and of b an answer is lost"
        assert fates(found) == ["accepted", "unknown", "refused", "refused", "refused"]

    def test_if_several_events_may_have_closed_the_channel_all_up_to_the_last_are_unknown(self) -> None:
        found = window("a", "b", "c")
        items = list(found.items)
        items[2] = items[2]._replace(packed=items[2].packed._replace(exchange="other"))
        found.items = items
        sending = self.begun(found)
        sending.ended(ChannelClosed("closed", code=404, text="NOT_FOUND - no exchange 'onward.orders' in vhost '/'"))
        assert sending.burst(100, 1 << 20) == [2]
        sending.refuse("over")
        assert [found.answers[0], found.answers[1]] != [None, None]

    @pytest.mark.parametrize("copies", [1, 2])
    def test_an_event_that_is_too_large_for_the_server_is_found_by_its_size(self, copies: int) -> None:
        found = window(None, None, None)
        items = list(found.items)
        large = items[1].packed.message._replace(body=b"x" * 100)
        items[1] = items[1]._replace(packed=items[1].packed._replace(message=large))
        found.items = items
        sending = self.begun(found, copies)
        text = "PRECONDITION_FAILED - message size 100 is larger than configured max size 50"
        sending.ended(ChannelClosed("closed", code=406, text=text))
        assert sending.burst(100, 1 << 20) == [2]
        sending.drop([2], "over")
        assert fates(found) == ["unknown", "refused", "refused"]

    def test_an_event_is_accepted_when_its_stream_and_its_copy_are(self) -> None:
        found = window("a", "b")
        sending = self.begun(found, copies=2)
        self.answer(sending, 1, 1)
        assert not found.answers
        self.answer(sending, 2, 3)
        assert found.answers == {0: None}
        assert sending.in_flight == 1
        self.answer(sending, 4, 4)
        assert sending.is_done
        assert fates(found) == ["accepted"] * 2

    @pytest.mark.parametrize("failed", [1, 2])
    def test_if_only_one_message_of_an_event_is_refused_the_event_is_unknown(self, failed: int) -> None:
        for order in ((1, 2), (2, 1)):
            found = window("a", "a")
            sending = self.begun(found, copies=2)
            for number in order:
                self.answer(sending, number, number, "no route" if number == failed else None)
            self.answer(sending, 3, 4)
            assert sending.is_done
            assert fates(found) == ["unknown", "unknown"], "the second one is behind it"

    def test_without_its_exchange_events_are_unknown_because_the_streams_may_have_them(self) -> None:
        found = window("a", "b")
        sending = self.begun(found, copies=2)
        self.answer(sending, 1, 1)
        sending.ended(ChannelClosed("closed", code=404, text="NOT_FOUND - no exchange 'onward.orders' in vhost '/'"))
        assert sending.is_done
        assert fates(found) == ["unknown"] * 2

    def test_with_the_connection_all_answers_are_lost(self) -> None:
        found = window("a", "b", None)
        sending = RabbitSending(found)
        sending.sent(1, sending.burst(1, 1 << 20))
        sending.ended(ConnectionLost("reset"))
        assert sending.burst(100, 1 << 20) == [1, 2], "what was not sent can still be"
        sending.drop([1, 2], "late")
        assert fates(found) == ["unknown", "refused", "refused"]


class Shop(NamedTuple):
    """A virtual host, with what the tests do to it."""

    harness: RabbitHarness
    brokers: list[Broker]

    async def broker(self, url: str | None = None, **options: Any) -> Broker:
        broker = await open_broker(settings.load(url or self.harness.url, **({"partitions": 2} | options)))
        self.brokers.append(broker)
        return broker

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        loaded = settings.load(self.harness.url)
        connection = await connected(RabbitAddress.of(loaded.url, loaded), name="test", patience_s=5)
        try:
            yield connection
        finally:
            await connection.close()

    async def stored(self, topic: str = TOPIC, partitions: int = 2) -> list[Event]:
        """The events in the streams, by partition."""
        found: list[Event] = []

        def note(messages: list[Received]) -> None:
            events = [from_stream(message, topic, topic)[1] for message in messages]
            found.extend([each.whole() for each in events if each is not None])

        async with self.connection() as connection:
            for index in range(partitions):
                stream = names.stream(topic, index)
                await read(connection, stream, offset="first", until=await end_of(connection, stream), on_messages=note)
        return found

    async def add_work_group(self, topic: str = TOPIC) -> str:
        """Its queue, which has no members."""
        broker = await self.broker(partitions=None)
        member = await broker.subscribe([topic], group="mail", member="m", ordering="none", start="earliest")
        await member.close()
        return names.work_queue(topic, "mail")

    async def has_ready(self, queue: str, count: int) -> bool:
        """Whether so many messages wait in it."""
        async with self.connection() as connection:
            channel = await connection.channel()
            return (await channel.declare_queue(queue, passive=True)).messages == count

    async def delete(self, *queues: str, exchanges: Sequence[str] = ()) -> None:
        async with self.connection() as connection:
            channel = await connection.channel()
            for queue in queues:
                await channel.delete_queue(queue)
            for exchange in exchanges:
                await channel.delete_exchange(exchange)

    def through(self, proxy: Proxy) -> str:
        return self.harness.server.url_of(self.harness.vhost, proxy.url)

    async def close(self) -> None:
        for broker in self.brokers:
            await broker.close()


@pytest.fixture
def shop(harness: RabbitHarness) -> Shop:
    return Shop(harness, [])


def orders(count: int, keys: int = 1, start: int = 0) -> list[Event]:
    return [event(TOPIC, f"key-{n % keys}", n) for n in range(start, start + count)]


def numbers(events: Sequence[Event], key: str) -> list[int]:
    return [int(each.value or b"") for each in events if each.key == key]


def check_balance(sent: Sequence[Event], error: PublishError | None, stored: Sequence[Event]) -> None:
    """What was accepted is stored, what was refused is not, and every key has its order."""
    ids = {each.id for each in stored}
    assert len(ids) == len(stored), "an event was stored twice"
    refused = {each.id for each in error.refused} if error else set()
    unknown = {each.id for each in error.unknown} if error else set()
    assert {each.id for each in sent} - refused - unknown <= ids, "an accepted event is not stored"
    assert not refused & ids, "a refused event is stored"
    for key in {each.key or "" for each in sent}:
        found = numbers(stored, key)
        assert found == sorted(found)
        assert found == numbers(sent, key)[: len(found)], "an event was stored behind one that is missing"


@pytest.mark.servers
class TestOnAServer:
    @played
    async def test_events_are_stored_in_order(self, shop: Shop) -> None:
        broker = await shop.broker()
        sent = orders(5_000, keys=7)
        await broker.publish(sent)
        check_balance(sent, None, await shop.stored())
        await shop.close()

    @played
    async def test_a_returned_event_is_refused_and_named(self, shop: Shop) -> None:
        broker = await shop.broker(partitions=2)
        await broker.publish(orders(2, keys=2))
        await self._settled(broker)
        await shop.delete(names.stream(TOPIC, 0), names.stream(TOPIC, 1))
        with pytest.raises(PublishError, match=r"stream onward\.orders\.\d does not exist .*NO_ROUTE") as raised:
            await broker.publish(orders(3, start=2))
        assert len(raised.value.refused) == 3
        await shop.close()

    @played
    async def test_a_topic_with_a_work_group_is_copied_to_its_queue(self, shop: Shop) -> None:
        """A publisher that runs already learns of the group."""
        broker = await shop.broker()
        await broker.publish(orders(10))
        queue = await shop.add_work_group()
        sent = orders(1_000, keys=7, start=10)
        await broker.publish(sent)
        await eventually(lambda: shop.has_ready(queue, 1_000), "the queue has the copies")
        assert len(await shop.stored()) == 1_010
        await shop.close()

    @played
    async def test_a_channel_that_is_closed_in_the_middle_costs_only_the_event_that_closed_it(self, shop: Shop) -> None:
        broker = await shop.broker()
        own = [Exchange("gone"), Queue("queue"), Binding("gone", "queue", "#")]
        await broker.declare(Topology(own=own), apply=True)
        bad, sent = Event("bad", "gone", "k", b"0"), orders(3_000, keys=3_000)
        await broker.publish([bad, *sent[:1]])
        await shop.delete(exchanges=["gone"])
        with pytest.raises(PublishError, match="no exchange 'gone'") as raised:
            await broker.publish([*sent[1:1_500], bad, *sent[1_500:]])
        assert [each.id for each in raised.value.refused] == [bad.id]
        assert not {each.id for each in sent[1_500:]} & {each.id for each in raised.value.unknown}
        check_balance(sent, raised.value, await shop.stored())
        await shop.close()

    @played
    async def test_a_cut_connection_loses_and_doubles_nothing(self, shop: Shop) -> None:
        with shop.harness.server.proxy() as proxy:
            broker = await shop.broker(shop.through(proxy))
            await broker.publish(orders(1, keys=1))
            sent, error = orders(20_000, keys=50, start=50), None
            publishing = asyncio.ensure_future(broker.publish(sent))
            await asyncio.sleep(0.2)
            proxy.cut()
            await asyncio.sleep(0.2)
            proxy.mend()
            try:
                await publishing
            except PublishError as raised:
                error = raised
            stored = [each for each in await shop.stored() if int(each.value or b"") >= 50]
            check_balance(sent, error, stored)
            await broker.publish(orders(1))
            await shop.close()

    @played
    async def test_connections_that_an_operator_closes_are_opened_again(self, shop: Shop) -> None:
        broker = await shop.broker()
        await broker.publish(orders(1))
        server, vhost = shop.harness.server, shop.harness.vhost

        def is_closed() -> bool:
            return server.close_connections(vhost) > 0

        await until(lambda: is_closed())
        sent = orders(10, start=1)
        await broker.publish(sent)
        assert len(await shop.stored()) == 11
        await shop.close()

    @played
    async def test_answers_that_do_not_come_make_events_unknown_after_the_timeout(self, shop: Shop) -> None:
        with shop.harness.server.proxy() as proxy:
            broker = await shop.broker(shop.through(proxy), publish_timeout_s=1.0)
            await broker.publish(orders(1))
            proxy.mute()
            began = time.monotonic()
            with pytest.raises(PublishError, match="publish_timeout_s=1") as raised:
                await broker.publish(orders(2, start=1))
            assert time.monotonic() - began < 5
            assert len(raised.value.unknown) == 2
            proxy.mend()
            await broker.publish(orders(1, start=3))
            assert numbers(await shop.stored(), "key-0")[-1] == 3
            await shop.close()

    @played
    async def test_a_server_that_is_away_is_waited_for(self, shop: Shop) -> None:
        with shop.harness.server.proxy() as proxy:
            broker = await shop.broker(shop.through(proxy), publish_timeout_s=20.0)
            await broker.publish(orders(1))
            proxy.cut()
            await asyncio.sleep(0.1)  # the client has seen the end of its connection
            publishing = asyncio.ensure_future(broker.publish(orders(2, start=1)))
            await asyncio.sleep(1.0)
            assert not publishing.done()
            proxy.mend()
            await publishing
            assert numbers(await shop.stored(), "key-0") == [0, 1, 2]
            await shop.close()

    @played
    async def test_an_alarm_is_named_and_events_are_accepted_when_it_ends(self, shop: Shop) -> None:
        broker = await shop.broker(publish_timeout_s=2.0)
        await broker.publish(orders(1))
        server = shop.harness.server
        await asyncio.to_thread(server.alarm, on=True)
        try:
            with pytest.raises(PublishError, match=r"takes no events now \(low on memory\); free memory") as first:
                await broker.publish(orders(2, start=1))
            assert len(first.value.unknown) == 2, "they were sent before the server said so"
            with pytest.raises(PublishError):
                await broker.publish(orders(1, start=3))
        finally:
            await asyncio.to_thread(server.alarm, on=False)
        await broker.publish(orders(1, start=4))
        assert 4 in numbers(await shop.stored(), "key-0")
        await shop.close()

    @played
    async def test_a_publisher_waits_while_a_short_alarm_lasts(self, shop: Shop) -> None:
        broker = await shop.broker(publish_timeout_s=30.0)
        await broker.publish(orders(1))
        server = shop.harness.server
        await asyncio.to_thread(server.alarm, on=True)
        try:
            publishing = asyncio.ensure_future(broker.publish(orders(2, start=1)))
            await asyncio.sleep(0.5)
            assert not publishing.done()
        finally:
            await asyncio.to_thread(server.alarm, on=False)
        await publishing
        assert numbers(await shop.stored(), "key-0") == [0, 1, 2]
        await shop.close()

    @played
    async def test_more_than_the_process_may_hold_is_refused(self, shop: Shop) -> None:
        broker = await shop.broker(max_outgoing_bytes=1_000)
        await broker.publish(orders(1))
        calls = [broker.publish([event(TOPIC, "a", n, headers={"pad": "x" * 900})]) for n in range(20)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(each, Backlogged) for each in answers)
        assert answers[0] is None
        await shop.close()

    @pytest.mark.parametrize("work_group", [False, True])
    def test_a_deleted_stream_is_noticed_at_once(self, shop: Shop, work_group: bool) -> None:
        """Also if a work queue takes the copies."""

        async def scene() -> None:
            broker = await shop.broker(partitions=1)
            await broker.publish(orders(1))
            if work_group:
                await shop.add_work_group()
            await self._settled(broker)
            await shop.delete(names.stream(TOPIC, 0))
            with pytest.raises(PublishError, match=r"stream onward\.orders\.0 does not exist") as raised:
                await broker.publish(orders(1, start=1))
            assert len(raised.value.unknown) == work_group, "the queue has the copy"
            with pytest.raises(PublishError, match=r"drop the topic with `await app\.broker\.drop_topic") as raised:
                await (await shop.broker(partitions=1)).publish(orders(1))
            assert len(raised.value.refused) == 1
            await broker.drop_topic(TOPIC)
            await broker.publish(orders(1))
            assert len(await shop.stored(partitions=1)) == 1
            await shop.close()

        played(scene)()

    async def _settled(self, broker: Broker) -> None:
        """Until a missing stream is no longer created again."""
        ground: Any = broker
        registry = ground._ground.registry
        await until(lambda: (topic := registry.topic(TOPIC)) is not None and topic.state == "ready")

    @played
    async def test_without_work_groups_the_exchange_of_a_topic_is_not_used(self, shop: Shop) -> None:
        broker = await shop.broker()
        await broker.publish(orders(1))
        await shop.delete(exchanges=[names.exchange(TOPIC)])
        await broker.publish(orders(10, keys=10, start=1))
        assert len(await shop.stored()) == 11
        await shop.close()

    @played
    async def test_a_deleted_exchange_is_made_again_with_the_bindings_of_all_work_groups(self, shop: Shop) -> None:
        broker = await shop.broker()
        await broker.publish(orders(1))
        queue = await shop.add_work_group()
        await shop.delete(exchanges=[names.exchange(TOPIC)])
        with pytest.raises(PublishError, match=r"no exchange 'onward\.orders'") as raised:
            await broker.publish(orders(10, keys=10))
        assert len(raised.value.unknown) == 10, "the streams may have them"
        await broker.publish(orders(10, keys=10))
        await eventually(lambda: shop.has_ready(queue, 10), "the queue has the copies")
        await shop.close()

    @played
    async def test_without_auto_declare_a_deleted_exchange_is_refused_and_named(self, shop: Shop) -> None:
        await (await shop.broker()).publish(orders(1))
        await shop.add_work_group()
        await shop.delete(exchanges=[names.exchange(TOPIC)])
        broker = await shop.broker(auto_declare=False)
        with pytest.raises(PublishError, match=r"exchange onward\.orders does not: it was deleted") as raised:
            await broker.publish(orders(10, keys=10))
        assert len(raised.value.refused) == 10
        await shop.close()

    @played
    async def test_a_topic_that_another_process_drops_is_created_again(self, shop: Shop) -> None:
        broker, other = await shop.broker(), await shop.broker()
        await broker.publish(orders(1))
        await other.publish(orders(1))
        await other.drop_topic(TOPIC)
        ground: Any = broker
        registry = ground._ground.registry
        await until(lambda: registry.topic(TOPIC) is None)
        await broker.publish(orders(1, start=1))
        assert numbers(await shop.stored(), "key-0") == [1]
        await shop.close()

    @played
    async def test_another_partition_count_is_refused(self, shop: Shop) -> None:
        await (await shop.broker(partitions=2)).publish(orders(1))
        with pytest.raises(PartitionsDiffer, match="2 partitions, this process expects 3"):
            await (await shop.broker(partitions=3)).publish(orders(1))
        await shop.close()

    @played
    async def test_a_missing_topic_is_refused_without_auto_declare(self, shop: Shop) -> None:
        broker = await shop.broker(auto_declare=False)
        with pytest.raises(PublishError, match="auto_declare is off"):
            await broker.publish(orders(1))
        assert list(await broker.topics()) == []
        changes = await broker.declare(Topology([TopicSpec(TOPIC, 2)]), apply=True)
        assert [change.action for change in changes] == ["create"]
        await broker.publish(orders(1))
        assert await broker.topics() == [TopicSpec(TOPIC, 2)]
        assert await broker.declare(Topology([TopicSpec(TOPIC, 2)]), apply=True) == []
        refused = await broker.declare(Topology([TopicSpec(TOPIC, 3)]), apply=True)
        assert [change.action for change in refused] == ["refuse"]
        await shop.close()

    @played
    async def test_a_large_event_arrives_and_a_larger_one_is_refused(self, shop: Shop) -> None:
        broker = await shop.broker(partitions=1, max_event_bytes=9_000_000)
        large = Event("large", TOPIC, "k", b"\xce" * 8_000_000)
        await broker.publish([large])
        assert (await shop.stored(partitions=1))[0].value == large.value
        with pytest.raises(TooLarge, match="max_event_bytes"):
            await broker.publish([Event("larger", TOPIC, "k", b"x" * 9_000_001)])
        await shop.close()

    @played
    async def test_an_exchange_of_the_application_gets_events_by_their_type(self, shop: Shop) -> None:
        broker = await shop.broker()
        own = [Exchange("notifications"), Queue("slack"), Binding("notifications", "slack", "notification.slack.*")]
        await broker.declare(Topology(own=own), apply=True)
        sent = Event("1", "notifications", "k", b"{}", {}, "notification.slack.sent")
        await broker.publish([sent])
        with pytest.raises(
            PublishError, match=r"no binding of exchange notifications matches event 2 \(routing key 'other'"
        ) as no:
            await broker.publish([Event("2", "notifications", "k", b"{}", {}, "other")])
        assert [each.id for each in no.value.refused] == ["2"]
        vhost = quote(shop.harness.vhost, safe="")
        body = {"count": 5, "ackmode": "ack_requeue_false", "encoding": "auto"}
        (got,) = shop.harness.server.ask("POST", f"/api/queues/{vhost}/slack/get", body)
        assert (got["routing_key"], got["properties"]["message_id"]) == ("notification.slack.sent", "1")
        assert "notifications" not in [topic.name for topic in await broker.topics()]
        await shop.close()

    @played
    async def test_a_full_queue_is_explained(self, shop: Shop) -> None:
        broker = await shop.broker()
        own = [Exchange("notifications"), Queue("slack", max_length=1), Binding("notifications", "slack", "#")]
        await broker.declare(Topology(own=own), apply=True)
        many = [Event(str(number), "notifications", None, b"{}", {}, "sent") for number in range(1_000)]
        await broker.publish(many[:2])  # a quorum queue notices late that it is full
        with pytest.raises(
            PublishError, match=r"to exchange notifications, routing key 'sent': .*\(max_length\)"
        ) as no:
            await broker.publish(many[2:])
        assert "publish again when consumers have made room" in str(no.value)
        assert no.value.unknown
        assert not no.value.refused
        await shop.close()

    @played
    async def test_an_exchange_that_does_not_exist_is_named(self, shop: Shop) -> None:
        broker = await shop.broker()
        await broker.declare(Topology(own=[Exchange("notifications")]), apply=False)
        with pytest.raises(PublishError, match=r"exchange notifications.*onward topology apply"):
            await broker.publish([Event("1", "notifications", "k", b"{}", {}, "t")])
        await shop.close()

    @played
    async def test_the_broker_counts_what_was_accepted(self, shop: Shop) -> None:
        broker = await shop.broker()
        await broker.publish([Event(str(n), TOPIC, "k", b"", {}, "paid") for n in range(3)])
        (figure,) = [each for each in broker.figures() if each.name == "messages_published"]
        assert [(sample.labels, sample.value) for sample in figure.samples] == [(("onward.orders", "paid"), 3.0)]
        await shop.close()

    @played
    async def test_publishing_goes_on_while_the_loop_of_the_caller_is_blocked(self, shop: Shop) -> None:
        broker = await shop.broker(client={"heartbeat_s": 2})
        await broker.publish(orders(1))
        time.sleep(7)  # noqa: ASYNC251 - longer than the server waits for a heartbeat
        began = time.monotonic()
        await broker.publish(orders(1, start=1))
        assert time.monotonic() - began < 1.0
        assert numbers(await shop.stored(), "key-0") == [0, 1]
        await shop.close()

    @played
    async def test_a_closed_broker_has_finished_its_events(self, shop: Shop) -> None:
        broker = await shop.broker()
        await broker.publish(orders(1, keys=1))
        publishing = asyncio.ensure_future(broker.publish(orders(3_000, keys=10)))
        await asyncio.sleep(0)
        await broker.close()
        await publishing
        await broker.close()
        assert len(await shop.stored()) == 3_001
        with pytest.raises(Closed):
            await broker.publish(orders(1))

    @played
    async def test_a_server_without_our_permission_says_so(self, shop: Shop) -> None:
        server, vhost = shop.harness.server, quote(shop.harness.vhost, safe="")
        await (await shop.broker()).publish(orders(1))
        server.ask("PUT", "/api/users/writer", {"password": "p", "tags": ""})
        try:
            server.ask("PUT", f"/api/permissions/{vhost}/writer", {"configure": "", "write": "", "read": ".*"})
            url = shop.harness.url.replace("guest:guest", "writer:p")
            broker = await shop.broker(url)
            with pytest.raises((PublishError, BrokerError), match=r"(?i)refused"):
                await broker.publish(orders(1))
            await shop.close()
        finally:
            server.ask("DELETE", "/api/users/writer")


def test_an_outbound_message_is_mandatory() -> None:
    """Otherwise the server confirms a message that no queue takes."""
    assert Outbound("", "q", b"", b"").mandatory
