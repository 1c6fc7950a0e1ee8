"""The decisions of a member about its leases. They are pure: values in, values out."""

import math

import pytest

from onward.brokers.base import Assigned
from onward.brokers.core.holdings import Hold
from onward.brokers.core.leasing import Decisions, Situation, TopicView, decide, released
from onward.brokers.core.observed import Observed
from onward.brokers.core.share import Seat, quotas, wish
from onward.event import Partition

NOW = 100.0


def partition(index: int) -> Partition:
    return Partition("orders", index)


def hold(index: int, *, fence: int = 1, announced: bool = True, deadline: float = math.inf) -> Hold[None]:
    made: Hold[None] = Hold(Assigned(partition(index), 1, fence, "log", None, False), None, position=0)
    made.announced = announced
    made.deadline = deadline
    made.revoking = deadline < math.inf
    return made


def seat(index: int, owner: str | None, fence: int = 1) -> Seat:
    return Seat(partition(index), owner, fence)


def turn(
    holds: list[Hold[None]],
    seats: list[Seat],
    *,
    members: dict[str, bool] | None = None,
    asked: dict[Hold[None], bool] | None = None,
    retiring: bool = False,
) -> Decisions[None]:
    situation = Situation("me", {each.partition: each for each in holds}, asked or {}, retiring)
    return decide(situation, [TopicView("orders", seats, members or {"me": True})], NOW)


@pytest.mark.parametrize("partitions", [1, 3, 8, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_quotas_are_fair_and_stable(partitions: int, count: int) -> None:
    members = [f"m{n}" for n in range(count)]
    first = quotas("orders", partitions, members, {})
    assert sum(first.values()) == partitions
    assert max(first.values()) - min(first.values()) <= 1
    assert quotas("orders", partitions, members, first) == first, "fair shares do not move"
    more = quotas("orders", partitions, [*members, "new"], first)
    moved = sum(max(0, first[member] - more[member]) for member in members)
    assert moved == more["new"], "a join moves only the partitions that the new member gets"


def test_small_topics_do_not_all_go_to_one_member() -> None:
    members = ["a", "b", "c"]
    owners = {max(quotas(f"topic-{n}", 1, members, {}).items(), key=lambda item: item[1])[0] for n in range(20)}
    assert owners == set(members)


def test_what_one_member_gives_back_another_claims() -> None:
    seats = [seat(n, "a" if n < 6 else None) for n in range(8)]
    assert wish("orders", "b", seats, ["a", "b"], 0).claim == seats[6:]
    assert wish("orders", "a", seats, ["a", "b"], 0).surplus == 2
    assert wish("orders", "a", seats, ["a", "b"], 2).surplus == 0, "it is already giving back two"


def test_a_lone_member_claims_free_partitions_and_renews_its_own() -> None:
    mine = hold(0)
    done = turn([mine], [seat(0, "me"), seat(1, None), seat(2, None)])
    assert done.renewed == [mine]
    assert [each.partition.index for each in done.claims] == [1, 2]
    assert not done.lost
    assert not done.revoked


def test_a_partition_with_another_owner_or_another_fence_is_lost() -> None:
    taken, refenced = hold(0), hold(1, fence=1)
    done = turn([taken, refenced], [seat(0, "other", 2), seat(1, "me", 2)], members={"me": True, "other": True})
    assert done.lost == [taken, refenced]
    assert not done.renewed


def test_a_seat_left_from_an_earlier_ownership_of_ours_is_free() -> None:
    done = turn([], [seat(0, "me", 3)])
    assert [each.partition.index for each in done.claims] == [0]


def test_unannounced_partitions_are_given_back_first_then_those_with_the_highest_index() -> None:
    holds = [hold(0), hold(1, announced=False), hold(2), hold(3)]
    done = turn(holds, [seat(n, "me") for n in range(4)], members={"me": True, "new": True})
    assert done.unannounced == [holds[1]]
    assert done.revoked == [holds[3]]


def test_partitions_that_are_being_revoked_count_as_given_back() -> None:
    holds = [hold(0), hold(1), hold(2, deadline=NOW + 5), hold(3, deadline=NOW + 5)]
    done = turn(holds, [seat(n, "me") for n in range(4)], members={"me": True, "new": True})
    assert not done.revoked
    assert not done.overdue
    assert len(done.renewed) == 4, "we own them until they are released"


def test_requested_partitions_are_released_and_overdue_ones_are_lost() -> None:
    asked, late, kept = hold(0, deadline=NOW + 5), hold(1, deadline=NOW - 1), hold(2)
    done = turn([asked, late, kept], [seat(n, "me") for n in range(3)], asked={asked: True})
    assert done.released == {asked: True}
    assert done.overdue == [late]
    assert done.renewed == [kept]
    assert not done.retires, "the released partition was revoked"


def test_a_member_that_releases_a_partition_that_was_not_revoked_retires() -> None:
    asked, kept = hold(0), hold(1)
    done = turn([asked, kept], [seat(0, "me"), seat(1, "me"), seat(2, None)], asked={asked: True})
    assert done.retires
    assert not done.claims, "it claims no more partitions"
    assert done.renewed == [kept], "it keeps its other partitions"
    assert done.struck == {"orders": ["me"]}, "it no longer counts as a member"


def test_dead_members_are_removed_from_the_list_and_get_no_share() -> None:
    done = turn([], [seat(0, None), seat(1, None)], members={"me": True, "dead": False})
    assert done.struck == {"orders": ["dead"]}
    assert len(done.claims) == 2


def test_a_member_that_does_not_receive_renews_no_lease() -> None:
    late, kept = hold(0, deadline=NOW - 1), hold(1)
    done = released(Situation("me", {late.partition: late, kept.partition: kept}, {}, False), NOW)
    assert done.overdue == [late]
    assert not done.renewed


def test_a_lease_has_ended_when_its_beat_has_not_changed_for_the_lease_time() -> None:
    observed = Observed()
    assert not observed.is_over("a", 3.0, now=1e9), "it was never seen, so it must be observed first"
    observed.saw("a", 7, now=0.0)
    observed.saw("a", 7, now=2.9)
    assert not observed.is_over("a", 3.0, now=2.9)
    assert observed.is_over("a", 3.0, now=3.0)
    observed.saw("a", 5, now=3.1)  # set back by a fail-over
    assert not observed.is_over("a", 3.0, now=6.0)
    assert observed.over_at("a", 3.0) == pytest.approx(6.1)
    observed.forget({"a"})
    assert observed.over_at("a", 3.0) is None
