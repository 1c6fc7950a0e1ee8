"""Exchanges, queues and bindings as code: what may be declared, and what the plan creates or refuses. Pure."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.brokers.base import Change, TopicSpec, Topology
from onward.brokers.rabbitmq import Binding, Exchange, Queue
from onward.brokers.rabbitmq.operate.differences import Difference, of_reply, of_tables
from onward.brokers.rabbitmq.operate.routing import ExchangeRoute, RouteMap, covers
from onward.brokers.rabbitmq.operate.topology import NO_DELIVERY_LIMIT, Declared
from onward.brokers.rabbitmq.operate.topology_plan import LiveExchange, LiveTopology, TopologyPlan, planned
from onward.errors import BadSetting
from tests.brokers.rabbitmq.abs import LITERAL, MENDED, WEEK_S

NOTHING = LiveTopology()


def declared(*objects: object) -> Declared:
    return Declared.of(Topology(own=objects))


def plan(*objects: object, live: LiveTopology = NOTHING) -> TopologyPlan:
    return planned(declared(*objects).plain(), live)


def refused(*objects: object, live: LiveTopology = NOTHING) -> dict[str, str]:
    return joined(plan(*objects, live=live).refused)


def joined(changes: Sequence[Change]) -> dict[str, str]:
    """All details of each object."""
    names = dict.fromkeys(each.what for each in changes)
    return {name: "\n".join(each.detail for each in changes if each.what == name) for name in names}


def created(changes: Sequence[Change]) -> set[str]:
    return {each.what for each in changes if each.action == "create"}


def after(made: TopologyPlan, live: LiveTopology, *, lists_bindings: bool) -> LiveTopology:
    """The server after the plan was applied."""
    exchanges = {each.name: LiveExchange((), ExchangeRoute(each.kind, each.alternate)) for each in made.exchanges}
    bindings = {each.identity: each for each in (*(live.bindings or ()), *made.bindings, *made.again)}
    return LiveTopology(
        {**live.exchanges, **exchanges},
        {**live.queues, **{each.name: () for each in made.queues}},
        list(bindings.values()) if lists_bindings else None,
    )


# -- what may be declared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Exchange(""), "its name is ''; use a text"),
        (lambda: Exchange("e" * 256), "too long; RabbitMQ allows 255 bytes"),
        (lambda: Exchange("é" * 128), "too long; RabbitMQ allows 255 bytes"),
        (lambda: Exchange("a\nb"), "cannot be printed"),
        (lambda: Exchange("amq.mine"), "belong to RabbitMQ; use another name"),
        (lambda: Queue("onward.orders.0"), "belong to Onward; use another name"),
        (lambda: Exchange("e", "x-consistent-hash"), "use direct, topic, fanout or headers"),  # type: ignore[arg-type]
        (lambda: Exchange("e", alternate="e"), "name another exchange"),
        (lambda: Exchange("e", arguments=[1]), "use a dict"),  # type: ignore[arg-type]
        (lambda: Queue("q", "lazy"), "use quorum, classic or stream"),  # type: ignore[arg-type]
        (lambda: Queue("q", max_length=0), "max_length=0; use a whole number of 1 or more"),
        (lambda: Queue("q", consumers=True), "consumers=True; use a whole number"),
        (lambda: Queue("q", ttl_s=0.0), "ttl_s=0.0; use seconds"),
        (lambda: Queue("q", ttl_s=float("nan")), "ttl_s=nan; use seconds"),
        (lambda: Queue("q", durable=False), "a quorum queue is always durable"),
        (lambda: Queue("q", max_priority=10), "use tiers, which are one queue for each priority"),
        (lambda: Queue("q", overflow="drop"), "use reject-publish, drop-head"),  # type: ignore[arg-type]
        (lambda: Queue("q", overflow="reject-publish-dlx"), "use reject-publish"),
        *[
            (
                lambda name=name, value=value: Queue("q", arguments={name: value}),
                f"{name}={value!r}; use a whole number",
            )
            for name in (
                "x-max-length",
                "x-message-ttl",
                "x-delivery-limit",
                "x-expires",
                "x-quorum-initial-group-size",
            )
            for value in ("five", 5.0, True)
        ],
        (
            lambda: Queue("q", max_length=6, arguments={"x-max-length": 5}),
            "max_length=6 and arguments with x-max-length=5 differ; remove one of them",
        ),
        (
            lambda: Queue("q", ttl_s=1.0, dead_letter_exchange="d", arguments={"x-message-ttl": 5}),
            "ttl_s=1.0 and arguments with x-message-ttl=5 differ",
        ),
        (lambda: Queue("q", dead_letter_key="k"), "dead_letter_key without dead_letter_exchange"),
        (lambda: Queue("q", dead_letter_exchange=""), "name the queue for dead letters in dead_letter_key"),
        (lambda: Queue("q", "stream", max_length=5), "use max_length_bytes"),
        (lambda: Queue("q", "stream", dead_letter_exchange="x"), "a stream has no dead letters"),
        (lambda: Queue("q", "stream", tiers={"bulk": "a"}), "a stream has no tiers"),
        (lambda: Queue("q", tiers={"urgent": "a"}), "use 'critical' and 'bulk'"),
        (lambda: Queue("q", tiers={"bulk": "a.b*"}), "alone between dots"),
        (lambda: Queue("q", tiers={"bulk": "a.#"}), "alone between dots"),
        (lambda: Queue("q", tiers=["bulk"]), "use a dict such as"),  # type: ignore[arg-type]
        (lambda: Binding("e"), "name either a queue or to_exchange"),
        (lambda: Binding("e", "q", to_exchange="f"), "name either a queue or to_exchange"),
        (lambda: Binding("", "q"), "use a text"),
        (lambda: Binding("e", "q", "k" * 256), "too long"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_is_written(make: Any, words: str) -> None:
    with pytest.raises(BadSetting) as raised:
        make()
    assert words in str(raised.value)


def test_two_declarations_of_one_name_must_agree() -> None:
    assert declared(Queue("q"), Queue("q")).queues == {"q": Queue("q")}
    with pytest.raises(BadSetting, match="queue q is declared twice, in different ways"):
        declared(Queue("q"), Queue("q", max_length=5))
    with pytest.raises(BadSetting, match=r"queue q.critical is declared twice"):
        declared(Queue("q", tiers={"critical": "a"}), Queue("q.critical", max_length=5)).plain()


def test_only_objects_of_rabbitmq_are_accepted() -> None:
    with pytest.raises(BadSetting, match="RabbitMQ has no such object"):
        declared("exchange")


def test_a_topic_with_the_name_of_an_exchange_is_that_exchange() -> None:
    found = Declared.of(Topology([TopicSpec("abs.stats", 8), TopicSpec("orders", 8)], MENDED))
    assert found.topics == [TopicSpec("orders", 8)]
    assert found.exchange("abs.stats") == Exchange("abs.stats", "fanout")
    assert found.exchange("orders") is None
    slack = found.queue("abs.notification.slack")
    assert slack is not None
    assert slack.tier_queues == {"normal": "abs.notification.slack", "critical": "abs.notification.slack.critical"}
    assert found.queue("billing") is None


def test_a_queue_has_the_arguments_that_keep_messages() -> None:
    """Without a delivery limit some versions delete messages; at-least-once needs reject-publish."""
    limit = {"x-queue-type": "quorum", "x-delivery-limit": NO_DELIVERY_LIMIT}
    assert Queue("q").table == limit
    assert Queue("q", max_length=5).table == {**limit, "x-max-length": 5, "x-overflow": "reject-publish"}
    assert Queue("q", dead_letter_exchange="x").table == {
        **limit,
        "x-dead-letter-exchange": "x",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    assert Queue("q", max_length=5, overflow="drop-head").table == {**limit, "x-max-length": 5}
    assert Queue("q", max_length=5, arguments={"x-max-length": 5}).table["x-max-length"] == 5, "twice the same value"
    assert Queue("q", arguments={"x-delivery-limit": None, "x-foo": 1}).table == {"x-queue-type": "quorum", "x-foo": 1}
    assert Queue("q", "stream", ttl_s=3_600).table == {"x-queue-type": "stream", "x-max-age": "3600s"}


def test_the_queues_of_the_seed_have_its_arguments() -> None:
    queues = declared(*LITERAL).queues
    assert queues["abs.comparison.process"].table == {
        "x-queue-type": "classic",  # the same as none
        "x-message-ttl": 30_000,
        "x-dead-letter-exchange": "abs.comparison.dlx",
        "x-dead-letter-routing-key": "comparison.failed",
        "x-max-length": 100_000,
        "x-max-priority": 10,
    }
    assert queues["abs.comparison.dlq"].table["x-message-ttl"] == 604_800_000 == WEEK_S * 1000


# -- routes ---------------------------------------------------------------------------------------------------------

words = st.sampled_from(["a", "b", "*", "#"])
patterns = st.lists(words, min_size=1, max_size=4).map(".".join)
KEYS = [".".join(key) for size in range(1, 6) for key in itertools.product("abc", repeat=size)]


def matches(pattern: Sequence[str], key: Sequence[str]) -> bool:
    """As the protocol defines it: * is one word, # is any number of them."""
    if not pattern:
        return not key
    if pattern[0] == "#":
        return any(matches(pattern[1:], key[start:]) for start in range(len(key) + 1))
    return bool(key) and pattern[0] in ("*", key[0]) and matches(pattern[1:], key[1:])


