"""What `onward doctor` reports of a server: judged from facts, and read from a real one."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from onward import settings
from onward.brokers.base import Finding, Topology
from onward.brokers.rabbitmq import Binding, Queue, names
from onward.brokers.rabbitmq.address import RabbitAddress
from onward.brokers.rabbitmq.amqp import Connection
from onward.brokers.rabbitmq.operate.checkup import findings, role_of
from onward.brokers.rabbitmq.operate.expected_queues import expected_queues
from onward.brokers.rabbitmq.operate.known_problems import problems
from onward.brokers.rabbitmq.operate.management import ManagementApi
from onward.brokers.rabbitmq.operate.policies import Policy, applied, harm
from onward.brokers.rabbitmq.operate.queue_troubles import QueueTrouble, combined
from onward.brokers.rabbitmq.operate.routing import ExchangeRoute
from onward.brokers.rabbitmq.operate.server_facts import (
    ExpectedQueue,
    ManagedFacts,
    NodeFacts,
    QueueFacts,
    RabbitFacts,
    gathered,
)
from onward.brokers.rabbitmq.operate.topology import Declared
from onward.brokers.rabbitmq.registry.registry_fold import GroupEntry, TopicEntry
from onward.brokers.rabbitmq.work.tiers import WorkRoute
from tests.servers.rabbitmq import RabbitMQServer

STREAM = ExpectedQueue("onward.orders.0", "log", "a partition of topic orders", topic="orders")
WORK = ExpectedQueue("onward.orders:billing:work", "work", "the events of group billing of topic orders")
NOW = 1_000.0
NODE = NodeFacts("rabbit@a", True, (), (), (100, 1_000))


def queue(name: str, kind: str = "quorum", **fields: Any) -> QueueFacts:
    return QueueFacts(name, kind, True, {}, "running", 0, ("rabbit@a",), ("rabbit@a",))._replace(**fields)


def managed(*queues: QueueFacts, **fields: Any) -> ManagedFacts:
    return ManagedFacts([NODE], {each.name: each for each in queues}, {}, (), (), {})._replace(**fields)


def policy(definition: dict[str, Any], pattern: str = ".*", **fields: Any) -> Policy:
    return Policy("limits", pattern, "queues", 0, definition, is_operators=False)._replace(**fields)


FACTS = RabbitFacts("amqp://host", (4, 0, 7), None, 5.0, 1, (STREAM, WORK), (), managed(), "")


def found(facts: RabbitFacts = FACTS, **options: Any) -> list[Finding]:
    return findings(facts, settings.load("amqp://host", **{"lease_s": 15.0, **options}))


def bad(facts: RabbitFacts = FACTS, **options: Any) -> list[tuple[str, str]]:
    problems = [each for each in found(facts, **options) if each.level != "ok"]
    assert all(each.cure for each in problems), "each problem has a cure"
    return [(each.level, each.what) for each in problems]


def test_a_healthy_server_has_only_ok_findings() -> None:
    assert {each.level for each in found()} == {"ok"}
    assert "RabbitMQ 4.0.7 at amqp://host answers, 1 node" in [each.what for each in found()]


# -- the server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "nodes", "words"),
    [
        ((3, 9, 29), 1, ["its quorum queues have no TTL", "Onward is tested with 3.10 to 4.3"]),
        ((3, 10, 4), 1, ["a quorum queue can fail when it dead-letters"]),
        ((3, 10, 8), 1, []),
        ((3, 10, 8), 3, ["replicas of a quorum queue can diverge"]),
        ((3, 10, 8), None, ["in a cluster, the replicas of a quorum queue can diverge"]),
        ((3, 12, 2), 1, ["can stop getting messages"]),
        ((4, 0, 6), 3, ["can diverge"]),
        ((4, 0, 7), 3, []),
        ((4, 1, 0), 3, []),
        ((4, 3, 2), 3, ["can confirm what too few replicas have"]),
        ((4, 3, 6), 3, []),
        ((5, 0, 0), 3, ["Onward is tested with 3.10 to 4.3"]),
    ],
)
def test_versions_with_known_problems_are_named(
    version: tuple[int, ...], nodes: int | None, words: Sequence[str]
) -> None:
    texts = [each.what for each in problems(version, nodes)]
    assert len(texts) == len(words)
    for text, expected in zip(texts, words, strict=True):
        assert expected in text


def test_alarms_nodes_and_the_network_are_reported() -> None:
    nodes = [
        NODE._replace(alarms=("memory",)),
        NodeFacts("rabbit@b", False, (), (), None),
        NodeFacts("rabbit@c", True, (), ("rabbit@a",), (950, 1_000)),
    ]
    facts = FACTS._replace(managed=managed(nodes=nodes), nodes=3, blocked="low on memory")
    assert bad(facts) == [
        ("error", "the server blocks publishers: low on memory"),
        ("error", "node rabbit@a has a memory alarm"),
        ("error", "node rabbit@b is down"),
        ("error", "node rabbit@c cannot reach rabbit@a"),
        ("warning", "node rabbit@c uses 950 of 1,000 file descriptors"),
    ]


def test_a_heartbeat_that_is_longer_than_the_lease_is_reported() -> None:
    ((level, what),) = bad(FACTS._replace(heartbeat_s=60.0))
    assert level == "warning"
    assert "the server notices a frozen member only after up to 180 s" in what


def test_a_server_without_streams_is_an_error() -> None:
    facts = FACTS._replace(managed=managed(flags={"stream_queue": "disabled"}))
    assert bad(facts) == [("error", "feature flag stream_queue is off, so the server has no such queues")]


def test_without_the_management_api_the_doctor_says_what_it_did_not_check() -> None:
    ((level, what),) = bad(FACTS._replace(managed=None, unmanaged="not set", unmanaged_cure="set it"))
    assert level == "warning"
    assert "policies, alarms of other nodes, replicas and dead-letter routes were not checked" in what


def test_many_partitions_are_reported() -> None:
    many = [STREAM._replace(name=f"onward.orders.{index}") for index in range(1_001)]
    assert "1,001 partitions" in bad(FACTS._replace(expected=many))[0][1]


# -- queues ---------------------------------------------------------------------------------------------------------


def test_missing_streams_and_queues_are_errors() -> None:
    facts = FACTS._replace(missing=[STREAM.name, WORK.name])
    assert bad(facts) == [
        ("error", "missing (a partition of topic orders): queue onward.orders.0"),
        ("error", "missing (the events of group billing of topic orders): queue onward.orders:billing:work"),
    ]


def test_the_cure_for_a_missing_queue_deletes_nothing_that_can_come_back() -> None:
    """A member declares the queues of its group again. To drop the group would delete its dead letters too."""
    token = ExpectedQueue("onward.orders:billing:0.token", "work", "a token of group billing of topic orders")
    facts = FACTS._replace(expected=[STREAM, WORK, token], missing=[STREAM.name, WORK.name, token.name])
    stream, work, lost_token = [each.cure or "" for each in found(facts) if "missing (" in each.what]
    assert "drop the topic with `await app.broker.drop_topic('orders')`" in stream
    for cure in (work, lost_token):
        assert "start a member of the group: it declares the queue again" in cure
        assert "drop" not in cure


def test_a_declared_queue_of_a_group_that_is_missing_is_a_warning() -> None:
    groups = {"events": [GroupEntry("events", "ev.q", "work")]}
    declared = Declared.of(Topology(own=[Queue("ev.q", tiers={"bulk": "a"}), Queue("later")]))
    expected = expected_queues((), groups, declared, NOW)
    facts = FACTS._replace(expected=expected, missing=["ev.q", "ev.q.bulk"])
    (warning,) = [each for each in found(facts) if each.level != "ok"]
    assert warning.level == "warning"
    assert warning.what == "missing (declared, with group ev.q of topic events): queues ev.q and ev.q.bulk"
    assert "onward topology apply" in (warning.cure or "")
    assert "onward topology apply" in (warning.cure or "")
    assert [each.name for each in expected if not each.is_created] == ["later"], "the topology says if it is missing"


def test_the_number_of_queues_is_named() -> None:
    expected = expected_queues((), {}, Declared(), NOW)
    assert "the list of topics and groups exists; no queue of a topic or group is expected yet" in [
        each.what for each in found(FACTS._replace(expected=expected))
    ]
    assert "all 2 queues of topics and groups exist" in [each.what for each in found()]


def test_queues_that_do_not_run_and_lack_replicas_are_reported() -> None:
    queues = [
        queue(WORK.name, state="down"),
        queue(STREAM.name, "stream", members=("rabbit@a", "rabbit@b"), online=("rabbit@a",)),
        queue("onward.orders:mail:work"),
        queue("theirs", state="down"),
    ]
    facts = FACTS._replace(managed=managed(*queues, nodes=[NODE, NODE, NODE]), nodes=3)
    assert bad(facts) == [
        ("error", f"in the state down: queue {WORK.name}"),
        ("warning", "1 replica in a cluster of 3 nodes: queues onward.orders:billing:work and onward.orders:mail:work"),
        ("warning", f"no live replica on rabbit@b: queue {STREAM.name}"),
    ]


def test_too_few_consumers_and_a_short_consumer_timeout_are_reported() -> None:
    declared = ExpectedQueue("abs.process", "work", "declared", consumers=10)
    live = queue("abs.process", consumers=3, arguments={"x-consumer-timeout": 60_000})
    timeout, consumers = bad(FACTS._replace(expected=[declared], managed=managed(live)))
    assert consumers == ("warning", "fewer consumers than declared (3 of 10): queue abs.process")
    assert "x-consumer-timeout=60000 on queue abs.process: a handler that runs longer loses its consumer" in timeout[1]


def test_a_lost_binding_of_a_work_queue_is_an_error() -> None:
    """The server accepts events that reach no queue. Streams need no binding."""
    live = managed(queue(STREAM.name, "stream"), queue(WORK.name))
    facts = FACTS._replace(expected=[STREAM, WORK._replace(keys=())], managed=live)
    assert bad(facts) == [
        ("error", f"no binding with any key, so events are lost ({WORK.what}): queue {WORK.name}"),
    ]
    bound = [Binding("onward.orders", WORK.name, "#")]
    assert not bad(facts._replace(managed=live._replace(bindings=bound)))


def test_the_same_problem_of_many_queues_is_one_finding() -> None:
    troubles = [QueueTrouble("error", "a policy on", f"q{number}", "", "remove it") for number in range(1_234)]
    assert [each.what for each in combined(troubles)] == ["a policy on queues q0, q1, q10 and 1,231 more"]


# -- policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("definition", "kind", "role", "level"),
    [
        ({"delivery-limit": 5}, "quorum", "work", "error"),
        ({"message-ttl": 1_000}, "quorum", "work", "error"),
        ({"expires": 1_000}, "quorum", "work", "error"),
        ({"max-length": 10}, "quorum", "work", "error"),
        ({"max-length": 10, "overflow": "reject-publish"}, "quorum", "work", "warning"),
        ({"max-length-bytes": 10}, "quorum", "work", "error"),
        ({"consumer-timeout": 60_000}, "quorum", "work", "warning"),
        ({"consumer-timeout": 3_600_000}, "quorum", "work", None),
        ({"message-ttl": 1_000}, "quorum", "rung", None),
        ({"delivery-limit": 5}, "quorum", "rung", "error"),
        ({"max-age": "1D"}, "stream", "log", "warning"),
        ({"max-length-bytes": 10}, "stream", "record", "error"),
        ({"max-age": "1D"}, "stream", "record", "error"),
        ({"delivery-limit": 5}, "stream", "record", None),
        ({"max-age": "1D"}, "quorum", "work", None),
        ({"queue-leader-locator": "balanced"}, "quorum", "work", None),
    ],
)
def test_what_a_policy_does_to_our_queues(definition: dict[str, Any], kind: str, role: Any, level: str | None) -> None:
    found = [each.level for each in harm([policy(definition)], "q", kind, role)]
    assert found == ([] if level is None else [level])


def test_the_cure_of_a_policy_names_its_virtual_host() -> None:
    (trouble,) = harm([policy({"delivery-limit": 5}, name="my limits", vhost="shop")], "q", "quorum", "work")
    assert "rabbitmqctl clear_policy -p shop 'my limits'" in trouble.cure


def test_of_several_policies_the_highest_priority_counts_and_one_of_the_operators_too() -> None:
    low, high = policy({"max-length": 1}, priority=1), policy({"max-length": 2}, priority=5)
    theirs = policy({"max-length": 3}, is_operators=True)
    assert applied([low, high, theirs], "q", "quorum") == [high, theirs]


@pytest.mark.parametrize(
    ("pattern", "applies_to", "kind", "matches"),
    [
        ("^onward", "queues", "quorum", True),
        ("^other", "queues", "quorum", False),
        ("onward", "all", "stream", True),
        ("onward", "exchanges", "quorum", False),
        ("onward", "quorum_queues", "quorum", True),
        ("onward", "quorum_queues", "stream", False),
        ("onward", "streams", "stream", True),
        ("onward", "classic_queues", "quorum", False),
        ("(?<", "queues", "quorum", True),  # Python cannot read it; to be on the safe side it matches
    ],
)
def test_which_queues_a_policy_applies_to(pattern: str, applies_to: str, kind: str, matches: bool) -> None:
    assert policy({}, pattern, applies_to=applies_to).matches("onward.orders:g:work", kind) is matches


def test_policies_are_checked_on_all_our_queues_and_on_declared_ones() -> None:
    queues = [queue(WORK.name), queue("onward.orders:mail:work"), queue("abs.process"), queue("theirs")]
    declared = ExpectedQueue("abs.process", "work", "declared")
    facts = FACTS._replace(
        expected=[WORK, declared], managed=managed(*queues, policies=[policy({"delivery-limit": 5})])
    )
    ((level, what),) = bad(facts)
    assert level == "error"
    assert what.endswith("on queues abs.process, onward.orders:billing:work and onward.orders:mail:work")


def test_the_roles_of_our_queues() -> None:
    topic, group = "orders", "billing"
    work = names.work_queue(topic, group)
    assert role_of(names.REGISTRY, "stream") == "record"
    assert role_of(names.aside_stream(topic, group, 0, 1), "stream") == "record"
    assert role_of(names.stream(topic, 0), "stream") == "log"
    assert role_of(names.token_queue(topic, 0, group), "quorum") == "work"
    assert role_of(work, "quorum") == "work"
    assert role_of(names.rung_queue(work, 1_000), "quorum") == "rung"
    assert role_of("theirs", "quorum") is None


# -- dead letters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x-dead-letter-exchange": "gone"}, "are lost: exchange gone does not exist (its argument)"),
        ({"x-dead-letter-exchange": "dlx"}, "with key q are lost: exchange dlx routes them to no queue"),
        (
            {"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "failed"},
            "with key failed are lost: exchange dlx routes them to no queue",
        ),
        (
            {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "gone"},
            "with key gone are lost: the default exchange routes them to no queue",
        ),
        ({"x-dead-letter-exchange": "fan"}, "dead letters of queue q are lost: exchange fan routes them to no queue"),
        ({"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "ok"}, ""),
        ({"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dlq"}, ""),
    ],
)
def test_a_dead_letter_target_that_is_missing_or_unbound_is_an_error(arguments: dict[str, Any], words: str) -> None:
    live = managed(
        queue("q", arguments=arguments),
        queue("dlq"),
        exchanges={"dlx": ExchangeRoute("direct"), "fan": ExchangeRoute("fanout")},
        bindings=[Binding("dlx", "dlq", "ok")],
    )
    problems = bad(FACTS._replace(expected=(), managed=live))
    assert [level for level, _ in problems] == (["error"] if words else [])
    assert not words or words in problems[0][1]


def test_a_dead_letter_target_of_a_policy_is_checked_too() -> None:
    live = managed(queue("q"), policies=[policy({"dead-letter-exchange": "gone"})])
    ((level, what),) = bad(FACTS._replace(expected=(), managed=live))
    assert level == "error"
    assert "exchange gone does not exist (policy limits)" in what


# -- what must exist ------------------------------------------------------------------------------------------------


def test_the_queues_of_topics_and_groups_are_expected() -> None:
    topics = [TopicEntry("orders", 2, "id", {}, made_at=NOW - 6.0), TopicEntry("new", 8, "id", {}, made_at=NOW - 1.0)]
    critical, bulk = (names.work_queue("orders", "mail", tier) for tier in ("critical", "bulk"))
    routes = (str(WorkRoute("onward.orders:mail:work.to-critical", critical, "a")), "tier:bulk", "tier:critical")
    groups = {
        "orders": [
            GroupEntry("orders", "billing", "ordered"),
            GroupEntry("orders", "mail", "work", routes=routes),
            GroupEntry("orders", "abs.mail", "work"),
            GroupEntry("orders", "theirs", "work"),  # on a queue that another application declares
        ],
        "new": [GroupEntry("new", "billing", "ordered"), GroupEntry("new", "mail", "work")],
    }
    declared = Declared.of(Topology(own=[Queue("abs.mail", tiers={"bulk": "a"}, consumers=3)]))
    found = {each.name: each for each in expected_queues(topics, groups, declared, NOW)}
    assert set(found) == {
        names.REGISTRY,
        *(names.stream("orders", index) for index in range(2)),
        *(names.token_queue("orders", index, "billing") for index in range(2)),
        *(names.work_queue("orders", "mail"), critical, bulk, names.suspects_queue("orders", "mail")),
        *(names.suspects_queue("orders", group) for group in ("abs.mail", "theirs")),
        "abs.mail",
        "abs.mail.bulk",
    }
    assert found["abs.mail.bulk"].consumers == 3
    assert found[names.stream("orders", 1)].keys is None, "streams are published to directly"
    assert found[names.work_queue("orders", "mail")].keys == ()
    assert found[critical].keys == ()
    assert found[bulk].keys is None, "the group has no such tier any more: the queue is only emptied"


# -- on a server ----------------------------------------------------------------------------------------------------


def diagnosed(
    server: RabbitMQServer, vhost: str, expected: Sequence[ExpectedQueue], *, management: bool
) -> list[Finding]:
    async def scene() -> list[Finding]:
        client = {"management_url": server.management_url} if management else {}
        loaded = settings.load(server.url_of(vhost), client=client, lease_s=15.0)
        address = RabbitAddress.of(server.url_of(vhost), loaded)
        connection = await Connection.open(server.host, server.port, vhost=vhost)
        try:
            facts = await gathered(connection, address, expected, ManagementApi.of(address))
        finally:
            await connection.close()
        return findings(facts, loaded)

    return asyncio.run(scene())


def test_the_facts_of_a_real_server(rabbitmq_server: RabbitMQServer) -> None:
    expected = [ExpectedQueue("onward.t:g:work", "work", "a work queue"), ExpectedQueue("gone", "work", "declared")]
    with rabbitmq_server.vhost() as vhost:
        arguments = {"x-queue-type": "quorum", "x-dead-letter-exchange": "nothing"}
        body = {"durable": True, "arguments": arguments}
        rabbitmq_server.ask("PUT", f"/api/queues/{vhost}/onward.t:g:work", body)
        lower = {"pattern": "^onward", "definition": {"delivery-limit": 5}, "apply-to": "queues"}
        rabbitmq_server.ask("PUT", f"/api/policies/{vhost}/lower", lower)
        rabbitmq_server.ask("PUT", f"/api/operator-policies/{vhost}/most", lower | {"definition": {"max-length": 5}})
        found = diagnosed(rabbitmq_server, vhost, expected, management=True)
        levels, cures = {(each.level, each.what) for each in found}, [each.cure or "" for each in found]
        without = {(each.level, each.what) for each in diagnosed(rabbitmq_server, vhost, expected, management=False)}
    queue = "on queue onward.t:g:work"
    assert {each for each in levels if each[0] != "ok"} == {
        ("error", "missing (declared): queue gone"),
        ("error", f"policy lower sets delivery-limit=5, which deletes a message after so many deliveries, {queue}"),
        ("error", f"operator policy most sets max-length=5, which limits the number of messages, {queue}"),
        ("error", "dead letters of queue onward.t:g:work are lost: exchange nothing does not exist (its argument)"),
    }
    assert any(f"clear_policy -p {vhost} lower" in cure for cure in cures)
    assert {level for level, what in without if "missing (" in what} == {"error"}
    assert any("were not checked: the client setting management_url is not set" in what for _, what in without)


def test_an_alarm_of_a_real_server_is_an_error(rabbitmq_server: RabbitMQServer) -> None:
    def errors() -> list[str]:
        found = diagnosed(rabbitmq_server, vhost, [], management=True)
        return [each.what for each in found if each.level == "error"]

    with rabbitmq_server.vhost() as vhost:
        with rabbitmq_server.alarmed():
            _until(lambda: errors() == [f"node {rabbitmq_server.node} has a memory alarm"])
        _until(lambda: not errors())


def _until(condition: Callable[[], bool]) -> None:
    """The API has figures of some seconds ago."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline


def test_a_wrong_management_url_is_a_warning_that_names_it(rabbitmq_server: RabbitMQServer) -> None:
    async def scene(vhost: str) -> list[Finding]:
        loaded = settings.load(rabbitmq_server.url, client={"management_url": "http://127.0.0.1:1"})
        address = RabbitAddress.of(rabbitmq_server.url_of(vhost), loaded)
        connection = await Connection.open(rabbitmq_server.host, rabbitmq_server.port, vhost=vhost)
        facts = await gathered(connection, address, (), ManagementApi.of(address))
        await connection.close()
        return findings(facts, loaded)

    with rabbitmq_server.vhost() as vhost:
        (warning,) = [each for each in asyncio.run(scene(vhost)) if "not checked" in each.what]
    assert "the management API at http://127.0.0.1:1 does not answer" in warning.what
    assert warning.cure == (
        "turn it on with `rabbitmq-plugins enable rabbitmq_management`, or remove management_url"
    ), "the setting is there already"


def test_without_a_management_url_the_cure_is_to_set_it(rabbitmq_server: RabbitMQServer) -> None:
    with rabbitmq_server.vhost() as vhost:
        findings = diagnosed(rabbitmq_server, vhost, [], management=False)
    (warning,) = [each for each in findings if "not checked" in each.what]
    assert "set client.management_url=http://host:15672" in (warning.cure or "")
