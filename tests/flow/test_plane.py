"""What the control plane promises, one sentence at a time, through its public methods."""

import msgspec
import pytest
from tests.flow.driver import LOG, WALL, Driver, P, Q, claims, failure, record

from onward.brokers.base import AsideRecord, Moved, Ordering, Progress, State, Tries, record_id
from onward.event import Delivery, Event, Partition
from onward.flow.entry import DONE, Again, Dead, Outcome
from onward.flow.plane import ASIDE_RETRY_S

FAR_S = 1_000.0  # later than any park_after_s here


def stored(watermark: int = 0, *above: tuple[int, int], tries: dict[int, Tries] | None = None) -> Progress:
    return Progress(P, 0, watermark, above, (), tries or {})


def letter(driver: Driver, position: int, partition: Partition = P) -> AsideRecord:
    """The record of a position as it lies in the store."""
    return driver.records[record_id("g", LOG, partition, position)]


def working(**limits: object) -> Driver:
    """A driver that owns P and has read its records."""
    driver = Driver(**limits)
    driver.assign()
    return driver


class TestTracker:
    def test_the_watermark_waits_for_the_oldest_open_event(self) -> None:
        d = working()
        d.deliver("a", "b", "c")
        d.done(2)
        d.done(1)
        assert (d.progress[P].watermark, list(d.progress[P].done_above)) == (0, [(1, 3)])
        d.done(0)
        assert (d.progress[P].watermark, list(d.progress[P].done_above)) == (3, [])

    def test_each_done_position_is_told_as_fresh_once(self) -> None:
        d = working()
        d.deliver("a", "b", "c")
        d.done(1)
        d.done(2)
        d.done(0)
        assert [list(each.fresh) for told in d.settlements for each in told.progress] == [[1], [2], [0]]

    def test_holes_below_the_end_are_passed(self) -> None:
        d = working()
        d.deliver_at({3: "a", 17: "b"})
        d.done(3, 17)
        assert d.progress[P].watermark == 18

    def test_what_was_read_and_not_delivered_is_a_hole(self) -> None:
        d = working()
        d.deliver("a")
        d.done(0)
        d.reach(9)
        assert d.progress[P].watermark == 9

    def test_a_log_read_further_does_not_pass_what_is_open(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.reach(9)
        d.done(1)
        assert d.progress[P].watermark == 0
        assert claims(d.progress[P], 8)

    def test_a_log_read_while_records_load_does_not_pass_what_was_delivered(self) -> None:
        d = Driver()
        d.assign(load=False)
        d.deliver_at({0: "a"}, turn=False)
        d.read[P] = 5
        d.plane.reached(P, 1, 5, d.at)
        d.turn()
        assert d.running() == [0]
        d.done(0)
        assert d.progress[P].watermark == 5

    def test_what_stored_says_is_done_is_skipped_and_counted(self) -> None:
        d = Driver()
        d.assign(stored=stored(2, (3, 5)))
        d.deliver_at({2: "a", 3: "b", 4: "c", 5: "d"})
        assert d.running() == [2, 5]
        assert (d.plane.counts.skipped, d.plane.counts.delivered) == (2, 2)

    def test_it_is_counted_also_when_it_came_before_the_records_were_loaded(self) -> None:
        d = Driver()
        d.assign(stored=stored(0, (1, 2)), load=False)
        d.deliver_at({0: "a", 1: "b"})
        assert d.running() == [0]
        assert (d.plane.counts.skipped, d.plane.counts.delivered) == (1, 1)

    def test_what_was_done_before_stays_claimed_between_open_events(self) -> None:
        d = Driver()
        d.assign(stored=stored(0, (1, 2), (3, 4)))
        d.deliver("a", "b", "c", "d", "e")
        d.done(4)
        assert [claims(d.progress[P], position) for position in range(5)] == [False, True, False, True, True]

    def test_it_stays_claimed_when_the_broker_does_not_deliver_it_again(self) -> None:
        d = Driver()
        d.assign(stored=stored(0, (1, 2), (3, 4)))
        d.deliver_at({0: "a", 2: "c", 4: "e"})
        d.done(4)
        assert [claims(d.progress[P], position) for position in range(5)] == [False, True, False, True, True]

    def test_a_delivery_that_came_twice_runs_once(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.deliver_at({0: "a", 1: "b"})
        assert d.running() == [0, 1]
        d.done(0, 1)
        d.deliver_at({0: "a"})
        assert d.running() == []
        assert d.plane.counts.skipped == 3


class TestLanes:
    def test_a_key_runs_one_at_a_time_in_order(self) -> None:
        d = working()
        d.deliver("a", "a", "a")
        for position in range(3):
            assert d.running() == [position]
            d.done(position)

    def test_other_keys_run_beside_it(self) -> None:
        d = working()
        d.deliver("a", "a", "b", "c")
        assert d.running() == [0, 2, 3]

    def test_by_partition_all_its_events_run_one_at_a_time(self) -> None:
        d = working(ordering="partition")
        d.deliver("a", None, "b")
        assert d.run_out() == [0, 1, 2]
        assert [delivery.position for delivery in d.starts] == [0, 1, 2]

    def test_partitions_are_ordered_each_for_itself(self) -> None:
        d = working(ordering="partition")
        d.assign(Q)
        d.deliver("a", "b")
        d.deliver("a", "b", partition=Q)
        assert (d.running(P), d.running(Q)) == ([0], [0])

    def test_without_order_everything_runs_at_once(self) -> None:
        d = working(ordering="none")
        d.deliver("a", "a", None, "a")
        assert d.running() == [0, 1, 2, 3]

    def test_keyless_events_run_freely(self) -> None:
        d = working()
        d.deliver(None, None, None)
        assert d.running() == [0, 1, 2]

    def test_the_same_key_of_two_partitions_is_two_lanes(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("a")
        d.deliver("a", partition=Q)
        assert (d.running(P), d.running(Q)) == ([0], [0])

    def test_the_oldest_runs_first_also_when_it_became_ready_last(self) -> None:
        d = working(concurrency=1)
        d.deliver("a", "a", "b", "c", "a")
        assert d.run_out() == [0, 1, 2, 3, 4]

    def test_free_slots_are_shared_between_partitions(self) -> None:
        d = Driver(concurrency=4)
        for partition in (P, Q):
            d.assign(partition)
        d.deliver(*[None] * 10, turn=False)
        d.deliver(*[None] * 10, partition=Q)
        assert (d.running(P), d.running(Q)) == ([0, 1], [0, 1])

    def test_what_one_partition_cannot_use_another_may(self) -> None:
        d = Driver(concurrency=4)
        for partition in (P, Q):
            d.assign(partition)
        d.deliver(*[None] * 10, turn=False)
        d.deliver("a", "a", "a", partition=Q)
        assert (d.running(P), d.running(Q)) == ([0, 1, 2], [0])

    @pytest.mark.parametrize("idle_ticks", [0, 1, 2, 3])
    def test_one_slot_goes_round_however_often_the_plane_is_ticked(self, idle_ticks: int) -> None:
        d = Driver(concurrency=1)
        for partition in (P, Q):
            d.assign(partition)
        d.deliver(*[None] * 50, turn=False)
        d.deliver(*[None] * 50, partition=Q)
        turns = []
        for _ in range(20):
            (run,) = d.runs
            turns.append(run[0])
            d.end({run[2]: DONE}, partition=run[0])
            for _ in range(idle_ticks):
                d.tick()
        assert 8 <= turns.count(P) <= 12

    def test_a_delayed_retry_holds_no_slot(self) -> None:
        d = working(concurrency=1)
        d.deliver("a", "b")
        d.again(0, in_s=5)
        assert d.running() == [1]
        d.done(1)
        d.wait(5)
        assert d.running() == [0]

    def test_a_delayed_retry_holds_its_own_lane(self) -> None:
        d = working()
        d.deliver("a", "a", "b")
        d.again(0, in_s=5)
        d.wait(4.9)
        assert d.running() == [2]
        d.wait(0.2)
        assert d.running() == [0, 2]
        assert d.starts[-1].attempt == 2

    def test_a_released_run_may_run_again_with_no_attempt_charged(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.cancel(0)
        assert d.running() == [0]
        assert [delivery.attempt for delivery in d.starts] == [1, 1]

    def test_never_more_calls_than_slots(self) -> None:
        d = working(concurrency=3)
        d.deliver(*[None] * 20)
        assert d.running() == [0, 1, 2]
        d.done(1)
        assert d.running() == [0, 2, 3]


class TestEpochs:
    def test_a_delivery_of_another_ownership_is_dropped_and_counted(self) -> None:
        d = working()
        d.fence(P)
        d.assign()
        d.deliver_at({0: "a"}, epoch=1)
        assert d.running() == []
        assert (d.plane.counts.stale, d.plane.open) == (1, 0)

    def test_a_delivery_of_what_is_not_ours_is_dropped_and_counted(self) -> None:
        d = Driver()
        d.deliver_at({0: "a"}, epoch=1)
        assert (d.plane.counts.stale, d.plane.open, d.plane.held) == (1, 0, [])

    def test_a_completion_of_another_ownership_is_dropped_and_counted(self) -> None:
        d = working()
        d.deliver("a")
        d.fence(P)
        d.assign()
        d.done(0)
        assert (d.plane.counts.stale, d.plane.counts.done) == (1, 0)
        assert d.settlements == []

    def test_every_outcome_of_a_stale_run_is_dropped(self) -> None:
        outcomes: list[Outcome] = [DONE, Again(0.0), Again(1e6), Dead(failure())]
        for outcome in outcomes:
            d = working()
            d.deliver("a")
            d.fence(P)
            d.assign()
            d.end({0: outcome}, epoch=1)
            d.wait(10)
            assert d.settlements == []
            assert (d.plane.running, d.plane.open) == (0, 0)

    def test_a_position_delivered_again_replaces_the_stale_one(self) -> None:
        d = working()
        d.deliver(None)
        d.fence(P)
        d.assign()
        d.deliver_at({0: None})
        assert sorted(epoch for _, epoch, _ in d.runs) == [1, 2]
        d.end({0: DONE}, epoch=1)
        assert d.progress.get(P) is None
        d.end({0: DONE}, epoch=2)
        assert d.progress[P].watermark == 1

    def test_the_lane_of_a_stale_run_stays_busy_until_it_ends(self) -> None:
        d = working()
        d.deliver("a")
        d.fence(P)
        d.assign()
        d.deliver_at({0: "a", 1: "b", 2: "a"})
        assert sorted(d.runs) == [(P, 1, 0), (P, 2, 1)]
        d.end({0: DONE}, epoch=1)
        assert sorted(d.runs) == [(P, 2, 0), (P, 2, 1)]

    def test_it_stays_busy_over_several_ownerships(self) -> None:
        d = working()
        d.deliver("a")
        for _ in range(3):
            d.fence(P)
            d.assign()
            d.deliver_at({0: "a"})
            assert sorted(d.runs) == [(P, 1, 0)]
        d.end({0: DONE}, epoch=1)
        assert sorted(d.runs) == [(P, 4, 0)]

    def test_the_partitions_lane_stays_busy_too(self) -> None:
        d = working(ordering="partition")
        d.deliver("a")
        d.fence(P)
        d.assign()
        d.deliver_at({0: "a", 1: "b"})
        assert sorted(d.runs) == [(P, 1, 0)]
        d.end({0: DONE}, epoch=1)
        assert sorted(d.runs) == [(P, 2, 0)]

    def test_a_record_waits_for_the_stale_run_of_its_key(self) -> None:
        d = Driver()
        d.assign(stored=stored(5), records=[record(0, "a")])
        assert d.running() == [0]
        d.fence(P)
        d.assign(stored=stored(5))
        assert sorted(d.runs) == [(P, 1, 0)]
        d.end({0: DONE}, epoch=1)
        assert sorted(d.runs) == [(P, 2, 0)]

    def test_a_stale_run_keeps_its_slot(self) -> None:
        d = working(concurrency=1)
        d.deliver("a")
        d.fence(P)
        d.assign(Q)
        d.deliver("b", partition=Q)
        assert d.running(Q) == []
        d.end({0: DONE}, epoch=1)
        assert d.running(Q) == [0]

    def test_nothing_of_it_stays_when_its_last_run_has_ended(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.fence(P)
        assert (d.plane.held, d.plane.open, d.plane.running) == ([], 0, 2)
        d.done(0, 1)
        assert (d.plane.running, d.plane.counts.stale, d.plane.lag(d.now)) == (0, 2, {})
        assert not d.plane._holdings

    def test_nothing_starts_when_ownership_is_not_sure(self) -> None:
        d = working()
        d.sure_until = d.now
        d.deliver("a")
        assert d.running() == []

    def test_it_starts_by_itself_once_ownership_is_sure_again(self) -> None:
        d = working()
        d.sure_until = d.now
        d.deliver("a")
        d.sure_until = 1e9
        d.wait(5)
        assert d.running() == [0]

    def test_what_ended_is_still_settled_when_ownership_is_not_sure(self) -> None:
        d = working()
        d.deliver("a")
        d.sure_until = d.now
        d.done(0)
        assert d.progress[P].watermark == 1

    def test_an_answer_about_an_earlier_ownership_does_not_end_the_present_one(self) -> None:
        d = working()
        d.deliver("a")
        d.end({0: DONE}, turn=False)
        d.tick()
        assert d.settlement is not None
        d.plane.fenced([P])
        d.assign(load=False)
        d.answer_settle()  # it was not ours any more: lost
        d.turn()
        assert d.plane.held == [P]
        d.deliver_at({0: "a"})
        assert d.running() == [0]

    def test_what_the_settle_says_is_lost_is_fenced(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.end({0: DONE}, turn=False)
        d.tick()
        d.answer_settle(lost=[P])
        assert (d.plane.held, d.plane.open) == ([], 0)
        d.turn()
        d.done(1)
        assert len(d.settlements) == 1


class TestRevoke:
    def test_nothing_more_of_it_starts(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.revoke(P)
        d.end({0: DONE}, turn=False)
        d.tick()
        assert d.running() == []

    def test_it_waits_for_what_runs_then_settles_then_releases(self) -> None:
        d = working()
        d.deliver("a", "a", "b")
        d.done(2)
        d.revoke(P)
        assert d.drained == []
        d.end({0: DONE}, turn=False)
        d.tick()
        assert d.drained == [], "released before its progress was settled"
        d.answer_settle()
        d.tick()
        assert d.drained == [P]
        assert (d.progress[P].watermark, list(d.progress[P].done_above)) == (1, [(2, 3)])
        assert (d.plane.held, d.plane.open) == ([], 0)

    def test_at_the_deadline_it_is_released_undrained_with_what_was_done(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.revoke(P, deadline_s=10)
        d.done(0)
        d.wait(9.9)
        assert d.undrained == []
        d.wait(0.2)
        assert (d.drained, d.undrained) == ([], [P])
        assert d.progress[P].watermark == 1

    def test_a_run_that_ends_after_that_changes_nothing(self) -> None:
        d = working()
        d.deliver("a")
        d.revoke(P, deadline_s=1)
        d.wait(2)
        d.done(0)
        assert d.settlements == []
        assert d.plane.counts.stale == 1

    def test_with_nothing_running_it_is_released_at_once(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.again(0)
        d.revoke(P)
        assert d.drained == [P]
        assert d.progress[P].tries == {0: Tries(1)}

    def test_before_its_records_were_loaded_too(self) -> None:
        d = Driver()
        d.assign(load=False)
        d.deliver_at({0: "a"}, turn=False)
        d.revoke(P)
        assert d.drained == [P]
        assert d.progress == {}

    def test_others_go_on(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("a")
        d.deliver("a", "a", partition=Q)
        d.revoke(P)
        d.done(0, partition=Q)
        assert d.running(Q) == [1]
        assert d.plane.held == [P, Q]

    def test_a_second_one_cannot_put_off_the_deadline(self) -> None:
        d = working()
        d.deliver("a")
        d.revoke(P, deadline_s=5)
        d.revoke(P, deadline_s=60)
        d.wait(6)
        assert d.undrained == [P]

    def test_of_nothing_or_of_strangers_is_normal(self) -> None:
        d = working()
        d.deliver("a")
        d.revoke()
        d.revoke(Q)
        d.wait(100)
        assert (d.plane.held, d.drained, d.undrained) == ([P], [], [])
        assert d.running() == [0]

    def test_a_letter_that_cannot_be_stored_does_not_put_off_the_release(self) -> None:
        d = working()
        d.deliver("a")
        d.revoke(P, deadline_s=5)
        d.store_down = True
        d.dead(0)
        d.wait(6)
        assert d.drained == [P]
        assert not claims(d.progress.get(P), 0), "the next owner must find it open"

    def test_a_fence_ends_the_waiting(self) -> None:
        d = working()
        d.deliver("a")
        d.revoke(P)
        d.fence(P)
        d.wait(20)
        assert (d.drained, d.undrained) == ([], [])

    def test_a_revoked_partition_that_comes_back_starts_afresh(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.done(1)
        d.revoke(P, deadline_s=1)
        d.wait(2)
        d.assign(unclean=True)
        d.deliver_at({0: "a", 1: "b"})
        d.end({0: DONE}, epoch=1)
        assert sorted(d.runs) == [(P, 2, 0)]


class TestFence:
    def test_nothing_of_it_is_settled(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.end({0: DONE, 1: Dead(failure())}, turn=False)
        d.fence(P)
        d.wait(10)
        assert d.settlements == []
        assert (d.plane.open, d.plane.held) == (0, [])

    def test_only_the_named_are_touched(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("a")
        d.deliver("a", "a", partition=Q)
        d.fence(P)
        d.done(0, partition=Q)
        assert d.running(Q) == [1]
        assert d.progress[Q].watermark == 1

    def test_of_nothing_or_of_strangers_is_normal(self) -> None:
        d = working()
        d.fence()
        d.fence(Q)
        assert d.plane.held == [P]

    def test_an_assignment_of_what_we_hold_is_a_new_ownership(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.assign()
        assert d.plane.open == 0
        d.deliver_at({0: "a", 1: "b"})
        d.end({0: DONE, 1: DONE}, epoch=1)
        assert d.settlements == []
        assert sorted(d.runs) == [(P, 2, 0), (P, 2, 1)]

    def test_a_settle_in_flight_may_be_answered_after_it(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("a")
        d.deliver("a", "b", partition=Q)
        d.end({0: DONE}, turn=False)
        d.end({0: DONE}, partition=Q, turn=False)
        d.tick()
        d.fence(P)
        assert Q in d.progress
        d.done(1, partition=Q)
        assert d.progress[Q].watermark == 2


class TestSettling:
    def test_one_settle_is_in_flight_at_a_time(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.end({0: DONE}, turn=False)
        assert d.tick().settle is not None
        d.end({1: DONE}, turn=False)
        assert d.tick().settle is None
        assert d.wake_at is None
        d.answer_settle()
        told = d.tick().settle
        assert told is not None
        assert list(told.progress[0].fresh) == [1]

    def test_settles_are_paced(self) -> None:
        d = working(settle_interval_s=1.0)
        d.deliver("a", "b", "c")
        d.done(0)
        d.done(1)
        assert len(d.settlements) == 1
        d.wait(1.1)
        assert len(d.settlements) == 2
        d.wait(60)
        assert len(d.settlements) == 2

    def test_a_lane_that_waits_for_its_record_is_not_paced(self) -> None:
        d = working(settle_interval_s=100.0)
        d.deliver("a", "a", "b")
        d.done(2)
        d.dead(0)
        assert d.running() == [1]

    def test_what_ends_while_a_settle_is_in_flight_is_in_the_next(self) -> None:
        d = Driver()
        d.assign(stored=stored(5), records=[record(0, "a"), record(1, "b")])
        d.deliver_at({5: "c", 6: "d"})
        d.end({0: DONE, 5: DONE}, turn=False)
        d.tick()
        d.end({1: DONE, 6: DONE}, turn=False)
        d.turn()
        assert [list(each.progress[0].fresh) for each in d.settlements] == [[5], [6]]
        assert [[id_[-1] for id_ in each.gone] for each in d.settlements] == [["0"], ["1"]]

    def test_nothing_is_settled_when_nothing_happened(self) -> None:
        d = working()
        d.deliver("a")
        d.wait(100)
        assert d.settlements == []

    def test_only_partitions_with_news_are_in_it(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("a")
        d.deliver("a", partition=Q)
        d.done(0)
        assert [told.partition for each in d.settlements for told in each.progress] == [P]


class TestPressure:
    def test_a_full_partition_is_paused_and_resumed_at_seventy_percent(self) -> None:
        d = working(max_in_flight=10)
        d.deliver(*[None] * 9)
        assert d.paused == set()
        d.deliver(None)
        assert d.paused == {P}
        d.done(0, 1)
        assert d.paused == {P}
        d.done(2)
        assert d.paused == set()
        d.deliver(None, None)
        assert d.paused == set()

    def test_bytes_count_as_well_as_messages(self) -> None:
        d = working(max_in_flight_bytes=100)
        d.deliver(None, None, size=40)
        assert d.paused == set()
        d.deliver(None, size=20)
        assert d.paused == {P}
        d.done(2)
        assert d.paused == {P}
        d.done(0)
        assert d.paused == set()

    def test_one_full_partition_never_pauses_another(self) -> None:
        d = working(max_in_flight=4)
        d.assign(Q)
        d.deliver(*[None] * 10)
        d.deliver(None, partition=Q)
        assert d.paused == {P}

    def test_what_came_before_the_records_were_loaded_counts(self) -> None:
        d = Driver(max_in_flight=4)
        d.assign(load=False)
        d.tick()
        d.deliver_at(dict.fromkeys(range(5)), turn=False)
        d.tick()
        assert d.paused == {P}
        d.turn()
        d.run_out()
        assert d.paused == set()

    def test_one_failing_key_never_pauses_its_partition(self) -> None:
        d = working(max_in_flight=16)
        d.deliver("bad")
        d.again(0, in_s=10)
        for _ in range(50):
            d.deliver("bad")
        assert d.paused == set()
        assert d.deliver("good") == d.running()

    def test_a_share_of_failing_events_never_starves_intake(self) -> None:
        d = working(max_in_flight=20, max_delayed=5)
        good = 0
        for number in range(200):
            bad, fine = d.deliver(f"bad-{number}", f"good-{number}")
            d.again(bad, in_s=20)
            d.done(fine)
            good += 1
            assert d.paused == set()
            assert d.lag().delayed <= 5
        assert d.plane.counts.done == good
        d.wait(21)
        d.run_out()
        assert d.progress[P].watermark == 400

    def test_records_brought_back_are_bounded_in_messages(self) -> None:
        d = Driver(max_in_flight=4, concurrency=2)
        d.assign(stored=stored(60), records=[record(position, f"k{position}") for position in range(50)])
        assert d.plane.open <= 4
        assert d.run_out() == list(range(50))

    def test_records_brought_back_are_bounded_in_bytes(self) -> None:
        d = Driver(max_in_flight=100, max_in_flight_bytes=1_000, concurrency=2)
        d.assign(stored=stored(60), records=[record(position, f"k{position}", size=500) for position in range(50)])
        assert d.plane.open <= 4
        assert sorted(d.run_out()) == list(range(50))


class TestParkingByTime:
    def test_a_late_retry_waits_aside_and_its_successors_are_held(self) -> None:
        d = working()
        d.deliver("a", "a", "b", "a")
        d.again(0, in_s=FAR_S)
        assert d.states() == {0: State.WAITING, 1: State.HELD, 3: State.HELD}
        d.done(2)
        assert d.progress[P].watermark == 4
        assert (d.plane.open, d.lag().parked) == (0, 3)

    def test_a_retry_due_by_park_after_waits_in_place(self) -> None:
        d = working(park_after_s=30.0)
        d.deliver("a", "b")
        d.again(0, in_s=30.0)
        d.again(1, in_s=30.1)
        assert d.states() == {1: State.WAITING}
        assert d.lag().delayed == 1

    def test_it_comes_back_when_it_is_due_and_its_key_drains_in_order(self) -> None:
        d = working()
        d.deliver("a", "a", "a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S - 1)
        assert d.running() == []
        d.new_starts()
        d.wait(2)
        d.run_out()
        assert d.new_starts() == [0, 1, 2]
        assert d.states() == {}
        assert d.lag().parked == 0

    def test_a_clock_that_was_set_back_makes_no_wait_longer_than_it_was_asked_to_be(self) -> None:
        d = working(max_wait_s=60.0)
        an_hour_ahead = d.now + WALL + 3_600
        asked = msgspec.structs.replace(record(1, "b", State.WAITING, due=an_hour_ahead), failure=failure())
        d.assign(records=[record(0, "a", State.WAITING, due=an_hour_ahead + 60), asked], stored=stored(2))
        d.wait(59)
        assert d.running() == []
        d.wait(2)
        assert d.running() == [0], "what a person put off stays put off"

    def test_its_due_is_written_in_unix_time_and_read_back_from_it(self) -> None:
        d = working()
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        assert letter(d, 0).due == d.now + WALL + FAR_S
        d.fence(P)
        d.assign()
        d.wait(FAR_S - 1)
        assert d.running() == []
        d.wait(2)
        assert d.running() == [0]

    def test_while_a_key_drains_arrivals_follow_its_records(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S + 1)
        assert d.running() == [0]
        d.deliver("a", "b")
        assert d.states() == {0: State.WAITING, 1: State.HELD, 2: State.HELD}
        d.new_starts()
        d.run_out()
        assert d.new_starts() == [1, 2]
        d.deliver("a")
        assert (d.running(), d.states()) == ([4], {}), "the key is not parked any more"

    def test_attempts_go_on_counting_in_the_record(self) -> None:
        d = working()
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S + 1)
        assert d.starts[-1].attempt == 2
        d.again(0, in_s=FAR_S)
        assert letter(d, 0).tries == Tries(2)
        d.fence(P)
        d.assign()
        d.wait(FAR_S + 1)
        assert d.starts[-1].attempt == 3

    def test_a_record_that_fails_with_a_short_wait_stays_in_its_lane(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S + 1)
        d.again(0, in_s=5)
        assert d.lag().delayed == 1
        assert letter(d, 0).tries == Tries(2)
        d.wait(6)
        assert d.running() == [0]
        assert d.run_out() == [0, 1]

    def test_the_record_is_gone_only_after_success(self) -> None:
        d = working()
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S + 1)
        assert 0 in d.states()
        d.end({0: DONE}, turn=False)
        told = d.tick().settle
        assert told is not None
        assert list(told.gone) == [record_id("g", LOG, P, 0)]

    def test_a_full_parking_lets_events_wait_in_place(self) -> None:
        d = working(max_parked=2)
        d.deliver("a", "b", "c")
        for position in range(3):
            d.again(position, in_s=FAR_S)
        assert d.states() == {0: State.WAITING, 1: State.WAITING}
        assert d.lag().delayed == 1
        d.wait(FAR_S + 1)
        assert d.running() == [0, 1, 2]

    def test_delayed_events_beyond_their_limit_are_parked(self) -> None:
        d = working(max_delayed=1)
        d.deliver("a", "b")
        d.again(0, 1, in_s=5)
        assert d.states() == {1: State.WAITING}
        d.wait(6)
        assert d.running() == [0, 1]

    def test_by_partition_every_retry_waits_in_place(self) -> None:
        d = working(ordering="partition")
        d.deliver("a", "b")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S - 1)
        assert (d.running(), d.states()) == ([], {})
        d.wait(2)
        assert d.running() == [0]

    @pytest.mark.parametrize(("ordering", "key"), [("none", "a"), ("key", None)])
    def test_without_order_every_delayed_retry_is_a_record(self, ordering: Ordering, key: str | None) -> None:
        d = working(ordering=ordering)
        d.deliver(key, key)
        d.again(0, in_s=1)
        assert (d.running(), d.states()) == ([1], {0: State.WAITING})
        d.done(1)
        assert d.progress[P].watermark == 2
        d.wait(2)
        assert d.running() == [0]
        d.done(0)
        assert d.states() == {}

    def test_a_timer_of_an_earlier_plan_does_not_shorten_a_later_wait(self) -> None:
        d = Driver()
        d.assign(stored=stored(1), records=[record(0, "a", State.WAITING, due=d.now + WALL + 20)])
        d.move(0, to=State.WAITING, due=d.now + WALL)
        d.again(0, in_s=29)
        d.wait(21)
        assert d.running() == []
        d.wait(9)
        assert d.running() == [0]


class TestParkingByShare:
    def test_the_head_runs_on_and_successors_beyond_a_quarter_are_held(self) -> None:
        d = working(max_in_flight=8)
        d.deliver(*["a"] * 6, "b")
        assert d.running() == [0, 6]
        assert d.states() == dict.fromkeys(range(2, 6), State.HELD)
        assert d.plane.open == 3

    def test_they_are_drawn_back_in_order_as_the_lane_empties(self) -> None:
        d = working(max_in_flight=8)
        d.deliver(*["a"] * 6)
        d.deliver("a")
        assert d.run_out() == list(range(7))
        assert d.states() == {}
        assert d.progress[P].watermark == 7

    def test_arrivals_during_the_drain_follow(self) -> None:
        d = working(max_in_flight=4)
        d.deliver("a", "a", "a")
        d.done(0)
        d.deliver("a")
        d.done(1)
        d.deliver("a")
        assert d.run_out() == [2, 3, 4]

    def test_the_lane_may_empty_before_its_records_are_stored(self) -> None:
        d = working(max_in_flight=4)
        d.deliver("a", "a", turn=False)
        d.tick()
        d.end({0: DONE}, turn=False)
        d.tick()
        assert d.running() == []
        d.turn()
        assert d.running() == [1]

    def test_by_partition_nothing_is_held(self) -> None:
        d = working(max_in_flight=4, ordering="partition")
        d.deliver(*["a"] * 10)
        assert d.states() == {}
        assert d.paused == {P}

    def test_a_late_retry_of_the_head_keeps_the_order_of_those_held_before(self) -> None:
        d = working(max_in_flight=8)
        d.deliver(*["a"] * 4)
        d.again(0, in_s=FAR_S)
        assert d.states() == {0: State.WAITING, 1: State.HELD, 2: State.HELD, 3: State.HELD}
        d.wait(FAR_S + 1)
        assert d.run_out() == [0, 1, 2, 3]

    def test_events_that_found_no_room_are_read_again_when_their_turn_comes(self) -> None:
        d = working(max_in_flight=4, max_in_flight_bytes=100)
        for _ in range(20):
            d.deliver("a", size=60)
        assert d.run_out() == list(range(20))
        assert d.states() == {}

    def test_pages_of_records_may_be_small(self) -> None:
        d = working(max_in_flight=4, max_in_flight_bytes=100)
        d.page = 1
        for _ in range(6):
            d.deliver("a", "b", size=60)
        ended = d.run_out()
        assert [p for p in ended if p % 2 == 0] == list(range(0, 12, 2))
        assert [p for p in ended if p % 2] == list(range(1, 12, 2))


class TestAsideOnAssignment:
    def test_until_the_records_are_loaded_nothing_is_dispatched(self) -> None:
        d = Driver()
        d.assign(load=False)
        d.tick()
        d.deliver_at({0: "a", 1: None}, turn=False)
        d.tick()
        assert (d.running(), d.plane.open) == ([], 2)
        d.turn()
        assert d.running() == [0, 1]

    def test_a_load_is_asked_for_once_and_its_pages_one_after_the_other(self) -> None:
        d = Driver()
        d.page = 2
        d.assign(load=False, stored=stored(9), records=[record(position, "a") for position in range(5)])
        asked = []
        while load := d.tick().load:
            (page,) = load
            asked.append(page.after)
            assert d.tick().load == [], "asked twice"
            assert d.running() == []
            d.answer_loads()
        assert asked == [None, 1, 3, 4]
        assert d.running() == [0]

    def test_a_page_for_an_earlier_ownership_opens_nothing(self) -> None:
        d = Driver()
        d.assign(load=False)
        d.tick()
        (load,) = d.loads
        d.loads = []
        d.assign(load=False)
        d.plane.loaded(load, [], d.at)
        d.deliver_at({0: "a"}, turn=False)
        d.tick()
        assert d.running() == []

    def test_a_delivered_position_that_has_a_record_is_done_at_intake(self) -> None:
        d = Driver()
        d.assign(records=[record(0, "a", State.WAITING, due=WALL + 1e6)])
        d.deliver("a", "b")
        assert d.running() == [1]
        d.done(1)
        assert d.progress[P].watermark == 2
        assert d.plane.counts.skipped == 1

    def test_it_stays_claimed_after_its_record_is_gone(self) -> None:
        """Else a crash would run it again behind its successors."""
        d = Driver()
        d.assign(records=[record(1, "x")])
        d.deliver("a", "x", "c", "x")
        d.done(1)
        d.done(3)
        assert d.states() == {}
        assert [claims(d.progress[P], position) for position in range(4)] == [False, True, False, True]

    def test_a_record_below_the_stored_watermark_runs_at_once(self) -> None:
        d = Driver()
        d.assign(stored=stored(5), records=[record(3, "a")])
        assert d.running() == [3]

    def test_a_record_above_it_waits_until_the_log_was_read_past_it(self) -> None:
        d = Driver()
        d.assign(stored=stored(2), records=[record(4, "a")])
        assert d.running() == []
        d.deliver_at({2: "b"})
        assert d.running() == [2]
        d.deliver_at({4: "a"})
        assert d.running() == [2, 4]

    def test_a_record_waits_also_for_what_is_lower_of_its_key(self) -> None:
        d = Driver()
        d.assign(records=[record(2, "a")])
        d.deliver("a", "b", "a")
        assert d.running() == [0, 1]
        d.done(0)
        assert d.running() == [1, 2]

    def test_a_log_read_past_it_by_reached_counts(self) -> None:
        d = Driver()
        d.assign(records=[record(4, "a")])
        d.reach(5)
        assert d.running() == [4]

    def test_records_of_a_key_run_by_position_before_its_deliveries(self) -> None:
        d = Driver()
        d.assign(stored=stored(3), records=[record(2, "a"), record(0, "a")])
        d.deliver_at({3: "a"})
        assert d.states() == {0: State.HELD, 2: State.HELD, 3: State.HELD}
        assert d.run_out() == [0, 2, 3]

    def test_parking_that_was_stored_but_not_its_progress_keeps_the_order(self) -> None:
        """A crash between the two: the log delivers everything again."""
        d = Driver()
        d.assign(records=[record(0, "a", State.WAITING, due=WALL + 150)])
        d.deliver("a", "a", "a")
        assert (d.running(), d.states()) == ([], {0: State.WAITING, 1: State.HELD, 2: State.HELD})
        d.wait(51)
        assert d.run_out() == [0, 1, 2]


class TestMovesFromOutside:
    def dead_one(self, **limits: object) -> Driver:
        d = working(**limits)
        d.deliver("a")
        d.dead(0)
        assert d.states() == {0: State.DEAD}
        return d

    def test_a_replayed_letter_goes_before_what_waits_in_its_lane(self) -> None:
        d = self.dead_one()
        d.deliver("a", "a", "a")
        d.move(0, to=State.WAITING, due=0.0)
        assert d.running() == [1]
        d.new_starts()
        d.run_out()
        assert d.new_starts() == [0, 2, 3]
        assert d.states() == {}

    def test_it_blocks_its_lane_like_any_event(self) -> None:
        d = self.dead_one()
        d.move(0, to=State.WAITING, due=0.0)
        d.deliver("a", "b")
        assert d.running() == [0, 2]

    def test_it_runs_also_when_the_one_before_it_is_parked(self) -> None:
        d = self.dead_one()
        d.deliver("a", "a")
        d.move(0, to=State.WAITING, due=0.0)
        d.again(1, in_s=FAR_S)
        assert d.running() == [0]
        d.done(0)
        d.wait(FAR_S + 1)
        assert d.run_out() == [1, 2]

    def test_its_attempts_are_counted_afresh(self) -> None:
        d = self.dead_one()
        d.move(0, to=State.WAITING, due=0.0)
        assert d.starts[-1].attempt == 1

    def test_it_may_die_again(self) -> None:
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

    def test_a_waiting_record_given_up_by_hand_lets_its_successors_go_on(self) -> None:
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
        d.end({0: Again(d.now + FAR_S)}, turn=False)
        d.move(0, to=None)
        assert d.states() == {}

    def test_news_of_an_earlier_ownership_are_ignored(self) -> None:
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
        d.records[letter(d, 0).id] = record(0, "a", State.WAITING, due=0.0)
        d.plane.moved(moved_to_waiting(0), d.at)
        d.tick()
        (load,) = d.loads
        d.loads = []
        page = d.read_page(load)
        d.done(5)
        d.plane.loaded(load, page, d.at)
        d.turn()
        assert d.running() == [0]

    def test_a_replay_runs_also_when_there_is_no_room_to_keep_its_event(self) -> None:
        d = Driver(max_in_flight_bytes=10)
        late = record(1, "b", State.WAITING, due=WALL + 1e6, size=9)
        d.assign(stored=stored(5), records=[record(0, "a", State.DEAD, size=9), late])
        d.move(0, to=State.WAITING, due=0.0)
        assert d.running() == [0]

    def test_a_replay_heard_of_while_a_page_is_read_is_not_forgotten(self) -> None:
        d = Driver()
        late = record(9, "c", State.WAITING, due=WALL + 1e6)
        d.assign(stored=stored(10), records=[record(0, "a", State.DEAD), record(3, "b", State.DEAD), late])
        pages = []
        for position, key in ((0, "a"), (3, "b")):
            d.records[letter(d, position).id] = record(position, key, State.WAITING, due=0.0)
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


class TestDeadLetters:
    def test_the_lane_waits_until_the_letter_is_stored(self) -> None:
        d = working()
        d.deliver("a", "a", "b")
        d.end({0: Dead(failure())}, turn=False)
        told = d.tick().settle
        assert told is not None
        assert [(each.position, each.state) for each in told.aside] == [(0, State.DEAD)]
        assert d.running() == [2]
        d.answer_settle()
        d.tick()
        assert d.running() == [1, 2]

    def test_the_letter_goes_with_the_progress_that_says_done(self) -> None:
        d = working()
        d.deliver("a")
        d.end({0: Dead(failure())}, turn=False)
        told = d.tick().settle
        assert told is not None
        assert (told.progress[0].watermark, list(told.progress[0].fresh)) == (1, [0])

    def test_on_dead_pass_lets_successors_go_on(self) -> None:
        d = working(on_dead="pass")
        d.deliver("a", "a")
        d.dead(0)
        d.done(1)
        assert d.states() == {0: State.DEAD}
        assert d.progress[P].watermark == 2
        assert d.lag().parked == 0

    def test_on_dead_hold_holds_its_successors_and_nobody_else(self) -> None:
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

    def test_held_keys_are_held_by_the_next_owner_too(self) -> None:
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

    def test_a_record_that_dies_lets_its_successors_pass_once_that_is_stored(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S + 1)
        d.end({0: Dead(failure())}, turn=False)
        d.tick()
        assert d.running() == []
        d.turn()
        assert (d.running(), d.states()) == ([1], {0: State.DEAD, 1: State.HELD})

    def test_the_story_begins_with_the_first_failure(self) -> None:
        d = working()
        d.deliver("a")
        first = d.now + WALL
        d.again(0, in_s=5)
        d.wait(5)
        d.dead(0)
        story = letter(d, 0).failure
        assert story is not None
        assert story.first == first
        assert letter(d, 0).tries == Tries(2)

    def test_keyless_letters_hold_nobody(self) -> None:
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

    def test_it_is_tried_again_at_its_own_pace_until_it_is_stored(self) -> None:
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

    def test_a_whole_parked_key_waits_for_the_store(self) -> None:
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

    def test_gone_records_are_told_again(self) -> None:
        d = Driver()
        d.assign(stored=stored(5), records=[record(0, "a")])
        d.deliver_at({5: "b"})
        d.store_down = True
        d.end({0: DONE, 5: Dead(failure())})
        assert d.states() == {}

    def test_after_a_fence_nothing_is_left_of_it(self) -> None:
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


class TestAttempts:
    def test_they_travel_in_the_progress(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.again(0, in_s=1)
        d.wait(1)
        d.again(0, in_s=1)
        assert d.progress[P].tries == {0: Tries(2)}
        d.fence(P)
        d.assign()
        d.deliver_at({0: "a", 1: "b"})
        d.end({0: DONE, 1: DONE}, epoch=1) if (P, 1, 0) in d.runs else None
        assert {run[2]: delivery.attempt for run, delivery in d.runs.items() if run[1] == 2}[0] == 3

    def test_they_leave_with_the_event(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.again(0, in_s=1)
        d.wait(1)
        d.done(0)
        assert d.progress[P].tries == {}

    def test_those_of_what_was_not_delivered_again_yet_are_kept(self) -> None:
        d = Driver()
        d.assign(stored=stored(0, tries={0: Tries(1), 1: Tries(3)}))
        d.deliver("a")
        d.done(0)
        assert d.progress[P].tries == {1: Tries(3)}

    def test_they_move_to_the_record_when_the_event_is_parked(self) -> None:
        d = working()
        d.deliver("a")
        d.again(0, in_s=1)
        d.wait(1)
        d.again(0, in_s=FAR_S)
        assert letter(d, 0).tries == Tries(2)
        assert d.progress[P].tries == {}


class TestBlame:
    def unclean(self, tries: dict[int, Tries] | None = None, **limits: object) -> Driver:
        d = Driver(**limits)
        d.assign(stored=stored(0, tries=tries), unclean=True)
        return d

    def test_starts_are_recorded_before_they_happen(self) -> None:
        d = self.unclean()
        d.deliver("a", "b", turn=False)
        told = d.tick().settle
        assert told is not None
        assert told.progress[0].tries == {0: Tries(0, 1), 1: Tries(0, 1)}
        assert d.running() == []
        d.answer_settle()
        d.tick()
        assert d.running() == [0, 1]

    def test_after_a_clean_end_they_are_not_and_nobody_is_charged(self) -> None:
        d = Driver()
        d.assign(stored=stored(0, tries={0: Tries(0, 2)}))
        d.deliver("a", "b", turn=False)
        d.tick()
        assert d.running() == [0, 1]
        d.again(0, in_s=1)
        assert d.progress[P].tries == {0: Tries(1)}

    def test_only_what_can_have_been_running_is_recorded(self) -> None:
        d = self.unclean(max_in_flight=2)
        d.deliver("a", "b")
        d.done(0, 1)
        d.deliver("c", turn=False)
        d.tick()
        assert d.running() == [2]

    def test_it_is_recorded_also_where_positions_are_far_apart(self) -> None:
        d = self.unclean(max_in_flight=10)
        d.deliver_at({1 << 40: "a", 2 << 40: "b"}, turn=False)
        told = d.tick().settle
        assert told is not None
        assert set(told.progress[0].tries) == {1 << 40, 2 << 40}

    def test_one_that_ran_in_the_crash_runs_alone(self) -> None:
        d = self.unclean({1: Tries(0, 1)})
        d.deliver("a", "b", "c")
        d.wait(1)
        alone: list[list[int]] = []
        while d.runs:
            alone.append(d.running())
            d.done(d.running()[-1])
        assert [1] in alone
        assert all(running == [1] or 1 not in running for running in alone)
        assert d.progress[P].watermark == 3

    def test_it_runs_by_itself_when_nothing_else_happens(self) -> None:
        d = self.unclean({0: Tries(0, 1)})
        d.deliver("a")
        d.wait(60)
        assert d.running() == [0]
        assert d.progress[P].tries == {0: Tries(0, 2)}

    def test_alone_means_alone_in_this_process(self) -> None:
        d = Driver()
        d.assign(Q)
        d.deliver("x", "x", partition=Q)
        d.assign(stored=stored(0, tries={0: Tries(0, 2)}), unclean=True)
        d.deliver("a")
        assert (d.running(P), d.running(Q)) == ([], [0])
        d.done(0, partition=Q)
        assert (d.running(P), d.running(Q)) == ([0], [])
        d.done(0)
        assert d.running(Q) == [1]

    def test_a_crash_among_others_is_not_charged(self) -> None:
        d = self.unclean({0: Tries(0, 1)}, crash_limit=1)
        d.deliver("a")
        d.wait(1)
        assert d.running() == [0]
        assert d.progress[P].tries[0].crashes == 0

    def test_a_crash_alone_is_charged(self) -> None:
        d = self.unclean({0: Tries(2, 2, 0)})
        d.deliver("a")
        d.wait(1)
        assert d.progress[P].tries == {0: Tries(2, 2, 1)}
        assert d.starts[-1].attempt == 3

    def test_at_the_crash_limit_it_is_a_dead_letter(self) -> None:
        d = self.unclean({0: Tries(0, 2, 2)}, crash_limit=3)
        d.deliver("a", "a", "b")
        d.wait(1)
        story = letter(d, 0).failure
        assert story is not None
        assert story.reason == "crashed"
        assert sorted(d.run_out()) == [1, 2]
        assert d.plane.counts.dead == 1

    def test_what_was_charged_is_not_forgotten_by_a_clean_end(self) -> None:
        d = self.unclean({0: Tries(0, 2, 1)})
        d.deliver("a", turn=False)
        d.revoke(P)
        assert d.drained == [P]
        d.assign(stored=d.progress.get(P) or stored(0, tries={0: Tries(0, 2, 1)}))
        d.deliver_at({0: "a"})
        d.wait(1)
        assert d.progress[P].tries[0].crashes == 2

    def test_the_death_of_a_worker_is_an_attempt_and_a_lone_crash(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.again(0, in_s=1, crashed=True)
        assert d.progress[P].tries == {0: Tries(1, 0, 1)}
        d.wait(2)
        assert d.running() == [1], "it runs alone, so it waits for the others"
        d.done(1)
        d.wait(1)
        assert d.running() == [0]
        assert d.starts[-1].attempt == 2

    def test_workers_that_die_end_at_the_crash_limit_too(self) -> None:
        d = working(crash_limit=2)
        d.deliver("a", "a")
        for _ in range(2):
            d.again(0, in_s=1, crashed=True)
            d.wait(2)
        assert d.states() == {0: State.DEAD}
        assert d.running() == [1]

    def test_loaded_records_are_marked_before_they_run(self) -> None:
        d = Driver()
        d.assign(stored=stored(5), records=[record(0, "a", State.WAITING, due=WALL + 9)], unclean=True, load=False)
        while d.tick().load:
            d.answer_loads()
        told = d.settlement
        assert told is not None
        assert [(each.tries, each.state, each.due) for each in told.aside] == [(Tries(0, 1), State.WAITING, WALL + 9)]
        assert d.running() == []
        d.turn()
        assert d.running() == [0]

    def test_a_record_that_crashed_alone_is_charged(self) -> None:
        d = Driver(crash_limit=2)
        d.assign(stored=stored(5), records=[record(0, "a", tries=Tries(0, 2, 1)), record(1, "a")], unclean=True)
        d.wait(1)
        assert d.states() == {0: State.DEAD, 1: State.HELD}
        assert d.running() == [1]

    def test_a_fence_of_the_lone_one_frees_the_others(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("x", "x", partition=Q)
        d.fence(P)
        d.assign(stored=stored(0, tries={0: Tries(0, 2)}), unclean=True)
        d.deliver_at({0: "a"})
        d.fence(P)
        d.done(0, partition=Q)
        d.wait(1)
        assert d.running(Q) == [1]

    def test_a_revoke_of_the_lone_one_frees_the_others(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("x", "x", partition=Q)
        d.fence(P)
        d.assign(stored=stored(0, tries={0: Tries(0, 2)}), unclean=True)
        d.deliver_at({0: "a"})
        d.revoke(P)
        d.done(0, partition=Q)
        d.wait(1)
        assert d.running(Q) == [1]
        assert d.drained == [P]

    def test_a_cancelled_run_is_not_marked_as_started_any_more(self) -> None:
        d = self.unclean(concurrency=1)
        d.deliver("a")
        d.revoke(P)
        d.cancel(0)
        assert d.progress[P].tries.get(0, Tries()).started == 0


class TestBatches:
    def calls(self, d: Driver) -> list[list[int]]:
        return [sorted(position for _, _, position in call) for call in d.calls]

    def test_a_call_takes_up_to_its_size_of_one_partition(self) -> None:
        d = working(batch_size=3, concurrency=2)
        d.assign(Q)
        d.deliver(*[None] * 7, turn=False)
        d.deliver(*[None] * 2, partition=Q)
        assert sorted(self.calls(d)) == [[0, 1], [0, 1, 2]]

    def test_a_batch_may_take_several_of_a_key_in_order(self) -> None:
        d = working(batch_size=4)
        d.deliver("a", "b", "a", "a")
        assert self.calls(d) == [[0, 1, 2, 3]]
        assert [delivery.position for delivery in d.starts] == [0, 1, 2, 3]

    def test_two_batches_never_share_a_key(self) -> None:
        d = working(batch_size=2)
        d.deliver("a", "a", "a", "b")
        assert self.calls(d) == [[0, 1], [3]]
        d.done(0, 1)
        assert self.calls(d) == [[3], [2]]

    def test_a_batch_waits_to_fill(self) -> None:
        d = working(batch_size=3, batch_wait_s=1.0)
        d.deliver("a", "b")
        d.wait(0.9)
        assert d.calls == []
        d.wait(0.2)
        assert self.calls(d) == [[0, 1]]

    def test_a_full_batch_does_not_wait(self) -> None:
        d = working(batch_size=3, batch_wait_s=1.0)
        d.deliver("a", "b")
        d.deliver("c")
        assert self.calls(d) == [[0, 1, 2]]

    def test_what_is_left_of_a_full_batch_waits_to_fill(self) -> None:
        d = working(batch_size=3, batch_wait_s=1.0)
        d.deliver(*[None] * 4)
        assert self.calls(d) == [[0, 1, 2]]
        d.wait(1.1)
        assert self.calls(d) == [[0, 1, 2], [3]]

    def test_a_slot_is_free_when_all_of_its_call_have_ended(self) -> None:
        d = working(batch_size=2, concurrency=1)
        d.deliver(None, None, None)
        d.done(0)
        assert self.calls(d) == [[1]]
        d.done(1)
        assert self.calls(d) == [[2]]

    @pytest.mark.parametrize("bad", range(8))
    def test_a_bad_event_never_fails_its_neighbours(self, bad: int) -> None:
        d = working(batch_size=8, concurrency=1)
        d.deliver("a", "b", "a", "c", "a", "b", None, "a")
        calls = 0
        while d.calls:
            calls += 1
            positions = self.calls(d)[0]
            if bad not in positions:
                d.done(*positions)
            elif positions == [bad]:
                d.dead(bad)
            else:
                d.split(*positions)
        assert d.states() == {bad: State.DEAD}
        assert d.progress[P].watermark == 8
        assert all(delivery.attempt == 1 for delivery in d.starts)
        assert calls <= 12

    def test_a_cancelled_batch_runs_again_as_it_was(self) -> None:
        d = working(batch_size=4)
        d.deliver("a", "a", "b")
        d.cancel(0, 1, 2)
        assert self.calls(d) == [[0, 1, 2]]

    def test_a_stale_batch_keeps_its_lanes_busy_until_its_end(self) -> None:
        d = working(batch_size=4)
        d.deliver("a", "a")
        d.fence(P)
        d.assign()
        d.deliver_at({0: "a", 1: "a", 2: "b"})
        assert sorted(d.runs) == [(P, 1, 0), (P, 1, 1), (P, 2, 2)]
        d.end({0: DONE, 1: DONE}, epoch=1)
        assert sorted(d.runs) == [(P, 2, 0), (P, 2, 1), (P, 2, 2)]

    def test_marked_events_run_in_calls_of_their_own(self) -> None:
        """A crash of a batch could not be blamed on one of them."""
        d = Driver(batch_size=4)
        d.assign(unclean=True)
        d.deliver("a", "b", "c")
        assert self.calls(d) == [[0], [1], [2]]

    def test_records_join_a_batch_too(self) -> None:
        d = Driver(batch_size=4)
        d.assign(stored=stored(2), records=[record(0, "a"), record(1, "b")])
        assert self.calls(d) == [[0, 1]]


class TestLag:
    def test_it_tells_what_is_queued_running_delayed_and_parked(self) -> None:
        d = working(concurrency=3, max_in_flight=100)
        d.deliver("a", "a", "b", "c", "d", "e")
        d.again(2, in_s=5)
        d.again(3, in_s=FAR_S)
        lag = d.lag()
        assert (lag.queued, lag.running, lag.delayed, lag.parked) == (1, 3, 1, 1)

    def test_what_came_before_the_records_were_loaded_is_queued(self) -> None:
        d = Driver()
        d.assign(load=False)
        d.deliver_at({0: "a", 1: "b"}, turn=False)
        assert d.lag().queued == 2

    def test_the_gap_is_what_is_done_above_the_watermark(self) -> None:
        d = working()
        d.deliver("a", "b", "c", "d")
        d.done(1, 3)
        assert d.lag().gap == 2
        d.done(0)
        assert d.lag().gap == 1

    def test_it_names_what_blocks_its_key_and_its_state(self) -> None:
        d = working(concurrency=1)
        d.deliver("a", "b")
        blocking = d.lag().blocking
        assert blocking is not None
        assert (blocking.position, blocking.key, blocking.state) == (0, "a", "running")
        d.again(0, in_s=5)
        assert (blocking := d.lag().blocking) is not None
        assert blocking.state == "delayed"
        d.wait(5)
        assert (blocking := d.lag().blocking) is not None
        assert blocking.state == "queued"

    def test_it_says_for_how_long(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.wait(100)
        assert (blocking := d.lag().blocking) is not None
        assert blocking.for_s == pytest.approx(100, abs=0.1)
        d.done(0)
        d.wait(7)
        assert (blocking := d.lag().blocking) is not None
        assert blocking.position == 1
        assert blocking.for_s == pytest.approx(7, abs=0.1)

    def test_it_says_for_how_long_also_while_the_store_is_down(self) -> None:
        d = working()
        d.store_down = True
        d.deliver("a")
        d.dead(0)
        d.wait(50)
        assert (blocking := d.lag().blocking) is not None
        assert blocking.state == "leaving"
        assert blocking.for_s == pytest.approx(50, abs=0.1)

    def test_nothing_blocks_when_nothing_is_open(self) -> None:
        d = working()
        d.deliver("a")
        d.done(0)
        lag = d.lag()
        assert (lag.queued, lag.running, lag.gap, lag.blocking) == (0, 0, 0, None)

    def test_only_what_is_ours_has_a_lag(self) -> None:
        d = working()
        d.deliver("a")
        d.fence(P)
        assert d.plane.lag(d.now) == {}


class TestCounts:
    def test_they_add_up(self) -> None:
        d = working()
        d.deliver("a", "b", "c")
        d.deliver_at({1: "b"})
        d.again(0, in_s=1)
        d.wait(1)
        d.done(0, 1)
        d.dead(2)
        counts = d.plane.counts
        assert (counts.delivered, counts.skipped, counts.done, counts.retried, counts.dead) == (3, 1, 2, 1, 1)

    def test_hot_keys_are_seen(self) -> None:
        d = working()
        d.deliver("a", "b", "a", None)
        assert d.plane.hot.top(1) == [("a", 2)]

    def test_a_completion_nobody_waits_for_is_counted_as_stale(self) -> None:
        d = working()
        d.deliver("a")
        d.plane.completed([(Delivery(Event("x", "orders", "a", b""), P, 7, 1), DONE)], d.at)
        d.done(0)
        d.plane.completed([(Delivery(Event("x", "orders", "a", b""), P, 0, 1), DONE)], d.at)
        assert (d.plane.counts.stale, d.plane.running) == (2, 0)