@given(patterns, st.lists(st.sampled_from("abc"), max_size=5))
def test_a_pattern_matches_a_key_as_the_protocol_says(pattern: str, key: list[str]) -> None:
    assert covers(pattern, ".".join(key)) == matches(pattern.split("."), key)


@given(patterns, patterns)
def test_a_pattern_that_covers_another_matches_all_its_keys(outer: str, inner: str) -> None:
    if covers(outer, inner):
        missed = [key for key in KEYS if covers(inner, key) and not covers(outer, key)]
        assert not missed


@pytest.mark.parametrize(
    ("outer", "inner", "is_covered"),
    [
        ("#", "#", True),
        ("#", "notification.slack.*", True),
        ("*.#", "#.*", True),
        ("*.#", "#", False),
        ("notification.#", "notification.slack.*", True),
        ("notification.slack.*", "notification.#", False),
        ("a.*", "a.b", True),
        ("a.b", "a.*", False),
        ("", "", True),
        ("", "#", False),
    ],
)
def test_whether_a_pattern_covers_another(outer: str, inner: str, is_covered: bool) -> None:
    assert covers(outer, inner) is is_covered


def test_messages_follow_exchanges_bound_to_exchanges_and_alternates() -> None:
    exchanges = {
        "in": ExchangeRoute("topic"),
        "next": ExchangeRoute("direct", "strays"),
        "strays": ExchangeRoute("fanout"),
        "loop": ExchangeRoute("fanout"),
    }
    bindings = [
        Binding("in", to_exchange="next", key="a.#"),
        Binding("next", "one", "a.b"),
        Binding("strays", "other"),
        Binding("loop", to_exchange="loop"),
    ]
    routes = RouteMap(exchanges, {"one", "other"}, bindings)
    assert routes.targets("in", "a.b") == {"one"}
    assert routes.targets("in", "a.c") == {"other"}
    assert routes.targets("in", "b") == frozenset()
    assert routes.targets("loop", "a") == frozenset()
    assert routes.targets("", "one") == {"one"}
    assert routes.targets("", "nothing") == frozenset()
    assert routes.keys("one") == {"a.b"}
    assert routes.keys("other") == {"a.#"}, "what the exchange before it did not route"
    assert routes.keys("alone") == {"alone"}, "only the default exchange leads to it"


