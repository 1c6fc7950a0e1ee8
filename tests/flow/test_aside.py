"""The aside: how events get there, how the next owner finds them, and how they come back in order."""

import msgspec
import pytest
from tests.flow.driver import FAR_S, LOG, WALL, Driver, P, Q, claims, event, failure, record, stored, working

from onward.brokers.base import Ordering, State, Tries, record_id
from onward.event import Delivery, Partition
from onward.flow.entry import DONE


class TestParkingByTime:
    def test_a_retry_due_late_waits_in_the_aside_and_its_successors_are_held(self) -> None:
        d = working()
        d.deliver("a", "a", "b", "a")
        d.again(0, in_s=FAR_S)
        assert d.states() == {0: State.WAITING, 1: State.HELD, 3: State.HELD}
        d.done(2)
        assert d.progress[P].watermark == 4
        assert (d.plane.open, d.lag().parked) == (0, 3)

    def test_a_retry_due_within_park_after_waits_in_memory(self) -> None:
        d = working(park_after_s=30.0)
        d.deliver("a", "b")
        d.again(0, in_s=30.0)
        d.again(1, in_s=30.1)
        assert d.states() == {1: State.WAITING}
        assert d.lag().delayed == 1

    def test_it_comes_back_when_it_is_due_and_its_successors_follow_in_order(self) -> None:
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

    def test_a_wall_clock_set_back_does_not_extend_a_wait_beyond_the_longest_retry(self) -> None:
        d = working(max_wait_s=60.0)
        an_hour_ahead = d.now + WALL + 3_600
        asked = msgspec.structs.replace(record(1, "b", State.WAITING, due=an_hour_ahead), failure=failure())
        d.assign(records=[record(0, "a", State.WAITING, due=an_hour_ahead + 60), asked], stored=stored(2))
        d.wait(59)
        assert d.running() == []
        d.wait(2)
        assert d.running() == [0], "a record that an operator postponed ran early"

    def test_a_wall_clock_set_back_during_a_wait_does_not_extend_it(self) -> None:
        d = working()
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        d.fence(P)
        d.wall -= 10 * FAR_S
        d.assign()
        d.wait(FAR_S - 1)
        assert d.running() == []
        d.wait(2)
        assert d.running() == [0]

    def test_a_wall_clock_set_back_does_not_restart_a_wait_that_is_over(self) -> None:
        d = working()
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S + 1)
        d.again(0, in_s=5)  # waits in its lane: only the tries in its record are stored again
        d.fence(P)
        d.wall -= 10 * FAR_S
        d.assign()
        assert d.running() == [0]

    def test_its_due_is_stored_in_unix_time_and_converted_back(self) -> None:
        d = working()
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        assert d.letter(0).due == d.now + WALL + FAR_S
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
        assert (d.running(), d.states()) == ([4], {}), "the key is still parked"

    def test_the_record_continues_the_count_of_attempts(self) -> None:
        d = working()
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S + 1)
        assert d.starts[-1].attempt == 2
        d.again(0, in_s=FAR_S)
        assert d.letter(0).tries == Tries(2)
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
        assert d.letter(0).tries == Tries(2)
        d.wait(6)
        assert d.running() == [0]
        assert d.run_out() == [0, 1]

    def test_the_record_is_removed_only_after_success(self) -> None:
        d = working()
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        d.wait(FAR_S + 1)
        assert 0 in d.states()
        d.end({0: DONE}, turn=False)
        call = d.tick().settle
        assert call is not None
        assert list(call.gone) == [record_id("g", LOG, P, 0)]

    def test_at_max_parked_events_wait_in_memory(self) -> None:
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

    def test_with_partition_order_every_retry_waits_in_memory(self) -> None:
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

    def test_the_timer_of_an_earlier_wait_does_not_shorten_a_later_one(self) -> None:
        d = Driver()
        d.assign(stored=stored(1), records=[record(0, "a", State.WAITING, due=d.now + WALL + 20)])
        d.move(0, to=State.WAITING, due=d.now + WALL)
        d.again(0, in_s=29)
        d.wait(21)
        assert d.running() == []
        d.wait(9)
        assert d.running() == [0]


