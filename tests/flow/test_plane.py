"""The flow of events: the watermark, what may run at the same time, settling, back-pressure and lag."""

import msgspec
import pytest
from tests.flow.driver import FAR_S, WALL, Driver, P, Q, claims, record, stored, working

from onward.brokers.base import BrokerLag
from onward.event import Delivery, Event
from onward.flow.entry import DONE, Released
from onward.flow.lag import Blocking, Lag, PartitionLag, total


class TestTracker:
    def test_the_watermark_waits_for_the_oldest_open_event(self) -> None:
        d = working()
        d.deliver("a", "b", "c")
        d.done(2)
        d.done(1)
        assert (d.progress[P].watermark, list(d.progress[P].done_above)) == (0, [(1, 3)])
        d.done(0)
        assert (d.progress[P].watermark, list(d.progress[P].done_above)) == (3, [])

    def test_each_done_position_is_reported_as_fresh_once(self) -> None:
        d = working()
        d.deliver("a", "b", "c")
        d.done(1)
        d.done(2)
        d.done(0)
        assert [list(each.fresh) for call in d.settlements for each in call.progress] == [[1], [2], [0]]

    def test_holes_below_the_end_are_passed(self) -> None:
        d = working()
        d.deliver_at({3: "a", 17: "b"})
        d.done(3, 17)
        assert d.progress[P].watermark == 18

    def test_a_position_that_was_read_and_not_delivered_is_a_hole(self) -> None:
        d = working()
        d.deliver("a")
        d.done(0)
        d.reach(9)
        assert d.progress[P].watermark == 9

    def test_reading_the_log_further_does_not_pass_open_events(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.reach(9)
        d.done(1)
        assert d.progress[P].watermark == 0
        assert claims(d.progress[P], 8)

    def test_reading_the_log_while_records_load_does_not_pass_delivered_events(self) -> None:
        d = Driver()
        d.assign(load=False)
        d.deliver_at({0: "a"}, turn=False)
        d.read[P] = 5
        d.plane.reached(P, 1, 5, d.at)
        d.turn()
        assert d.running() == [0]
        d.done(0)
        assert d.progress[P].watermark == 5

    def test_events_done_in_the_stored_progress_are_skipped_and_counted(self) -> None:
        d = Driver()
        d.assign(stored=stored(2, (3, 5)))
        d.deliver_at({2: "a", 3: "b", 4: "c", 5: "d"})
        assert d.running() == [2, 5]
        assert (d.plane.counts.skipped, d.plane.counts.delivered) == (2, 2)

    def test_they_are_also_counted_if_delivered_before_the_records_were_loaded(self) -> None:
        d = Driver()
        d.assign(stored=stored(0, (1, 2)), load=False)
        d.deliver_at({0: "a", 1: "b"})
        assert d.running() == [0]
        assert (d.plane.counts.skipped, d.plane.counts.delivered) == (1, 1)

    def test_events_done_before_stay_claimed_between_open_events(self) -> None:
        d = Driver()
        d.assign(stored=stored(0, (1, 2), (3, 4)))
        d.deliver("a", "b", "c", "d", "e")
        d.done(4)
        assert [claims(d.progress[P], position) for position in range(5)] == [False, True, False, True, True]

    def test_they_stay_claimed_when_the_broker_does_not_deliver_them_again(self) -> None:
        d = Driver()
        d.assign(stored=stored(0, (1, 2), (3, 4)))
        d.deliver_at({0: "a", 2: "c", 4: "e"})
        d.done(4)
        assert [claims(d.progress[P], position) for position in range(5)] == [False, True, False, True, True]

    def test_an_event_delivered_twice_runs_once(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.deliver_at({0: "a", 1: "b"})
        assert d.running() == [0, 1]
        d.done(0, 1)
        d.deliver_at({0: "a"})
        assert d.running() == []
        assert d.plane.counts.skipped == 3


class TestLanes:
    def test_events_of_a_key_run_one_at_a_time_in_order(self) -> None:
        d = working()
        d.deliver("a", "a", "a")
        for position in range(3):
            assert d.running() == [position]
            d.done(position)

    def test_other_keys_run_at_the_same_time(self) -> None:
        d = working()
        d.deliver("a", "a", "b", "c")
        assert d.running() == [0, 2, 3]

    def test_with_partition_order_all_its_events_run_one_at_a_time(self) -> None:
        d = working(ordering="partition")
        d.deliver("a", None, "b")
        assert d.run_out() == [0, 1, 2]
        assert [delivery.position for delivery in d.starts] == [0, 1, 2]

    def test_partition_order_does_not_reach_across_partitions(self) -> None:
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

    def test_the_same_key_in_two_partitions_has_two_lanes(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("a")
        d.deliver("a", partition=Q)
        assert (d.running(P), d.running(Q)) == ([0], [0])

    def test_the_oldest_event_runs_first_even_if_it_became_ready_last(self) -> None:
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

    def test_slots_that_one_partition_cannot_use_go_to_another(self) -> None:
        d = Driver(concurrency=4)
        for partition in (P, Q):
            d.assign(partition)
        d.deliver(*[None] * 10, turn=False)
        d.deliver("a", "a", "a", partition=Q)
        assert (d.running(P), d.running(Q)) == ([0, 1, 2], [0])

    @pytest.mark.parametrize("idle_ticks", [0, 1, 2, 3])
    def test_a_single_slot_goes_to_each_partition_in_turn_however_often_the_plane_ticks(self, idle_ticks: int) -> None:
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

    def test_a_released_event_runs_again_without_an_attempt_charged(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.cancel(0)
        assert d.running() == [0]
        assert [delivery.attempt for delivery in d.starts] == [1, 1]

    def test_a_released_event_that_must_wait_delays_only_its_lane(self) -> None:
        d = working()
        d.deliver("a", "a", "b")
        d.end({0: Released(d.now + 5)})
        d.wait(4.9)
        assert d.running() == [2]
        d.wait(0.2)
        assert d.running() == [0, 2]
        assert d.starts[-1].attempt == 1
        assert d.run_out() == [0, 1, 2]

    def test_there_are_never_more_calls_than_slots(self) -> None:
        d = working(concurrency=3)
        d.deliver(*[None] * 20)
        assert d.running() == [0, 1, 2]
        d.done(1)
        assert d.running() == [0, 2, 3]


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
        call = d.tick().settle
        assert call is not None
        assert list(call.progress[0].fresh) == [1]

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

    def test_a_settle_that_a_lane_waits_for_is_not_paced(self) -> None:
        d = working(settle_interval_s=100.0)
        d.deliver("a", "a", "b")
        d.done(2)
        d.dead(0)
        assert d.running() == [1]

    def test_an_event_that_ends_while_a_settle_is_in_flight_is_in_the_next_one(self) -> None:
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

    def test_a_settle_has_only_the_partitions_that_changed(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("a")
        d.deliver("a", partition=Q)
        d.done(0)
        assert [progress.partition for each in d.settlements for progress in each.progress] == [P]


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

    def test_events_delivered_before_the_records_were_loaded_count(self) -> None:
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

    def test_drawn_records_are_bounded_in_messages(self) -> None:
        d = Driver(max_in_flight=4, concurrency=2)
        d.assign(stored=stored(60), records=[record(position, f"k{position}") for position in range(50)])
        assert d.plane.open <= 4
        assert d.run_out() == list(range(50))

    def test_drawn_records_are_bounded_in_bytes(self) -> None:
        d = Driver(max_in_flight=100, max_in_flight_bytes=1_000, concurrency=2)
        d.assign(stored=stored(60), records=[record(position, f"k{position}", size=500) for position in range(50)])
        assert d.plane.open <= 4
        assert sorted(d.run_out()) == list(range(50))


class TestLag:
    def test_it_counts_queued_running_delayed_and_parked_events(self) -> None:
        d = working(concurrency=3, max_in_flight=100)
        d.deliver("a", "a", "b", "c", "d", "e")
        d.again(2, in_s=5)
        d.again(3, in_s=FAR_S)
        lag = d.lag()
        assert (lag.queued, lag.running, lag.delayed, lag.parked) == (1, 3, 1, 1)

    def test_events_delivered_before_the_records_were_loaded_are_queued(self) -> None:
        d = Driver()
        d.assign(load=False)
        d.deliver_at({0: "a", 1: "b"}, turn=False)
        assert d.lag().queued == 2

    def test_the_gap_counts_events_done_above_the_watermark(self) -> None:
        d = working()
        d.deliver("a", "b", "c", "d")
        d.done(1, 3)
        assert d.lag().gap == 2
        d.done(0)
        assert d.lag().gap == 1

    def test_the_gap_counts_events_and_not_positions(self) -> None:
        d = working()
        first = 1_790_000_000_000 << 21  # as on Redis: a time, beyond the integers that a float can represent
        positions = [first + number * 1_000_000 for number in range(4)]
        d.deliver_at(dict(zip(positions, "abcd", strict=True)))
        d.done(positions[1], positions[3])
        assert d.lag().gap == 2
        d.done(positions[0])
        assert d.lag().gap == 1

    def test_it_names_the_blocking_event_with_its_key_and_state(self) -> None:
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

    def test_it_shows_for_how_long_an_event_blocks(self) -> None:
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

    def test_an_idle_partition_is_not_blocked(self) -> None:
        d = working()
        d.deliver("a")
        d.done(0)
        d.wait(1_000)
        d.deliver("b")
        d.wait(3)
        assert (blocking := d.lag().blocking) is not None
        assert blocking.position == 1
        assert blocking.for_s == pytest.approx(3, abs=0.1)

    def test_an_event_that_waits_for_unreadable_records_blocks(self) -> None:
        d = Driver()
        d.assign(load=False)
        d.tick()
        d.wait(1_000)
        d.deliver_at({4: "a"}, turn=False)
        d.tick()
        d.now += 60
        assert (blocking := d.lag().blocking) is not None
        assert (blocking.position, blocking.key, blocking.state) == (4, "a", "loading")
        assert blocking.for_s == pytest.approx(60, abs=0.1)
        d.turn()
        assert (blocking := d.lag().blocking) is not None
        assert blocking.state == "running"

    def test_it_shows_for_how_long_an_event_blocks_also_while_the_store_is_down(self) -> None:
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

    def test_in_the_total_of_all_partitions_an_unknown_lag_is_not_zero(self) -> None:
        quiet = Lag(queued=0, running=0, delayed=0, parked=2, parked_keys=1, gap=0, blocking=None)
        busy = Lag(3, 2, 1, 5, 4, 7, Blocking(9, "a", "running", 1.5, published=WALL - 60, attempt=1))
        odd = msgspec.structs.replace(busy, blocking=Blocking(1, "b", "queued", 0.5, published=0.0, attempt=1))
        unknown = PartitionLag(quiet, BrokerLag(None, None))
        lags = [unknown, PartitionLag(busy, BrokerLag(4, 2.5)), PartitionLag(odd, BrokerLag(0, None))]
        behind = total(lags, WALL)
        assert (behind.undelivered, behind.undelivered_oldest_s, behind.open, behind.delayed) == (4, 2.5, 12, 2)
        assert (behind.parked, behind.parked_keys, behind.gap) == (12, 9, 14)
        assert (behind.oldest_open_s, behind.blocked_s) == (60.0, 1.5)
        assert [lag.events for lag in lags] == [None, 4 + 6 + 7, 0 + 6 + 7]
        nothing = total([unknown], WALL)
        assert (nothing.undelivered, nothing.oldest_open_s, nothing.blocked_s) == (None, None, 0.0)

    def test_only_partitions_that_are_ours_have_a_lag(self) -> None:
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

    def test_an_unexpected_completion_is_counted_as_stale(self) -> None:
        d = working()
        d.deliver("a")
        d.plane.completed([(Delivery(Event("x", "orders", "a", b""), P, 7, 1), DONE)], d.at)
        d.done(0)
        d.plane.completed([(Delivery(Event("x", "orders", "a", b""), P, 0, 1), DONE)], d.at)
        assert (d.plane.counts.stale, d.plane.running) == (2, 0)