# -- the plan -------------------------------------------------------------------------------------------------------


def test_the_whole_seed_is_planned_and_then_there_is_nothing_to_do() -> None:
    for objects in (MENDED, LITERAL):
        for lists_bindings in (True, False):
            first = plan(*objects)
            assert not first.refused
            live = after(first, NOTHING, lists_bindings=lists_bindings)
            again = plan(*objects, live=live)
            assert again.changes == []
            assert bool(again.again) is not lists_bindings


def test_the_words_of_a_plan() -> None:
    details = {each.detail for each in plan(*LITERAL).changes}
    assert details >= {
        "create exchange abs.comparison (direct)",
        "create queue abs.comparison.dlq (classic, x-message-ttl=604800000)",
        "create binding of queue abs.comparison.process to exchange abs.comparison with key comparison.process",
    }


def test_dead_letters_have_a_route_before_their_queue_is_bound() -> None:
    order = [each.exchange for each in plan(*LITERAL).bindings]
    assert order == ["abs.comparison.dlx", "abs.comparison"]


def test_each_message_of_a_queue_with_tiers_is_in_one_queue() -> None:
    made = plan(
        Exchange("in", "topic"),
        Queue("q", tiers={"critical": "n.*.critical", "bulk": "*.bulk"}),
        Binding("in", "q", "n.#"),
    )
    assert {each.name for each in made.queues} == {"q", "q.critical", "q.bulk"}
    routes = RouteMap(
        {each.name: ExchangeRoute(each.kind, each.alternate) for each in made.exchanges},
        {each.name for each in made.queues},
        made.bindings,
    )
    expected = {"n.slack.critical": "q.critical", "n.bulk": "q.bulk", "n.x": "q", "n.bulk.critical": "q.critical"}
    assert {key: routes.targets("in", key) for key in expected} == {key: {name} for key, name in expected.items()}


