"""Dead letters: stored before a successor runs, moved by operators, and refused by a store that is down."""

import msgspec
import pytest
from tests.flow.driver import FAR_S, LOG, WALL, Driver, P, Q, claims, failure, record, stored, working

from onward.brokers.base import Moved, State, Tries, record_id
from onward.flow.entry import DONE, Again, Dead
from onward.flow.settling import ASIDE_RETRY_S


class TestDeadLetters:
    def test_the_lane_waits_until_the_letter_is_stored(self) -> None:
        d = working()
        d.deliver("a", "a", "b")
        d.end({0: Dead(failure())}, turn=False)
        call = d.tick().settle
        assert call is not None
        assert [(each.position, each.state) for each in call.aside] == [(0, State.DEAD)]
        assert d.running() == [2]
        d.answer_settle()
        d.tick()
        assert d.running() == [1, 2]

    def test_the_letter_is_in_the_same_settle_as_the_progress_that_claims_it(self) -> None:
        d = working()
        d.deliver("a")
        d.end({0: Dead(failure())}, turn=False)
        call = d.tick().settle
        assert call is not None
        assert (call.progress[0].watermark, list(call.progress[0].fresh)) == (1, [0])

    def test_on_dead_pass_lets_successors_go_on(self) -> None:
        d = working(on_dead="pass")
        d.deliver("a", "a")
        d.dead(0)
        d.done(1)
        assert d.states() == {0: State.DEAD}
        assert d.progress[P].watermark == 2
        assert d.lag().parked == 0

    def test_on_dead_hold_holds_its_successors_but_no_other_key(self) -> None:
        d = working(on_dead="hold")
        d.deliver("a", "a", "b")
        d.dead(0)
        d.deliver("a", "b")
        d.done(2)
        assert d.running() == [4]
        assert d.states() == {0: State.DEAD, 1: State.HELD, 3: State.HELD}
        d.wait(1e6)
        assert d.running() == [4]

    def test_held_successors_follow_a_replay(self) -> None:
        d = working(on_dead="hold")
        d.deliver("a", "a", "a")
        d.dead(0)
        d.move(0, to=State.WAITING, due=0.0)
        assert d.run_out() == [0, 1, 2]
        assert d.states() == {}

    def test_held_successors_go_on_when_the_letter_is_dropped(self) -> None:
        d = working(on_dead="hold")
        d.deliver("a", "a", "a")
        d.dead(0)
        d.move(0, to=None)
        assert d.run_out() == [1, 2]

    def test_held_keys_stay_held_under_the_next_owner(self) -> None:
        d = working(on_dead="hold")
        d.deliver("a", "a")
        d.dead(0)
        d.fence(P)
        d.assign()
        d.deliver("a", "b")
        assert d.running() == [3]
        assert d.states() == {0: State.DEAD, 1: State.HELD, 2: State.HELD}

    def test_a_record_that_dies_holds_its_key_too(self) -> None:
        d = working(on_dead="hold")
        d.deliver("a", "a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S + 1)
        d.dead(0)
        assert (d.running(), d.states()) == ([], {0: State.DEAD, 1: State.HELD})

    def test_a_record_that_dies_lets_its_successors_run_once_its_letter_is_stored(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S + 1)
        d.end({0: Dead(failure())}, turn=False)
        d.tick()
        assert d.running() == []
        d.turn()
        assert (d.running(), d.states()) == ([1], {0: State.DEAD, 1: State.HELD})

    def test_a_failure_has_the_time_of_the_first_one(self) -> None:
        d = working()
        d.deliver("a")
        first = d.now + WALL
        d.again(0, in_s=5)
        d.wait(5)
        d.dead(0)
        last = d.letter(0).failure
        assert last is not None
        assert last.first == first
        assert d.letter(0).tries == Tries(2)

    def test_the_failure_of_a_parked_event_survives_a_crash_of_its_owner(self) -> None:
        d = working()
        d.deliver("a")
        first = d.now + WALL
        d.again(0, in_s=FAR_S)
        waiting = d.letter(0).failure
        assert waiting is not None
        assert (waiting.error, waiting.message, waiting.traceback, waiting.first) == ("KeyError", "no", "", first)
        d.fence(P)
        d.assign(unclean=True)
        d.wait(FAR_S + 1)
        assert d.running() == [0]
        again = d.letter(0).failure
        assert again == waiting, "recording its start changed the failure"
        d.dead(0)
        last = d.letter(0).failure
        assert last is not None
        assert (last.first, last.error) == (first, "ValueError")

    @pytest.mark.parametrize(("reason", "message"), [("expired", "no; before that KeyError: no"), ("exhausted", "no")])
    def test_the_failure_of_an_expired_event_shows_the_last_error_too(self, reason: str, message: str) -> None:
        d = working()
        d.deliver("a")
        d.again(0, in_s=5)
        d.wait(5)
        d.end({0: Dead(msgspec.structs.replace(failure("Expired"), reason=reason))})
        last = d.letter(0).failure
        assert last is not None
        assert last.message == message

    def test_letters_without_a_key_hold_no_key(self) -> None:
        d = working(on_dead="hold")
        d.deliver(None, None)
        d.dead(0)
        d.deliver(None)
        assert d.running() == [1, 2]


class TestAsideRefused:
    def test_the_event_stays_open_and_others_go_on(self) -> None:
        d = working()
        d.store_down = True
        d.deliver("a", "a", "b", "b")
        d.dead(0)
        d.done(2)
        assert d.running() == [3]
        assert not claims(d.progress[P], 0)
        assert claims(d.progress[P], 2)
        assert (d.states(), d.lag().queued) == ({}, 2)

    def test_storing_the_letter_is_retried_until_it_succeeds(self) -> None:
        d = working()
        d.store_down = True
        d.deliver("a", "a")
        d.dead(0)
        d.wait(10 * ASIDE_RETRY_S)
        tries = sum(bool(each.aside) for each in d.settlements)
        assert 8 <= tries <= 12
        d.store_down = False
        d.wait(ASIDE_RETRY_S)
        assert (d.states(), d.running()) == ({0: State.DEAD}, [1])

    def test_all_events_of_a_parked_key_wait_for_the_store(self) -> None:
        d = working()
        d.store_down = True
        d.deliver("a", "a", "b")
        d.again(0, in_s=FAR_S)
        d.deliver("a", "b")
        d.done(2)
        assert d.running() == [4]
        assert d.progress[P].watermark == 0
        d.store_down = False
        d.wait(ASIDE_RETRY_S)
        assert d.states() == {0: State.WAITING, 1: State.HELD, 3: State.HELD}
        d.wait(FAR_S)
        d.done(4)
        assert d.run_out() == [0, 1, 3]

    def test_another_partition_in_the_same_settle_loses_nothing(self) -> None:
        d = working()
        d.assign(Q)
        d.store_down = True
        d.deliver("a")
        d.deliver("a", partition=Q)
        d.end({0: Dead(failure())}, turn=False)
        d.end({0: DONE}, partition=Q)
        assert d.progress[Q].watermark == 1
        assert not claims(d.progress[P], 0)

    def dead_in_both(self) -> Driver:
        """A driver with a settle in flight that carries a letter of each partition."""
        d = working()
        d.assign(Q)
        for partition in (P, Q):
            d.deliver("a", "a", partition=partition)
        for partition in (P, Q):
            d.end({0: Dead(failure())}, partition=partition, turn=False)
        d.tick()
        return d

    def test_the_other_partitions_of_that_settle_are_settled(self) -> None:
        d = self.dead_in_both()
        d.refuse_settle(P)
        d.turn()
        assert (d.running(P), d.running(Q)) == ([], [1])
        assert (d.progress[P].watermark, d.progress[Q].watermark) == (0, 1)
        d.done(1, partition=Q)
        d.wait(ASIDE_RETRY_S)
        written = [each.partition for settlement in d.settlements for each in settlement.aside]
        assert written == [P, Q, P], "a stored letter was written again"
        assert (d.states(P), d.running(P)) == ({0: State.DEAD}, [1])

    def test_a_partition_that_is_lost_in_that_settle_is_forgotten(self) -> None:
        d = self.dead_in_both()
        d.refuse_settle(P, lost=[Q])
        d.turn()
        assert d.plane.held == [P]
        d.wait(ASIDE_RETRY_S)
        assert (d.states(P), d.states(Q)) == ({0: State.DEAD}, {})

    def test_a_refusal_does_not_apply_to_a_partition_that_was_assigned_again(self) -> None:
        d = self.dead_in_both()
        d.assign(P, load=False)
        d.refuse_settle(P)
        d.turn()
        assert sorted(d.plane.held) == [P, Q]
        d.deliver_at({0: "a"})
        assert d.running() == [0]

    def test_after_a_refusal_removals_are_sent_again(self) -> None:
        d = Driver()
        d.assign(stored=stored(5), records=[record(0, "a")])
        d.deliver_at({5: "b"})
        d.store_down = True
        d.end({0: DONE, 5: Dead(failure())})
        assert d.states() == {}

    def test_a_refused_letter_is_forgotten_after_a_fence(self) -> None:
        d = working()
        d.store_down = True
        d.deliver("a")
        d.dead(0)
        d.fence(P)
        d.assign()
        d.store_down = False
        d.wait(10)
        assert d.states() == {}
        d.deliver_at({0: "a"})
        assert d.running() == [0]


class TestMovesFromOutside:
    def dead_one(self, **limits: object) -> Driver:
        d = working(**limits)
        d.deliver("a")
        d.dead(0)
        assert d.states() == {0: State.DEAD}
        return d

    def test_a_replayed_letter_runs_before_events_that_wait_in_its_lane(self) -> None:
        d = self.dead_one()
        d.deliver("a", "a", "a")
        d.move(0, to=State.WAITING, due=0.0)
        assert d.running() == [1]
        d.new_starts()
        d.run_out()
        assert d.new_starts() == [0, 2, 3]
        assert d.states() == {}

    def test_a_replayed_letter_blocks_its_lane_like_any_event(self) -> None:
        d = self.dead_one()
        d.move(0, to=State.WAITING, due=0.0)
        d.deliver("a", "b")
        assert d.running() == [0, 2]

    def test_a_replayed_letter_also_runs_if_the_event_before_it_is_parked(self) -> None:
        d = self.dead_one()
        d.deliver("a", "a")
        d.move(0, to=State.WAITING, due=0.0)
        d.again(1, in_s=FAR_S)
        assert d.running() == [0]
        d.done(0)
        d.wait(FAR_S + 1)
        assert d.run_out() == [1, 2]

    def test_the_attempts_of_a_replayed_letter_are_counted_from_one(self) -> None:
        d = self.dead_one()
        d.move(0, to=State.WAITING, due=0.0)
        assert d.starts[-1].attempt == 1

    def test_a_replayed_letter_may_die_again(self) -> None:
        d = self.dead_one()
        for _ in range(3):
            d.move(0, to=State.WAITING, due=0.0)
            d.dead(0)
            assert d.states() == {0: State.DEAD}
        assert d.running() == []

    def test_a_waiting_record_moved_to_now_runs_now(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.again(0, in_s=FAR_S)
        d.move(0, to=State.WAITING, due=d.now + WALL)
        assert d.running() == [0]

    def test_a_removed_record_never_runs_and_its_successors_go_on(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.again(0, in_s=FAR_S)
        d.move(0, to=None)
        assert d.running() == [1]
        d.done(1)
        assert d.states() == {}
        assert d.progress[P].watermark == 2

    def test_a_waiting_record_that_an_operator_gives_up_lets_its_successors_go_on(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.again(0, in_s=FAR_S)
        d.move(0, to=State.DEAD)
        assert d.running() == [1]
        d.done(1)
        assert d.states() == {0: State.DEAD}

    def test_a_record_removed_while_it_runs_is_not_written_again(self) -> None:
        d = Driver()
        d.assign(stored=stored(2), records=[record(0, "a"), record(1, "a")])
        d.move(0, to=None)
        d.again(0, in_s=FAR_S)
        assert d.states() == {1: State.HELD}
        assert d.running() == [1]

    def test_a_record_removed_before_its_change_was_stored_is_not_written_again(self) -> None:
        d = Driver()
        d.assign(stored=stored(2), records=[record(0, "a")])
        d.end({0: Again(d.now + FAR_S, failure())}, turn=False)
        d.move(0, to=None)
        assert d.states() == {}

    def test_a_move_reported_to_an_earlier_ownership_is_ignored(self) -> None:
        d = self.dead_one()
        d.assign()
        d.owned[P] = 1
        d.move(0, to=State.WAITING, due=0.0)
        d.owned[P] = 2
        d.turn()
        assert d.running() == []

    def test_a_page_read_before_a_record_was_done_does_not_bring_it_back(self) -> None:
        d = Driver()
        d.assign(stored=stored(6), records=[record(0, "a", State.DEAD), record(5, "b")])
        assert d.running() == [5]
        d.records[d.letter(0).id] = record(0, "a", State.WAITING, due=0.0)
        d.plane.moved(moved_to_waiting(0), d.at)
        d.tick()
        (load,) = d.loads
        d.loads = []
        page = d.read_page(load)
        d.done(5)
        d.plane.loaded(load, page, d.at)
        d.turn()
        assert d.running() == [0]

    def test_a_replay_also_runs_if_there_is_no_room_for_its_event(self) -> None:
        d = Driver(max_in_flight_bytes=10)
        late = record(1, "b", State.WAITING, due=WALL + 1e6, size=9)
        d.assign(stored=stored(5), records=[record(0, "a", State.DEAD, size=9), late])
        d.move(0, to=State.WAITING, due=0.0)
        assert d.running() == [0]

    def test_a_replay_reported_while_a_page_is_read_is_not_forgotten(self) -> None:
        d = Driver()
        late = record(9, "c", State.WAITING, due=WALL + 1e6)
        d.assign(stored=stored(10), records=[record(0, "a", State.DEAD), record(3, "b", State.DEAD), late])
        pages = []
        for position, key in ((0, "a"), (3, "b")):
            d.records[d.letter(position).id] = record(position, key, State.WAITING, due=0.0)
            d.plane.moved(moved_to_waiting(position), d.at)
            d.tick()
            pages += [(load, d.read_page(load)) for load in d.loads]
            d.loads = []
        for load, page in pages:
            d.plane.loaded(load, page, d.at)
        d.turn()
        assert d.running() == [0, 3]


def moved_to_waiting(position: int) -> Moved:
    return Moved(P, 1, [record_id("g", LOG, P, position)], State.WAITING, 0.0)


def test_a_suspect_record_whose_mark_cannot_be_stored_does_not_stop_the_others() -> None:
    d = Driver()
    d.assign(stored=stored(5), records=[record(0, "a", tries=Tries(0, 1))], unclean=True, load=False)
    d.store_down = True
    d.turn()
    d.deliver_at({5: "b", 6: "c"})
    d.wait(30)
    assert d.running() == [5, 6]
    d.store_down = False
    d.done(5, 6)
    d.wait(5)
    assert d.running() == [0]
    d.done(0)
    assert d.states() == {}


def test_records_whose_marks_cannot_be_stored_hold_no_slots() -> None:
    d = Driver(concurrency=1)
    d.assign(stored=stored(5), records=[record(0, "a"), record(1, "b")], unclean=True, load=False)
    d.store_down = True
    d.turn()
    d.deliver_at({5: "c"})
    d.wait(30)
    assert d.running() == [5]
    d.done(5)
    d.store_down = False
    d.wait(5)
    assert d.run_out() == [0, 1]


def test_a_suspect_whose_mark_was_not_stored_stays_a_suspect() -> None:
    d = Driver()
    d.assign(stored=stored(5), records=[record(0, "a", tries=Tries(0, 1))], unclean=True, load=False)
    d.store_down = True
    d.turn()
    d.store_down = False
    d.revoke(P)
    d.wait(5)
    assert d.drained == [P]
    assert d.letter(0).tries == Tries(0, 1)


def test_with_partition_order_a_replay_runs_before_waiting_events() -> None:
    d = working(ordering="partition")
    d.deliver("a")
    d.dead(0)
    d.deliver("b", "c", "d")
    d.move(0, to=State.WAITING, due=0.0)
    assert d.run_out() == [1, 0, 2, 3]


def test_with_partition_order_a_replay_runs_before_a_delayed_head() -> None:
    d = working(ordering="partition")
    d.deliver("a")
    d.dead(0)
    d.deliver("b", "c")
    d.again(1, in_s=5)
    d.move(0, to=State.WAITING, due=0.0)
    assert d.running() == [0]
    d.done(0)
    assert d.running() == []
    d.wait(5)
    assert d.run_out() == [1, 2]


def test_with_partition_order_records_run_before_events_delivered_meanwhile() -> None:
    d = Driver(ordering="partition")
    d.assign(stored=stored(5), records=[record(3, None), record(1, None)], load=False)
    d.deliver("b", "c", turn=False)
    d.turn()
    assert d.run_out() == [1, 3, 5, 6]


def test_a_replay_runs_before_a_head_that_waits_for_a_slot() -> None:
    d = working(concurrency=1)
    d.deliver("a")
    d.dead(0)
    d.deliver("x", "a")
    d.move(0, to=State.WAITING, due=0.0)
    assert d.run_out() == [1, 0, 2]


def test_a_replay_runs_before_a_delayed_head() -> None:
    d = working()
    d.deliver("a")
    d.dead(0)
    d.deliver("a", "a")
    d.again(1, in_s=20)
    d.move(0, to=State.WAITING, due=0.0)
    assert d.running() == [0]
    assert d.states() == {0: State.WAITING, 1: State.WAITING, 2: State.HELD}
    d.done(0)
    assert d.running() == []  # it waits for the rest of its delay
    d.wait(20)
    assert d.run_out() == [1, 2]
    assert d.lag().delayed == 0


def test_a_replay_runs_after_an_older_one_that_waits_for_a_slot() -> None:
    d = working(concurrency=1)
    d.deliver("a", "a")
    d.dead(0)
    d.dead(1)
    d.deliver("x", "a")
    d.move(0, to=State.WAITING, due=0.0)
    d.move(1, to=State.WAITING, due=0.0)
    assert d.run_out() == [2, 0, 1, 3]


def test_an_older_replay_runs_before_one_that_waits_for_a_slot() -> None:
    d = working(concurrency=1)
    d.deliver("a", "a")
    d.dead(0)
    d.dead(1)
    d.deliver("x", "a")
    d.move(1, to=State.WAITING, due=0.0)
    d.move(0, to=State.WAITING, due=0.0)
    assert d.run_out() == [2, 0, 1, 3]


def test_a_delayed_event_does_not_join_the_batch_of_a_replay() -> None:
    d = working(ordering="partition", batch_size=4)
    d.deliver("a")
    d.dead(0)
    d.deliver("b")
    d.again(1, in_s=5)
    d.move(0, to=State.WAITING, due=0.0)
    assert d.running() == [0]


def test_the_letter_of_an_event_that_is_open_again_is_removed_before_it_runs() -> None:
    """The broker stores records before progress, and the owner died in between."""
    d = Driver()
    d.assign(stored=stored(0), records=[record(0, "a", State.DEAD)], unclean=True)
    d.deliver("a")
    assert d.running() == [0]
    assert d.states() == {}


def test_a_letter_stays_after_a_clean_end_of_its_owner() -> None:
    d = Driver()
    d.assign(stored=stored(1), records=[record(0, "a", State.DEAD)])
    d.deliver("a")
    d.done(1)
    assert d.states() == {0: State.DEAD}


@pytest.mark.parametrize("on_dead", ["pass", "hold"])
def test_a_write_of_the_owner_after_a_move_counts(on_dead: str) -> None:
    """An operator gave the record up while the owner's write was on its way. The write wins, and the event is tried."""
    d = working(on_dead=on_dead)
    d.deliver("a", "a")
    d.again(0, in_s=FAR_S)
    id_ = d.letter(0).id
    d.plane.moved(Moved(P, d.owned[P], [id_], State.DEAD, None), d.at)
    d.turn()
    assert d.states()[0] is State.WAITING
    d.wait(FAR_S)
    assert d.run_out() == [0, 1]
    assert d.states() == {}


def test_a_page_read_before_a_replay_does_not_hide_the_record() -> None:
    """An operator gave the record up and replayed it while its page was being read (simulator, seed 3620)."""
    d = Driver()
    far = d.at.wall + FAR_S
    d.assign(stored=stored(1), records=[record(0, "a", State.WAITING, due=far)])
    d.move(0, to=State.DEAD, turn=False)
    (load,) = d.tick().load
    page = d.read_page(load)
    d.move(0, to=State.WAITING, due=d.at.wall, turn=False)
    d.loads = []
    d.plane.loaded(load, page, d.at)
    d.turn()
    assert d.running() == [0]


def test_a_replayed_letter_of_an_event_that_is_open_again_is_removed_with_it() -> None:
    """Its progress was not stored, so the log delivers the event again. An operator replays its letter meanwhile."""
    d = Driver()
    d.assign(records=[record(0, "a", State.DEAD)])
    d.deliver("a")
    d.move(0, to=State.WAITING, due=0.0)
    assert d.running() == [0]
    d.done(0)
    assert d.states() == {}


def test_a_replayed_letter_of_an_event_that_dies_again_stays() -> None:
    d = Driver()
    d.assign(records=[record(0, "a", State.DEAD)])
    d.deliver("a")
    d.move(0, to=State.WAITING, due=0.0)
    d.dead(0)
    assert d.states() == {0: State.DEAD}


class TestRemovedWhileItsRecordWaitsToBeStored:
    """The store has an older version of the record, and an operator removes it (found by the simulator)."""

    def held_one(self) -> Driver:
        d = working()
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        d.deliver("a", turn=False)
        d.records[record(1, "a").id] = record(1, "a")
        return d

    def test_its_event_is_done(self) -> None:
        d = self.held_one()
        d.move(1, to=None)
        assert (d.progress[P].watermark, d.states()) == (2, {0: State.WAITING})

    def test_its_event_is_also_done_if_the_store_refuses(self) -> None:
        d = self.held_one()
        d.store_down = True
        d.tick()
        d.move(1, to=None)
        d.wait(10)
        assert (d.progress[P].watermark, d.states()) == (2, {0: State.WAITING})
        assert d.plane.open == 0

    def test_its_event_is_also_done_if_the_record_was_just_stored(self) -> None:
        d = self.held_one()
        d.tick()
        d.move(1, to=None)
        assert (d.progress[P].watermark, d.states()) == (2, {0: State.WAITING})
        assert d.plane.open == 0


def test_a_second_replay_that_empties_the_lane_lets_the_first_one_run() -> None:
    """The second replay took the last event, a delayed one, out of the lane of its key (simulator, seed 57903)."""
    d = Driver()
    d.page = 1
    d.assign(stored=stored(6), records=[record(0, "a", State.DEAD), record(1, "a", State.DEAD), record(5, "a")])
    assert d.running() == [5]
    d.move(0, 1, to=State.WAITING, due=0.0, turn=False)
    d.tick()
    d.answer_loads()
    d.end({5: Again(d.now + 0.1, failure())}, turn=False)
    d.turn()
    assert d.running() == [0]
    d.done(0)
    d.done(1)
    d.wait(1)
    assert d.running() == [5]


@pytest.mark.parametrize("to", [State.WAITING, State.DEAD])
def test_a_record_that_is_moved_just_after_its_event_was_done_is_still_removed(to: State) -> None:
    """It came back as a dead record that held its key, although the store had removed it (simulator, seed 229229)."""
    d = Driver(on_dead="hold")
    d.assign(stored=stored(2), records=[record(0, "a")])
    d.end({0: DONE}, turn=False)
    d.move(0, to=State.WAITING, due=0.0, turn=False)
    d.records[d.letter(0).id] = record(0, "a", to)
    d.turn()
    assert (d.states(), d.running(), d.lag().parked) == ({}, [], 0)
    d.deliver_at({2: "a"})
    assert d.running() == [2]
