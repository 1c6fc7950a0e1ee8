"""The rules of tokens: which is newest, what counts as stored, when ownership is lost, how long a new owner waits."""

import itertools
import os

import msgspec
import pytest

from onward.brokers.rabbitmq.ordered.takeover import MANY_UNACKED, Reaction, Takeover, Tenure, TokenStep
from onward.brokers.rabbitmq.ordered.token import (
    LONGEST_LEASE_S,
    Anchor,
    Awaited,
    Probe,
    Stray,
    Token,
    TokenArrival,
    decoded,
    encoded,
    newer,
    thinned,
    wait_note,
    wait_s,
)
from tests.brokers.rabbitmq.token_simulator import LEASE, Rules, Violation, World

PROBE = Probe("mine")
ME = "me:1"


def token(fence: int = 3, number: int = 7, tenure: str = "other:1", **fields: object) -> Token:
    base = Token(fence, number, tenure, "topic", "log", 100, awaits=Awaited(tenure, "other", 15.0))
    return msgspec.structs.replace(base, **fields)


class Feed:
    """Delivers messages under ascending tags."""

    def __init__(self, to: Takeover | Tenure, first: int = 1) -> None:
        self.to = to
        self._tags = itertools.count(first)

    def __call__(self, message: Token | Probe | Stray, *, redelivered: bool = False) -> Reaction:
        return self.to.delivered(TokenArrival(next(self._tags), redelivered, message))


# -- bodies -----------------------------------------------------------------------------------------------------------


def test_a_token_and_a_probe_are_read_as_they_were_written() -> None:
    full = token(anchors=(Anchor(99, 5), Anchor(20, 6)), progress="O1x", is_seed=True)
    assert decoded(encoded(full)) == full
    assert decoded(encoded(PROBE)) == PROBE


def test_an_unknown_field_of_a_later_version_is_ignored() -> None:
    body = msgspec.msgpack.decode(encoded(token())) | {"colour": "red"}
    assert decoded(msgspec.msgpack.encode(body)) == token()


@pytest.mark.parametrize("body", [b"", b"hello", b"\xff\xfe", msgspec.msgpack.encode({"a": 1}), b"\x81\xa1"])
def test_a_message_of_another_program_is_a_stray(body: bytes) -> None:
    assert decoded(body) == Stray(is_newer=False)


def test_a_token_that_this_version_cannot_read_is_recognised() -> None:
    assert decoded(msgspec.msgpack.encode({"onward": "token9"})) == Stray(is_newer=True)
    assert decoded(msgspec.msgpack.encode({"onward": "token", "fence": "high"})) == Stray(is_newer=True)


# -- which token is newest --------------------------------------------------------------------------------------------


def test_the_fence_decides_before_the_number() -> None:
    assert newer(token(3, 9), token(4, 1)).order == (4, 1)
    assert newer(token(3, 9), token(3, 10)).order == (3, 10)
    assert newer(token(3, 9), token(3, 8)).order == (3, 9)
    assert newer(None, token(0, 0)).order == (0, 0)


def test_of_two_first_tokens_the_one_that_starts_earlier_counts() -> None:
    early, late = token(0, 0, watermark=5), token(0, 0, watermark=9)
    assert newer(late, early) is early
    assert newer(early, late) is early


def test_a_claim_is_above_every_token_of_the_former_owner() -> None:
    assert token(3, 7).claimed(ME).order > token(3, 1_000).order


def test_a_claim_still_names_the_owner_whose_events_may_run() -> None:
    claim = token().claimed(ME)
    assert claim.tenure == ME
    assert claim.awaits == token().awaits


# -- finding the newest token -----------------------------------------------------------------------------------------


def test_the_first_delivery_makes_it_send_a_probe_and_the_probe_ends_the_search() -> None:
    search = Takeover(PROBE)
    feed = Feed(search)
    assert feed(token(3, 7)).step is TokenStep.PROBE
    assert feed(token(4, 1)).step is TokenStep.GOES_ON
    assert feed(token(3, 8)).step is TokenStep.GOES_ON
    assert feed(PROBE).step is TokenStep.FOUND
    assert search.newest == token(4, 1)


def test_probes_and_messages_of_others_are_no_tokens() -> None:
    search = Takeover(PROBE)
    feed = Feed(search)
    assert feed(Probe("other")).step is TokenStep.PROBE
    assert feed(Stray(is_newer=False)).step is TokenStep.GOES_ON
    assert feed(PROBE).step is TokenStep.FOUND
    assert search.newest is None


def test_a_probe_that_another_member_had_first_is_no_proof() -> None:
    feed = Feed(Takeover(PROBE))
    feed(token())
    assert feed(PROBE, redelivered=True).step is TokenStep.LOST