def test_a_binding_that_goes_past_the_tiers_is_refused() -> None:
    objects = [Exchange("in"), Queue("q", tiers={"bulk": "a"}), Binding("in", "q", "#")]
    old = LiveTopology({"in": LiveExchange((), ExchangeRoute("topic"))}, {"q": ()}, [Binding("in", "q", "#")])
    assert "a message would be in two tiers; unbind it" in refused(*objects, live=old)["queue q"]
    assert not refused(*objects, live=old._replace(bindings=[]))


@pytest.mark.parametrize(
    ("queue", "words"),
    [
        (Queue("q", ttl_s=30), "deletes messages that have waited for 30000 ms (x-message-ttl)"),
        (Queue("q", max_length=5, overflow="drop-head"), "when it is full (x-max-length=5) it deletes its oldest"),
        (Queue("q", arguments={"x-max-length-bytes": 9}), "when it is full (x-max-length-bytes=9) it deletes"),
        (Queue("q", arguments={"x-delivery-limit": 5}), "after 5 deliveries (x-delivery-limit)"),
        (Queue("q", arguments={"x-delivery-limit": None}), "after 20 deliveries (x-delivery-limit, the default since"),
        (Queue("q", arguments={"x-expires": 60_000}), "deletes it with its messages when it was unused for 60000 ms"),
    ],
)
def test_a_queue_that_deletes_unhandled_messages_is_refused_unless_it_may(queue: Queue, words: str) -> None:
    why = refused(queue)["queue q"]
    assert words in why
    assert "may_lose=True" in why
    assert not created(plan(queue).changes)
    allowed = Queue("q", arguments=queue.table, may_lose=True)
    assert not refused(allowed)


def test_with_a_dead_letter_route_limits_lose_nothing() -> None:
    sink = [Exchange("dlx", "fanout"), Queue("dlq"), Binding("dlx", "dlq")]
    assert not refused(*sink, Queue("q", ttl_s=30, dead_letter_exchange="dlx"))
    assert not refused(*sink, Queue("q", max_length=5, overflow="drop-head", dead_letter_exchange="dlx"))
    assert not refused(Queue("dead"), Queue("q", ttl_s=30, dead_letter_exchange="", dead_letter_key="dead"))


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ([], "its dead-letter exchange dlx does not exist"),
        ([Exchange("dlx", "direct")], "dlx routes dead letters with the key failed to no queue"),
        ([Exchange("dlx", "direct"), Queue("dlq"), Binding("dlx", "dlq", "fail")], "with the key failed to no queue"),
        ([Exchange("dlx", "fanout"), Exchange("f"), Binding("dlx", to_exchange="f")], "to no queue"),
        (
            [Exchange("dlx", "fanout"), Queue("dlq", ttl_s=5), Binding("dlx", "dlq")],
            "to no queue",  # dlq is refused itself
        ),
    ],
)
def test_a_dead_letter_target_that_is_missing_or_unbound_is_refused(objects: list[object], words: str) -> None:
    found = refused(*objects, Queue("q", dead_letter_exchange="dlx", dead_letter_key="failed"))
    assert words in found["queue q"]
    assert "so" in found["queue q"]
    assert "would be lost" in found["queue q"]


def test_dead_letters_that_keep_their_key_need_a_route_for_every_key() -> None:
    sink = [Exchange("in"), Exchange("dlx"), Queue("dlq"), Queue("q", dead_letter_exchange="dlx")]
    source = [Binding("in", "q", "order.*"), Binding("in", "q", "payment.#")]
    assert not refused(*sink, *source, Binding("dlx", "dlq", "#"))
    assert not refused(*sink, *source, Binding("dlx", "dlq", "order.#"), Binding("dlx", "dlq", "payment.#"))
    why = refused(*sink, *source, Binding("dlx", "dlq", "order.*"))["queue q"]
    assert "with the key payment.#, which they keep" in why


