"""Which shards a relay claims, gives back and takes over. Values in, values out."""

from onward.outbox.base import LeasePlan, RelayState, RelaysView, ShardState
from onward.outbox.leases import RelayLeases

LEASE_S = 10.0


def view(owners: dict[int, str | None], beats: dict[str, int]) -> RelaysView:
    relays = [RelayState(name, beat, LEASE_S) for name, beat in beats.items()]
    return RelaysView(relays, [ShardState(number, owner, 1) for number, owner in owners.items()])


def decide(leases: RelayLeases, owners: dict[int, str | None], beats: dict[str, int], now: float) -> LeasePlan:
    return leases.decide(view(owners, beats), now, busy=())


def test_a_lone_relay_claims_every_shard() -> None:
    plan = decide(RelayLeases("a", LEASE_S), dict.fromkeys(range(4)), {"a": 1}, 0.0)
    assert plan == LeasePlan(claim=[0, 1, 2, 3], release=[], strike=[])


def test_a_second_relay_claims_nothing_until_the_first_gives_shards_back() -> None:
    owners: dict[int, str | None] = dict.fromkeys(range(4), "a")
    beats = {"a": 1, "b": 1}
    assert decide(RelayLeases("b", LEASE_S), owners, beats, 0.0).claim == []
    assert decide(RelayLeases("a", LEASE_S), owners, beats, 0.0).release == [2, 3]


def test_a_busy_shard_is_not_given_back_but_no_longer_read() -> None:
    leases = RelayLeases("a", LEASE_S)
    owners: dict[int, str | None] = dict.fromkeys(range(4), "a")
    plan = leases.decide(view(owners, {"a": 1, "b": 1}), 0.0, busy={0, 1, 2, 3})
    assert plan.release == []
    assert leases.yielding == {2, 3}
    plan = leases.decide(view(owners, {"a": 2, "b": 2}), 1.0, busy={0, 1})
    assert plan.release == [2, 3]
    assert leases.yielding == set()


def test_the_shards_of_a_relay_are_taken_over_when_its_beat_stands_still_for_its_lease() -> None:
    leases = RelayLeases("b", LEASE_S)
    owners: dict[int, str | None] = dict.fromkeys(range(2), "a")
    assert decide(leases, owners, {"a": 7, "b": 1}, 100.0).strike == []
    assert decide(leases, owners, {"a": 7, "b": 2}, 109.9).strike == []
    plan = decide(leases, owners, {"a": 7, "b": 3}, 110.0)
    assert plan.strike == ["a"]
    assert plan.claim == [0, 1]


def test_a_relay_that_still_beats_is_never_struck() -> None:
    leases = RelayLeases("b", LEASE_S)
    for turn in range(50):
        assert decide(leases, {0: "a"}, {"a": turn, "b": turn}, turn * 9.0).strike == []


def test_a_relay_that_was_never_seen_is_observed_for_a_whole_lease_first() -> None:
    assert decide(RelayLeases("b", LEASE_S), {0: "a"}, {"a": 1, "b": 1}, 1_000_000.0).strike == []


def test_a_shard_whose_owner_is_not_listed_is_free() -> None:
    assert decide(RelayLeases("b", LEASE_S), {0: "gone"}, {"b": 1}, 0.0).claim == [0]


def test_a_relay_that_retires_gives_everything_back() -> None:
    leases = RelayLeases("a", LEASE_S)
    leases.retiring = True
    plan = leases.decide(view({0: "a", 1: "b", 2: "a"}, {"a": 1, "b": 1}), 0.0, busy={0})
    assert plan == LeasePlan(claim=(), release=[0, 2], strike=[], leave=True)


def test_the_next_turn_comes_when_a_lease_of_another_relay_may_end() -> None:
    leases = RelayLeases("b", LEASE_S)
    decide(leases, {0: "a"}, {"a": 1, "b": 1}, 100.0)
    assert leases.next_turn(100.0) == 101.0
    assert leases.next_turn(109.5) == 110.0


def test_publishing_stops_before_another_relay_may_take_over() -> None:
    """Another relay sees our beat at the earliest when we sent it, and waits for our lease from then on."""
    assert RelayLeases("a", LEASE_S).sure_until(100.0) < 100.0 + LEASE_S