class TestParkingByShare:
    def test_the_head_keeps_running_and_successors_beyond_a_quarter_are_held(self) -> None:
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

    def test_events_that_arrive_meanwhile_follow_the_records(self) -> None:
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

    def test_with_partition_order_nothing_is_held(self) -> None:
        d = working(max_in_flight=4, ordering="partition")
        d.deliver(*["a"] * 10)
        assert d.states() == {}
        assert d.paused == {P}

    def test_a_late_retry_of_the_head_keeps_the_order_of_events_held_before(self) -> None:
        d = working(max_in_flight=8)
        d.deliver(*["a"] * 4)
        d.again(0, in_s=FAR_S)
        assert d.states() == {0: State.WAITING, 1: State.HELD, 2: State.HELD, 3: State.HELD}
        d.wait(FAR_S + 1)
        assert d.run_out() == [0, 1, 2, 3]

    def test_events_that_did_not_fit_in_memory_are_read_again_when_their_turn_comes(self) -> None:
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

    @pytest.mark.parametrize("early", [True, False], ids=["before the records", "after the records"])
    def test_each_delivery_may_have_its_own_partition_object(self, early: bool) -> None:
        d = Driver()
        d.assign(load=not early)
        names = [Partition(P.topic, P.index) for _ in range(3)]
        d.seen[P] |= dict.fromkeys(range(3), False)
        d.plane.delivered([Delivery(event(f"k{i}"), name, i, 1) for i, name in enumerate(names)], d.at)
        d.turn()
        assert (d.plane.open, d.plane.counts.delivered, d.running()) == (3, 3, [0, 1, 2])

    def test_pages_are_requested_once_and_one_after_the_other(self) -> None:
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

    def test_a_page_for_an_earlier_ownership_is_ignored(self) -> None:
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

    def test_it_stays_claimed_after_its_record_was_removed(self) -> None:
        """Otherwise it would run again after a crash, behind its successors."""
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

    def test_a_record_also_waits_for_lower_events_of_its_key(self) -> None:
        d = Driver()
        d.assign(records=[record(2, "a")])
        d.deliver("a", "b", "a")
        assert d.running() == [0, 1]
        d.done(0)
        assert d.running() == [1, 2]

    def test_a_reached_message_past_the_record_lets_it_run(self) -> None:
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

    def test_records_stored_without_their_progress_keep_the_order(self) -> None:
        """The owner crashed between the two writes: the log delivers everything again."""
        d = Driver()
        d.assign(records=[record(0, "a", State.WAITING, due=WALL + 150)])
        d.deliver("a", "a", "a")
        assert (d.running(), d.states()) == ([], {0: State.WAITING, 1: State.HELD, 2: State.HELD})
        d.wait(51)
        assert d.run_out() == [0, 1, 2]


class TestMaxParked:
    def test_one_key_never_pauses_its_partition_up_to_the_limit(self) -> None:
        d = working(max_parked=20, max_in_flight=8)
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        for _ in range(18):
            d.deliver("a")
        assert d.paused == set()

    def test_arrivals_behind_a_parked_key_do_not_exceed_the_limit(self) -> None:
        d = working(max_parked=5, max_in_flight=8)
        d.deliver("a")
        d.again(0, in_s=FAR_S)
        for _ in range(50):
            if P not in d.paused:
                d.deliver("a")
        assert d.lag().parked == 5
        assert d.lag().paused_by == "max_parked"

    def test_the_partition_is_resumed_when_there_is_room_again(self) -> None:
        d = working(max_parked=10)
        d.deliver(*"aaaaaaaaaa")
        d.again(0, in_s=FAR_S)
        assert d.paused == {P}
        d.wait(FAR_S)
        d.done(0)
        d.done(1)
        assert (len(d.states()), d.paused) == (8, {P})
        d.done(2)
        assert (len(d.states()), d.paused) == (7, set())
        assert d.lag().paused_by is None

    def test_the_other_partitions_go_on(self) -> None:
        d = working(max_parked=2)
        d.assign(Q)
        d.deliver("a", "a")
        d.again(0, in_s=FAR_S)
        d.deliver("b", partition=Q)
        assert d.paused == {P}
        assert d.running(Q) == [0]

    def test_records_that_the_log_was_not_read_past_do_not_pause_the_partition(self) -> None:
        d = Driver(max_parked=2)
        d.assign(stored=stored(0), records=[record(p, "a") for p in (1, 3, 5)])
        assert d.paused == set()
        d.deliver_at({0: "b", 1: "a", 3: "a", 5: "a"})
        assert d.run_out() == [0, 1, 3, 5]


class TestMaxGap:
    def test_a_partition_is_paused_when_too_many_events_are_done_behind_one(self) -> None:
        d = working(max_gap=10)
        d.deliver("stuck")
        while P not in d.paused:
            d.done(*d.deliver("a"))
        assert d.lag().gap == 10
        assert d.lag().paused_by == "max_gap"
        d.done(0)
        assert d.paused == set()

    def test_it_stays_paused_while_another_open_event_keeps_the_gap(self) -> None:
        d = working(max_gap=10)
        d.deliver("x", "y", "a", "a")
        d.done(2)
        d.done(3)
        while P not in d.paused:
            d.done(*d.deliver("a"))
        d.deliver("z")
        d.done(0)
        assert d.paused == {P}
        assert d.lag().gap == 10