def test_a_dead_letter_target_may_be_at_the_server_already() -> None:
    queue = Queue("q", dead_letter_exchange="dlx", dead_letter_key="failed")
    known = LiveExchange((), ExchangeRoute("direct"))
    bound = [Binding("dlx", "dlq", "failed")]
    assert not refused(queue, live=LiveTopology({"dlx": known}, {"dlq": ()}, bound))
    assert "to no queue" in refused(queue, live=LiveTopology({"dlx": known}, {"dlq": ()}, []))["queue q"]
    assert not refused(queue, live=LiveTopology({"dlx": LiveExchange()})), "without a list of bindings nobody knows"
    assert (
        "queue dead, which does not exist"
        in refused(Queue("q", dead_letter_exchange="", dead_letter_key="dead"))["queue q"]
    )


def test_dead_letters_that_expire_in_a_circle_are_refused() -> None:
    """RabbitMQ deletes a message that comes back to a queue by expiring only."""
    why = refused(Queue("q", ttl_s=5, dead_letter_exchange="", dead_letter_key="q"))["queue q"]
    assert "come back to it" in why


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        (Binding("in", "nothing"), "queue nothing does not exist; declare it, or remove the binding"),
        (Binding("nothing", "q"), "exchange nothing does not exist"),
        (Binding("in", to_exchange="nothing"), "exchange nothing does not exist"),
    ],
)
def test_a_binding_to_nothing_is_refused(binding: Binding, words: str) -> None:
    objects = (Exchange("in"), Queue("q"), binding)
    assert words in refused(*objects)[str(binding)]
    assert created(plan(*objects).changes) == {"exchange in", "queue q"}


def test_an_alternate_exchange_must_exist() -> None:
    assert "its alternate exchange strays does not exist" in refused(Exchange("e", alternate="strays"))["exchange e"]
    assert not refused(Exchange("e", alternate="strays"), Exchange("strays", "fanout"))
    assert not refused(Exchange("e", alternate="amq.fanout"))
    assert not refused(Exchange("e", alternate="strays"), live=LiveTopology({"strays": LiveExchange()}))


def test_an_object_that_differs_is_refused_and_the_others_are_created() -> None:
    objects = [Exchange("in"), Queue("q"), Queue("other"), Binding("in", "q"), Binding("in", "other")]
    live = LiveTopology(queues={"q": [Difference("x-max-length", None, 5), Difference("durable", True, False)]})
    made = plan(*objects, live=live)
    assert created(made.changes) == {"exchange in", "queue other", str(Binding("in", "other"))}
    assert {each.what: each.detail for each in made.refused} == {
        "queue q": "queue q: x-max-length is 5 there and not set here; durable is false there and true here; they "
        "cannot be changed later: declare it as it is there, give it a new name here, or delete it at the server when "
        "it is empty, and apply again"
    }


@pytest.mark.parametrize(
    ("found", "options", "cure"),
    [
        (None, {}, 'declare it as it is there (arguments={"x-delivery-limit": None} and may_lose=True), give it'),
        (None, {"may_lose": True}, 'as it is there (arguments={"x-delivery-limit": None}), give it'),
        (20, {"dead_letter_exchange": "dlx"}, 'as it is there (arguments={"x-delivery-limit": 20}), give it'),
    ],
)
def test_a_queue_with_another_delivery_limit_can_be_declared_as_it_is(
    found: int | None, options: dict[str, Any], cure: str
) -> None:
    """Every quorum queue of another program has one. The cure of the message works."""
    sink = [Exchange("dlx", "fanout"), Queue("dead"), Binding("dlx", "dead")]
    live = LiveTopology(queues={"q": [Difference("x-delivery-limit", NO_DELIVERY_LIMIT, found)]})
    assert cure in refused(*sink, Queue("q", **options), live=live)["queue q"]
    mended = Queue("q", **{"may_lose": "may_lose=True" in cure, **options}, arguments={"x-delivery-limit": found})
    assert not refused(*sink, mended, live=LiveTopology(queues={"q": ()}))


@pytest.mark.parametrize("kind", ["fanout", "headers"])
def test_a_dead_letter_exchange_that_compares_no_keys_only_needs_a_queue(kind: Any) -> None:
    objects = [Exchange("dlx", kind), Queue("q", dead_letter_exchange="dlx")]
    known = LiveTopology({"dlx": LiveExchange((), ExchangeRoute(kind))}, bindings=[])
    for live in (NOTHING, known):
        why = refused(*objects, live=live)["queue q"]
        assert why.endswith("routes dead letters to no queue, so they would be lost; bind a queue to dlx")