def test_a_token_of_a_later_version_is_not_replaced() -> None:
    assert Feed(Takeover(PROBE))(Stray(is_newer=True)).step is TokenStep.LATER


def test_many_leftovers_are_acknowledged_but_never_the_newest_token() -> None:
    search = Takeover(PROBE)
    feed = Feed(search)
    acked: list[int] = []
    for n in range(200):
        acked += feed(token(3, 50 - abs(50 - n))).acks  # the newest one is the 51st
        assert len(search.unacked) <= MANY_UNACKED
    acked += feed(PROBE).acks
    assert 51 not in acked
    assert 51 in search.unacked
    assert search.newest == token(3, 50)
    assert len(acked) == len(set(acked))


# -- writing ----------------------------------------------------------------------------------------------------------


def owner(number: int = 7) -> tuple[Tenure, Feed]:
    """An owner whose claim (4, number) has come back under tag 3."""
    tenure = Tenure(ME, [1, 2])
    feed = Feed(tenure, first=3)
    tenure.send(token(3, number).claimed(ME), 10.0)
    assert feed(token(3, number).claimed(ME)).step is TokenStep.STORED
    return tenure, feed


def test_a_claim_counts_when_it_comes_back_and_then_the_rest_is_acknowledged() -> None:
    tenure = Tenure(ME, [1, 2])
    feed = Feed(tenure, first=3)
    claim = token().claimed(ME)
    tenure.send(claim, 10.0)
    assert feed(Probe("other")) == Reaction()  # nothing is acknowledged before the claim is stored
    assert feed(token(3, 99)) == Reaction()  # a late token of the former owner
    assert feed(claim) == Reaction(TokenStep.STORED, ack_to=4)
    assert (tenure.held, tenure.sure_since) == (claim, 10.0)


def test_certainty_counts_from_the_moment_a_token_was_sent() -> None:
    tenure, feed = owner()
    assert tenure.held is not None
    following = tenure.held.next()
    tenure.send(following, 20.0)
    assert tenure.sure_since == 10.0
    assert feed(following) == Reaction(TokenStep.STORED, ack_to=3)
    assert tenure.sure_since == 20.0


def test_an_acknowledgement_names_a_tag_that_is_open() -> None:
    """The server closes the channel over a tag that it does not know, also in an acknowledgement of several."""
    tenure, feed = owner()
    assert tenure.held is not None
    assert feed(Probe("other")).acks == (4,)
    tenure.send(tenure.held.next(), 20.0)
    assert feed(tenure.held.next()).ack_to == 3


@pytest.mark.parametrize("order", [(3, 7), (3, 99), (4, 6)])
def test_a_late_lower_token_of_a_former_owner_is_acknowledged(order: tuple[int, int]) -> None:
    _, feed = owner()
    assert feed(token(*order)) == Reaction(acks=(4,))


@pytest.mark.parametrize("order", [(4, 7), (4, 8), (5, 0)])
def test_an_equal_or_higher_token_of_another_ends_the_ownership(order: tuple[int, int]) -> None:
    _, feed = owner()
    assert feed(token(*order)).step is TokenStep.LOST


@pytest.mark.parametrize("order", [(4, 7), (5, 0)])
def test_an_equal_or_higher_token_of_another_ends_a_claim(order: tuple[int, int]) -> None:
    tenure = Tenure(ME, [1])
    tenure.send(token(3, 7).claimed(ME), 10.0)
    assert Feed(tenure, 2)(token(*order)).step is TokenStep.LOST


def test_an_own_token_that_another_member_had_first_ends_the_ownership() -> None:
    tenure, feed = owner()
    assert tenure.held is not None
    tenure.send(tenure.held.next(), 20.0)
    assert feed(tenure.held.next(), redelivered=True).step is TokenStep.LOST


def test_an_own_token_that_comes_twice_ends_the_ownership() -> None:
    tenure, feed = owner()
    assert tenure.held is not None
    assert feed(tenure.held).step is TokenStep.LOST


def test_a_token_that_does_not_come_back_in_a_lease_ends_the_ownership() -> None:
    tenure, _ = owner()
    assert tenure.held is not None
    assert not tenure.is_overdue(1_000.0, 15.0)
    tenure.send(tenure.held.next(), 20.0)
    assert not tenure.is_overdue(35.0, 15.0)
    assert tenure.is_overdue(35.1, 15.0)


# -- waiting ----------------------------------------------------------------------------------------------------------


def waits(awaits: Awaited | None, *, gone: frozenset[str] = frozenset(), closed: frozenset[str] = frozenset()) -> float:
    return wait_s(awaits, gone=gone, closed=closed, grace_s=1.0)


def test_nobody_waits_after_a_drained_release_or_at_the_start() -> None:
    assert waits(None) == 0.0


