"""Topology, doctor and depths as the broker offers them, on a real server."""

import asyncio
import logging

import pytest

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Asks, Finding, GroupSpec, TopicSpec, Topology
from onward.brokers.rabbitmq import Binding, Exchange, Queue
from onward.brokers.rabbitmq.operate.operations import RabbitOperations
from onward.brokers.rabbitmq.registry import registry_fold
from onward.errors import BadSetting, BrokerError
from onward.testing.scenario import event
from tests.brokers.rabbitmq.abs import MENDED
from tests.brokers.rabbitmq.stage import grounded, played, until
from tests.servers.rabbitmq import RabbitMQServer


def errors(findings: list[Finding]) -> list[str]:
    return [each.what for each in findings if each.level == "error"]


@played
async def test_a_topology_is_created_known_and_healthy(rabbitmq_server: RabbitMQServer) -> None:
    client = {"management_url": rabbitmq_server.management_url}
    with rabbitmq_server.vhost() as vhost:
        async with grounded(rabbitmq_server.url_of(vhost), client=client, lease_s=15.0) as ground:
            operations, run = RabbitOperations(ground), ground.io.run
            topology = Topology([TopicSpec("abs.stats", 8), TopicSpec("orders", 8)], MENDED)
            changes = await run(operations.declare(topology, apply=True))
            assert {each.action for each in changes} == {"create"}
            assert await run(operations.declare(topology, apply=False)) == []
            assert operations.declared.topics == [TopicSpec("orders", 8)]
            await run(operations.declare(Topology([TopicSpec("payments", 8)]), apply=True))
            assert operations.declared.exchange("abs.stats") is not None, "a later call forgets nothing"
            found = await run(operations.diagnose())
            assert errors(found) == []
            warnings = [each.what for each in found if each.level == "warning"]
            assert any("fewer consumers than declared (0 of 10): queue abs.comparison.process" in w for w in warnings)


@played
async def test_without_auto_declare_only_questions_are_asked(rabbitmq_server: RabbitMQServer) -> None:
    with rabbitmq_server.vhost() as vhost:
        url = rabbitmq_server.url_of(vhost)
        async with grounded(url) as ground:
            await ground.io.run(RabbitOperations(ground).declare(Topology(own=[Queue("q")]), apply=True))
        async with grounded(url, auto_declare=False) as ground:
            operations = RabbitOperations(ground)
            topology = Topology(own=[Queue("q", max_length=5), Exchange("e")])
            changes = await ground.io.run(operations.declare(topology, apply=False))
            assert [(each.what, each.action) for each in changes] == [("exchange e", "create")]


@played
async def test_a_deleted_queue_and_a_lost_route_are_found(rabbitmq_server: RabbitMQServer) -> None:
    client = {"management_url": rabbitmq_server.management_url}
    objects = [
        Exchange("dlx", "direct"),
        Queue("dlq"),
        Queue("gone"),
        Queue("q", dead_letter_exchange="dlx", dead_letter_key="failed"),
        Binding("dlx", "dlq", "failed"),
    ]
    with rabbitmq_server.vhost() as vhost:
        async with grounded(rabbitmq_server.url_of(vhost), client=client, lease_s=15.0) as ground:
            operations, run = RabbitOperations(ground), ground.io.run
            assert len(await run(operations.declare(Topology(own=objects), apply=True))) == 5
            for name in ("gone", "dlq"):
                rabbitmq_server.delete_queue(vhost, name)
            missing = await run(operations.declare(Topology(own=objects), apply=False))
            assert {each.what for each in missing if each.what.startswith("queue")} == {"queue dlq", "queue gone"}
            assert errors(await run(operations.diagnose())) == [
                "dead letters of queue q with key failed are lost: exchange dlx routes them to no queue",
            ]