def test_arguments_that_the_server_cannot_store_are_refused_when_they_are_declared() -> None:
    deep: dict[str, Any] = {}
    deep["x"] = deep
    for value in (object(), {1: 2}, {3}, 1 << 70, "\ud800", deep):
        for make in (
            lambda table: Queue("q", arguments=table),
            lambda table: Exchange("q", arguments=table),
            lambda table: Binding("q", "q", arguments=table),
        ):
            with pytest.raises(BadSetting, match=r"q.*arguments has 'x-foo'.*use text, a number"):
                make({"x-foo": value})


# -- properties -----------------------------------------------------------------------------------------------------

names = st.sampled_from(["one", "two", "three"])
kinds = st.sampled_from(["direct", "topic", "fanout", "headers"])
keys = st.sampled_from(["", "a", "a.b", "a.*", "#"])
maybe = st.one_of(st.none(), names)
exchanges = st.builds(
    lambda name, kind, other: Exchange(name, kind, alternate=None if other == name else other), names, kinds, maybe
)
queues = st.builds(
    Queue,
    names,
    ttl_s=st.sampled_from([None, 5.0]),
    dead_letter_exchange=maybe,
    tiers=st.sampled_from([{}, {"critical": "a.b"}]),
    may_lose=st.booleans(),
)
to_queues = st.builds(Binding, names, names, keys)
to_exchanges = st.builds(lambda source, target, key: Binding(source, key=key, to_exchange=target), names, names, keys)
topologies = st.tuples(
    st.lists(exchanges, unique_by=lambda each: each.name),
    st.lists(queues, unique_by=lambda each: each.name),
    st.lists(st.one_of(to_queues, to_exchanges), max_size=6),
).map(lambda parts: [each for part in parts for each in part])


@given(topologies, st.booleans())
def test_after_apply_a_plan_has_the_same_refusals_and_nothing_to_create(
    objects: list[object], lists_bindings: bool
) -> None:
    first = plan(*objects)
    again = plan(*objects, live=after(first, NOTHING, lists_bindings=lists_bindings))
    assert not created(again.changes)
    assert {each.what for each in again.refused} == {each.what for each in first.refused}


@given(topologies)
def test_what_is_created_depends_on_nothing_that_is_refused(objects: list[object]) -> None:
    made = plan(*objects)
    exchanges, queues = {each.name for each in made.exchanges}, {each.name for each in made.queues}
    for binding in made.bindings:
        assert binding.exchange in exchanges
        assert binding.queue in queues or binding.to_exchange in exchanges
    for queue in made.queues:
        sink = queue.dead_letter_exchange
        assert sink is None or sink in exchanges
    for exchange in made.exchanges:
        assert exchange.alternate is None or exchange.alternate in exchanges


@given(topologies)
def test_every_declared_object_is_created_or_refused(objects: list[object]) -> None:
    made, wanted = plan(*objects), declared(*objects).plain()
    told = {each.what for each in made.changes}
    assert {f"exchange {name}" for name in wanted.exchanges} <= told
    assert {f"queue {name}" for name in wanted.queues} <= told


# -- differences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        (
            "arg 'x-message-ttl' for queue 'a' in vhost '/': received '1' but current is '30000'",
            {"x-message-ttl": 1},
            Difference("x-message-ttl", 1, 30_000),
        ),
        (
            "arg 'x-max' for queue 'it's' in vhost '/': received none but current is the value '5' of type 'long'",
            {},
            Difference("x-max", None, 5),
        ),
        (
            "arg 'x-overflow' for queue 'a' in vhost '/': received the value 'x' of type 'longstr' but current is none",
            {"x-overflow": "x"},
            Difference("x-overflow", "x", None),
        ),
        (
            "arg 'durable' for queue 'a' in vhost '/': received 'true' but current is 'false'",
            {"durable": True},
            Difference("durable", True, False),
        ),
        ("invalid arg 'x-overflow' for queue 'bad' in vhost '/': invalid_overflow", {}, None),
    ],
)
def test_a_difference_is_read_from_the_words_of_the_server(
    text: str, wanted: dict[str, Any], expected: Difference | None
) -> None:
    assert of_reply(f"PRECONDITION_FAILED - inequivalent {text}", wanted) == expected


def test_the_differences_of_two_tables() -> None:
    assert of_tables({"x-queue-type": "classic"}, {}) == []
    assert of_tables({"a": 1, "b": 2}, {"b": 3, "c": 4}) == [
        Difference("a", 1, None),
        Difference("b", 2, 3),
        Difference("c", None, 4),
    ]