def test_a_new_owner_waits_for_the_lease_of_the_last_one_and_the_grace() -> None:
    assert waits(Awaited("x:1", "x", 15.0)) == pytest.approx(16.15)


def test_an_owner_that_has_ended_by_itself_is_waited_for_only_by_the_grace() -> None:
    assert waits(Awaited("x:1", "x", 15.0).ended()) == 1.0
    assert waits(Awaited("x:1", "x", 15.0), closed=frozenset({"x:1"})) == 1.0


def test_a_member_without_a_process_is_not_waited_for() -> None:
    assert waits(Awaited("x:1", "x", 15.0), gone=frozenset({"x"})) == 0.0
    assert waits(Awaited("x:1", "x", 15.0), gone=frozenset({"y"})) > 15.0


@pytest.mark.parametrize("lease_s", [1e9, 3_601.0, -1.0, float("nan"), float("inf")])
def test_a_lease_that_no_member_can_have_is_waited_for_as_the_longest_one(lease_s: float) -> None:
    damaged = Awaited("x:1", "x", lease_s)
    assert waits(damaged) == pytest.approx(1.01 * LONGEST_LEASE_S + 1.0)
    assert "damaged or forged" in wait_note(damaged, waits(damaged))
    longest = Awaited("x:1", "x", LONGEST_LEASE_S)
    assert waits(longest) == waits(damaged)
    assert "member x" in wait_note(longest, waits(longest))


# -- anchors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 40, 700])
def test_anchors_are_few_and_ever_farther_apart(step: int) -> None:
    anchors: tuple[Anchor, ...] = ()
    for offset in range(0, 1_000_000, step):
        anchors = thinned((Anchor(offset, offset), *anchors))
        assert anchors[0].offset == offset
        assert len(anchors) <= 8
        if offset > 20_000 * step:
            break
    offsets = [anchor.offset for anchor in anchors]
    assert offsets == sorted(set(offsets), reverse=True)
    assert offsets[0] - offsets[1] <= 64 * step, "the nearest older anchor is far back"
    assert offsets[0] - offsets[-1] >= min(1_000 * step, 200_000), "no anchor is far back"


# -- all of it, with faults -------------------------------------------------------------------------------------------

SEEDS = int(os.environ.get("ONWARD_TOKEN_SEEDS", "150"))
STEPS = 3_000


@pytest.mark.parametrize("start", range(0, SEEDS, 10))
def test_kills_stops_and_late_writes_neither_lose_a_settle_nor_make_two_owners(start: int) -> None:
    reports = 0
    for seed in range(start, start + 10):
        world = World(seed).run(STEPS)
        world.settle_down()
        reports += world.count
    assert reports > 1_000, "hardly any token was written"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_kill_after_any_step_loses_nothing(seed: int) -> None:
    """The same run, killed after the first step, after the second, and so on."""
    for last in range(250):
        world = World(seed, members=2)
        for _ in range(last):
            world.step()
        world.kill(world.members[0], supervised=bool(last % 2))
        world.settle_down()


def broken(rules: Rules) -> set[str]:
    """What the checks find without one of the rules."""
    found = set()
    for seed in range(100):
        try:
            World(seed, rules).run(STEPS).settle_down()
        except Violation as violation:
            found.add(str(violation))
    return found


def test_the_checks_find_that_the_probe_is_missing() -> None:
    assert any("an older token was taken" in each for each in broken(Rules(probe=False)))


def test_the_checks_find_that_a_confirm_was_taken_for_a_proof() -> None:
    found = broken(Rules(back=False))
    assert any("lost" in each or "older token" in each for each in found)


def test_the_checks_find_that_an_owner_did_not_wait() -> None:
    assert any("sure at the same time" in each for each in broken(Rules(wait=False)))


def test_the_model_knows_leases_that_are_longer_than_a_step() -> None:
    assert LEASE > 10.0


def test_a_token_with_an_impossible_fence_is_no_token() -> None:
    """Its successor could not be encoded, and the partition would stand still."""
    assert decoded(encoded(token(fence=1 << 63))) == Stray(is_newer=False)
    assert decoded(encoded(token(number=1 << 63))) == Stray(is_newer=False)


@pytest.mark.parametrize("order", [(1 << 61, 0), (1 << 62, 0), (0, 1 << 61)])
def test_a_new_owner_does_not_go_on_from_a_token_without_room_above_it(order: tuple[int, int]) -> None:
    search = Takeover(PROBE)
    feed = Feed(search)
    feed(token(*order))
    feed(token(3, 7))
    assert feed(PROBE).step is TokenStep.FOUND
    assert search.newest == token(3, 7)


def test_the_claim_after_the_largest_token_is_read_back() -> None:
    claim = token(fence=(1 << 61) - 1).claimed(ME)
    assert decoded(encoded(claim)) == claim
