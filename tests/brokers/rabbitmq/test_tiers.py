"""Tiers: which queue an event goes to by its type, how patterns become bindings, and how the queues share a member."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.brokers.rabbitmq.operate.routing import covers
from onward.brokers.rabbitmq.registry.registry_fold import GroupEntry
from onward.brokers.rabbitmq.work.tiers import (
    WEIGHTS,
    TierTurns,
    WorkRoute,
    WorkRouting,
    binding_key,
    foreign_keys,
    routing,
    tier_of,
    topic_keys,
)
from onward.brokers.rabbitmq.work.work_objects import bindings_of
from onward.errors import BadSetting
from onward.handler import type_filter

WORDS = st.sampled_from(["a", "b", "critical", "order", ""])
TYPES = st.lists(WORDS, min_size=1, max_size=6).map(".".join)
WHOLE = st.lists(st.sampled_from(["a", "b", "critical", "*"]), min_size=1, max_size=5).map(".".join)
PARTIAL = st.lists(st.sampled_from(["a", "b*", "*r", "o*r", "*", "critical"]), min_size=1, max_size=4).map(".".join)


@given(WHOLE, TYPES)
def test_a_key_matches_exactly_the_types_of_its_pattern(pattern: str, type_: str) -> None:
    assert covers(binding_key(pattern), type_) == type_filter([pattern], "test")(type_)


@given(st.lists(PARTIAL, min_size=1, max_size=3), TYPES)
def test_a_group_with_types_gets_at_least_those_types(types: list[str], text: str) -> None:
    for pattern in types:
        type_ = pattern.replace("*", text)
        assert type_filter([pattern], "test")(type_)
        assert any(covers(key, type_) for key in topic_keys(types))


@pytest.mark.parametrize("key", ["", ".", "order.placed", "a..b"])
def test_a_group_without_types_gets_everything(key: str) -> None:
    for types in ((), ["*"], ["order.*", "*"]):
        assert [each for each in topic_keys(types) if covers(each, key)]


def test_a_pattern_that_is_too_long_for_a_key_is_refused() -> None:
    with pytest.raises(BadSetting, match="too long"):
        binding_key("a" * 256)


TIERS = st.fixed_dictionaries({}, optional={"critical": WHOLE, "bulk": WHOLE})


@given(TIERS, TYPES)
def test_every_event_is_in_one_queue(tiers: Mapping[str, str], type_: str) -> None:
    """The server's exchanges and our own choice agree."""
    plan = routing("q", topic_keys(()), tiers)
    assert routed(plan, type_) == {plan.queues[tier_of(type_, tiers)]}


@given(TIERS, PARTIAL, TYPES)
def test_events_of_other_types_are_in_no_queue(tiers: Mapping[str, str], only: str, type_: str) -> None:
    plan = routing("q", topic_keys([only]), tiers)
    wanted = covers(binding_key(only), type_)
    assert len(routed(plan, type_)) == wanted


def test_the_critical_pattern_is_tried_before_the_bulk_pattern() -> None:
    assert tier_of("a.b", {"critical": "*.b", "bulk": "a.*"}) == "critical"
    assert tier_of("a.c", {"critical": "*.b", "bulk": "a.*"}) == "bulk"
    assert tier_of("c", {"critical": "*.b", "bulk": "a.*"}) == "normal"


def test_normal_events_stay_in_the_same_queue_when_a_group_gets_tiers() -> None:
    without, tiered = routing("q", ["#"], {}), routing("q", ["#"], {"critical": "a"})
    assert without.queues["normal"] == tiered.queues["normal"] == "q"


@given(st.text(st.characters(exclude_characters="\t"), max_size=20), st.booleans())
def test_a_route_is_stored_as_text(key: str, to_exchange: bool) -> None:
    route = WorkRoute("source", "target", key, to_exchange)
    assert WorkRoute.parse(str(route)) == route


def routed(plan: WorkRouting, key: str) -> set[str]:
    """The queues that the server would choose."""
    alternates = {each.name: each.alternate for each in plan.exchanges}
    fanouts = {each.name for each in plan.exchanges if each.kind == "fanout"}
    found: set[str] = set()
    work = [""]
    while work:
        source = work.pop()
        fitting = [each for each in plan.routes if each.source == source]
        fitting = [each for each in fitting if source in fanouts or covers(each.key, key)]
        found |= {each.target for each in fitting if not each.to_exchange}
        work += {each.target for each in fitting if each.to_exchange}
        if not fitting and (alternate := alternates.get(source)) is not None:
            work.append(alternate)
    return found


# -- exchanges of other programs --------------------------------------------------------------------------------------


def test_a_direct_exchange_needs_whole_types() -> None:
    assert foreign_keys("direct", ["comparison.process"], "abs") == ["comparison.process"]
    for types in ([], ["comparison.*"]):
        with pytest.raises(BadSetting, match="abs is a direct exchange"):
            foreign_keys("direct", types, "abs")


def test_a_fanout_exchange_has_no_keys() -> None:
    assert foreign_keys("fanout", ["a"], "abs") == [""]


def test_a_topic_exchange_of_another_program_is_bound_by_types() -> None:
    assert foreign_keys("topic", ["notification.slack.*"], "abs") == ["notification.slack.*.#"]
    assert foreign_keys("topic", [], "abs") == ["#"]


# -- shares -----------------------------------------------------------------------------------------------------------


def test_full_tiers_share_8_to_3_to_1() -> None:
    waiting = dict.fromkeys(WEIGHTS, 10_000)
    turns = TierTurns()
    assert turns.share(waiting, 1_200) == {"critical": 800, "normal": 300, "bulk": 100}


def test_shares_hold_also_for_small_requests() -> None:
    turns, got = TierTurns(), Counter[str]()
    for _ in range(1_200):
        got.update(turns.share(dict.fromkeys(WEIGHTS, 10), 1))
    assert got == {"critical": 800, "normal": 300, "bulk": 100}


def test_an_empty_tier_leaves_its_share_to_the_others() -> None:
    assert TierTurns().share({"normal": 50}, 20) == {"normal": 20}
    assert TierTurns().share({"normal": 5, "bulk": 50}, 20) == {"normal": 5, "bulk": 15}


def test_bulk_is_never_starved() -> None:
    turns = TierTurns()
    taken = [turns.share({"critical": 1_000, "bulk": 1_000}, 3) for _ in range(30)]
    gaps = "".join("b" if each.get("bulk") else "-" for each in taken)
    assert "-" * 4 not in gaps


@given(
    st.lists(
        st.tuples(
            st.fixed_dictionaries({}, optional={tier: st.integers(0, 40) for tier in WEIGHTS}), st.integers(0, 60)
        )
    )
)
def test_a_share_is_as_large_as_possible(calls: list[tuple[dict[str, int], int]]) -> None:
    turns = TierTurns()
    for waiting, limit in calls:
        share = turns.share(waiting, limit)
        assert sum(share.values()) == min(limit, sum(waiting.values()))
        assert all(0 < count <= waiting[tier] for tier, count in share.items())


def test_routes_that_another_program_has_forged_are_left_out() -> None:
    route = str(WorkRoute("", "queue", "order.*"))
    forged = ("junk", "", "a\tb", "a\tb\tc\td\te")
    assert bindings_of(GroupEntry("orders", "billing", "work", routes=(*forged, "tier:bulk", route))) == {route}