@played
async def test_bindings_that_are_not_compared_are_counted(
    rabbitmq_server: RabbitMQServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onward")
    first, second = (Binding("e", "q", key) for key in ("a", "b"))
    with rabbitmq_server.vhost() as vhost:
        async with grounded(rabbitmq_server.url_of(vhost)) as ground:
            operations, run = RabbitOperations(ground), ground.io.run
            for topology in (Topology(own=[Exchange("e"), Queue("q"), first]), Topology(own=[first, second])):
                await run(operations.declare(topology, apply=True))
                await run(operations.declare(topology, apply=False))
    logged = [record.getMessage() for record in caplog.records if "not compared" in record.getMessage()]
    assert [text.partition(":")[0] for text in logged] == ["1 binding not compared", "2 bindings not compared"]
    assert all("`onward topology apply` binds again" in text for text in logged)


@played
async def test_missing_queues_of_work_groups_are_found(rabbitmq_server: RabbitMQServer) -> None:
    """A queue of the group's own comes back with a member. A declared queue does not."""
    tiers = {"bulk": "a.*"}
    groups = [
        GroupSpec("events", "mail", "none", "latest", Asks(tiers=tiers)),
        GroupSpec("events", "ev.q", "none", "latest"),
    ]
    topology = Topology(own=[Exchange("events"), Queue("ev.q"), Binding("events", "ev.q", "#")], groups=groups)
    client = {"management_url": rabbitmq_server.management_url}
    with rabbitmq_server.vhost() as vhost:
        broker = await open_broker(settings.load(rabbitmq_server.url_of(vhost), client=client, lease_s=15.0))
        try:
            await broker.declare(topology, apply=True)
            assert [each.what for each in await broker.diagnose() if each.level != "ok"] == []
            for queue in ("onward.events:mail:work.bulk", "onward.events:mail:suspects", "ev.q"):
                rabbitmq_server.delete_queue(vhost, queue)
            found = [(each.level, each.what) for each in await broker.diagnose() if "missing (" in each.what]
        finally:
            await broker.close()
    of = "of group mail of topic events"
    assert found == [
        ("error", f"missing (the bulk events {of}): queue onward.events:mail:work.bulk"),
        ("error", f"missing (the events that may have killed their process, {of}): queue onward.events:mail:suspects"),
        ("warning", "missing (declared, with group ev.q of topic events): queue ev.q"),
    ]


@played
async def test_depths_of_declared_queues_are_watched(rabbitmq_server: RabbitMQServer) -> None:
    with rabbitmq_server.vhost() as vhost:
        async with grounded(rabbitmq_server.url_of(vhost)) as ground:
            operations, run = RabbitOperations(ground), ground.io.run
            await run(operations.declare(Topology(own=[Queue("q", tiers={"bulk": "a"})]), apply=True))
            ground.io.post(operations.watch_depths, lambda: ["missing"])

            def depths() -> set[str]:
                (figure,) = [each for each in operations.figures() if each.name == "queue_depth"]
                return {sample.labels[0] for sample in figure.samples}

            await until(lambda: depths() == {"q", "q.bulk"})
            (failures,) = [each for each in operations.figures() if each.name == "queue_probe_failures"]
            assert [sample.labels for sample in failures.samples] == [("missing",)]
            await run(operations.close())


@played
async def test_what_cannot_be_declared_is_named(rabbitmq_server: RabbitMQServer) -> None:
    with rabbitmq_server.vhost() as vhost:
        async with grounded(rabbitmq_server.url_of(vhost)) as ground:
            operations = RabbitOperations(ground)
            with pytest.raises(BadSetting, match="RabbitMQ has no such object"):
                await ground.io.run(operations.declare(Topology(own=["exchange"]), apply=True))
            await ground.io.run(ground.close())
            with pytest.raises(BrokerError, match="is closed"):
                await ground.io.run(operations.declare(Topology(own=[Queue("q")]), apply=True))
            (finding,) = await ground.io.run(operations.diagnose())
            assert finding.level == "error"


@played
async def test_a_lost_stream_of_a_topic_is_found(rabbitmq_server: RabbitMQServer) -> None:
    with rabbitmq_server.vhost() as vhost:
        url, client = rabbitmq_server.url_of(vhost), {"management_url": rabbitmq_server.management_url}
        loaded = settings.load(url, client=client, partitions=3, lease_s=15.0)
        broker = await open_broker(loaded)
        try:
            await broker.publish([event("orders", "key", 1)])
            async with asyncio.timeout(30):  # a new topic is not judged while its streams may still be created
                while True:
                    found = await broker.diagnose()
                    if any("4 queues of topics" in each.what for each in found):
                        break
                    await asyncio.sleep(0.2)
            assert errors(list(found)) == []
            rabbitmq_server.delete_queue(vhost, "onward.orders.1")
            assert errors(list(await broker.diagnose())) == [
                "missing (a partition of topic orders): queue onward.orders.1",
            ]
        finally:
            await broker.close()


class TestWhatAGroupLacks:
    """Groups of the registry whose objects were deleted at the server."""

    specs = (
        GroupSpec("orders", "mail", "none", "latest", Asks(types=["a"], tiers={"bulk": "a.*"})),
        GroupSpec("orders", "billing", "key", "earliest"),
    )
    topology = Topology([TopicSpec("orders", 2)], groups=specs)
    work, suspects = "onward.orders:mail:work", "onward.orders:mail:suspects"
    token, stream = "onward.orders:billing:1.token", "onward.orders.1"

    @played
    async def test_is_planned_and_applied(self, rabbitmq_server: RabbitMQServer) -> None:
        with rabbitmq_server.vhost() as vhost:
            broker = await open_broker(settings.load(rabbitmq_server.url_of(vhost)))
            try:
                await broker.declare(self.topology, apply=True)
                assert await broker.declare(self.topology, apply=False) == []
                for queue in (self.work, self.suspects, self.token):
                    rabbitmq_server.delete_queue(vhost, queue)
                rabbitmq_server.ask("DELETE", f"/api/exchanges/{vhost}/onward.orders")
                planned = await broker.declare(self.topology, apply=False)
                assert {each.what for each in planned} == {
                    *(f"queue {name}" for name in (self.work, self.suspects, self.token)),
                    "exchange onward.orders",
                }
                assert {each.action for each in planned} == {"create"}
                assert self.work not in rabbitmq_server.queues(vhost), "a plan creates nothing"
                assert await broker.declare(self.topology, apply=True) == planned
                assert await broker.declare(self.topology, apply=False) == []
                await broker.publish([event("orders", "key", 1, type="a")])
                (depth,) = [each for each in await broker.groups("orders") if each.group == "mail"]
                assert depth.partitions[0].end == 1, "the queue is bound again"
            finally:
                await broker.close()

    @played
    async def test_is_an_error_if_it_is_a_stream(
        self, rabbitmq_server: RabbitMQServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registry_fold, "FORGOTTEN_S", 0.0)
        with rabbitmq_server.vhost() as vhost:
            broker = await open_broker(settings.load(rabbitmq_server.url_of(vhost)))
            try:
                await broker.declare(self.topology, apply=True)
                rabbitmq_server.delete_queue(vhost, self.stream)
                for apply in (False, True):
                    (change,) = await broker.declare(self.topology, apply=apply)
                    assert (change.what, change.action) == (f"queue {self.stream}", "refuse")
                    assert "drop_topic('orders')" in change.detail
                assert self.stream not in rabbitmq_server.queues(vhost)
            finally:
                await broker.close()

    @played
    async def test_names_bindings_where_they_can_be_listed(self, rabbitmq_server: RabbitMQServer) -> None:
        client = {"management_url": rabbitmq_server.management_url}
        with rabbitmq_server.vhost() as vhost:
            broker = await open_broker(settings.load(rabbitmq_server.url_of(vhost), client=client))
            try:
                await broker.declare(self.topology, apply=True)
                rabbitmq_server.ask("DELETE", f"/api/exchanges/{vhost}/onward.orders")
                planned = await broker.declare(self.topology, apply=True)
                binding = "binding of exchange onward.orders:mail:work.to-critical to exchange onward.orders with key"
                assert any(each.what.startswith(binding) for each in planned)
                assert await broker.declare(self.topology, apply=False) == []
            finally:
                await broker.close()

    @played
    async def test_a_queue_of_another_program_under_its_name_is_an_error(
        self, rabbitmq_server: RabbitMQServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registry_fold, "SETTLED_S", 0.0)
        differs = "x-queue-type is classic there and quorum here"
        with rabbitmq_server.vhost() as vhost:
            broker = await open_broker(settings.load(rabbitmq_server.url_of(vhost)))
            try:
                await broker.declare(self.topology, apply=True)
                rabbitmq_server.delete_queue(vhost, self.work)
                rabbitmq_server.ask("PUT", f"/api/queues/{vhost}/{self.work}", {"durable": True})
                (change,) = await broker.declare(self.topology, apply=False)
                assert change.action == "refuse"
                assert differs in change.detail
                (error,) = [each for each in await broker.diagnose() if each.level == "error"]
                assert error.what == f"queue {self.work}: it exists and differs: {differs}"
                assert error.cure is not None
                assert error.cure.startswith("another program uses this name")
            finally:
                await broker.close()
