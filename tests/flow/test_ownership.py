"""The ownership of partitions: epochs, the drain before a release, and losing a partition without a release."""

from tests.flow.driver import Driver, P, Q, claims, failure, record, stored, working

from onward.brokers.base import Tries
from onward.flow.entry import DONE, Again, Dead, Outcome


class TestEpochs:
    def test_a_delivery_of_another_ownership_is_dropped_and_counted(self) -> None:
        d = working()
        d.fence(P)
        d.assign()
        d.deliver_at({0: "a"}, epoch=1)
        assert d.running() == []
        assert (d.plane.counts.stale, d.plane.open) == (1, 0)

    def test_a_delivery_of_a_partition_that_is_not_ours_is_dropped_and_counted(self) -> None:
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
        outcomes: list[Outcome] = [DONE, Again(0.0, failure()), Again(1e6, failure()), Dead(failure())]
        for outcome in outcomes:
            d = working()
            d.deliver("a")
            d.fence(P)
            d.assign()
            d.end({0: outcome}, epoch=1)
            d.wait(10)
            assert d.settlements == []
            assert (d.plane.running, d.plane.open) == (0, 0)

    def test_an_event_delivered_again_replaces_its_stale_run(self) -> None:
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

    def test_the_lane_stays_busy_over_several_ownerships(self) -> None:
        d = working()
        d.deliver("a")
        for _ in range(3):
            d.fence(P)
            d.assign()
            d.deliver_at({0: "a"})
            assert sorted(d.runs) == [(P, 1, 0)]
        d.end({0: DONE}, epoch=1)
        assert sorted(d.runs) == [(P, 4, 0)]

    def test_with_partition_order_the_lane_of_a_stale_run_stays_busy_too(self) -> None:
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

    def test_a_lost_partition_is_forgotten_when_its_last_run_has_ended(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.fence(P)
        assert (d.plane.held, d.plane.open, d.plane.running) == ([], 0, 2)
        d.done(0, 1)
        assert (d.plane.running, d.plane.counts.stale, d.plane.lag(d.now)) == (0, 2, {})
        assert not d.plane._holdings

    def test_nothing_starts_while_ownership_is_uncertain(self) -> None:
        d = working()
        d.sure_until = d.now
        d.deliver("a")
        assert d.running() == []

    def test_events_start_by_themselves_once_ownership_is_certain_again(self) -> None:
        d = working()
        d.sure_until = d.now
        d.deliver("a")
        d.sure_until = 1e9
        d.wait(5)
        assert d.running() == [0]

    def test_ended_events_are_settled_while_ownership_is_uncertain(self) -> None:
        d = working()
        d.deliver("a")
        d.sure_until = d.now
        d.done(0)
        assert d.progress[P].watermark == 1

    def test_an_answer_about_an_earlier_ownership_does_not_end_the_current_one(self) -> None:
        d = working()
        d.deliver("a")
        d.end({0: DONE}, turn=False)
        d.tick()
        assert d.settlement is not None
        d.plane.fenced([P])
        d.assign(load=False)
        d.answer_settle()  # the earlier ownership is lost
        d.turn()
        assert d.plane.held == [P]
        d.deliver_at({0: "a"})
        assert d.running() == [0]

    def test_a_partition_that_a_settle_reports_as_lost_is_fenced(self) -> None:
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
    def test_no_more_events_of_it_start(self) -> None:
        d = working()
        d.deliver("a", "a")
        d.revoke(P)
        d.end({0: DONE}, turn=False)
        d.tick()
        assert d.running() == []

    def test_it_waits_for_runs_then_settles_then_releases(self) -> None:
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

    def test_at_the_deadline_it_is_released_undrained_and_done_events_are_settled(self) -> None:
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

    def test_it_is_released_at_once_also_before_its_records_were_loaded(self) -> None:
        d = Driver()
        d.assign(load=False)
        d.deliver_at({0: "a"}, turn=False)
        d.revoke(P)
        assert d.drained == [P]
        assert d.progress == {}

    def test_other_partitions_go_on(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("a")
        d.deliver("a", "a", partition=Q)
        d.revoke(P)
        d.done(0, partition=Q)
        assert d.running(Q) == [1]
        assert d.plane.held == [P, Q]

    def test_a_second_revoke_cannot_extend_the_deadline(self) -> None:
        d = working()
        d.deliver("a")
        d.revoke(P, deadline_s=5)
        d.revoke(P, deadline_s=60)
        d.wait(6)
        assert d.undrained == [P]

    def test_revoking_nothing_or_unknown_partitions_does_nothing(self) -> None:
        d = working()
        d.deliver("a")
        d.revoke()
        d.revoke(Q)
        d.wait(100)
        assert (d.plane.held, d.drained, d.undrained) == ([P], [], [])
        assert d.running() == [0]

    def test_a_dead_letter_that_cannot_be_stored_does_not_delay_the_release(self) -> None:
        d = working()
        d.deliver("a")
        d.revoke(P, deadline_s=5)
        d.store_down = True
        d.dead(0)
        d.wait(6)
        assert d.drained == [P]
        assert not claims(d.progress.get(P), 0), "the next owner would not run it"

    def test_a_fence_ends_the_drain(self) -> None:
        d = working()
        d.deliver("a")
        d.revoke(P)
        d.fence(P)
        d.wait(20)
        assert (d.drained, d.undrained) == ([], [])

    def test_a_revoked_partition_that_is_assigned_again_starts_from_its_progress(self) -> None:
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

    def test_only_the_fenced_partitions_are_forgotten(self) -> None:
        d = working()
        d.assign(Q)
        d.deliver("a")
        d.deliver("a", "a", partition=Q)
        d.fence(P)
        d.done(0, partition=Q)
        assert d.running(Q) == [1]
        assert d.progress[Q].watermark == 1

    def test_fencing_nothing_or_unknown_partitions_does_nothing(self) -> None:
        d = working()
        d.fence()
        d.fence(Q)
        assert d.plane.held == [P]

    def test_an_assignment_of_a_partition_that_we_hold_is_a_new_ownership(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.assign()
        assert d.plane.open == 0
        d.deliver_at({0: "a", 1: "b"})
        d.end({0: DONE, 1: DONE}, epoch=1)
        assert d.settlements == []
        assert sorted(d.runs) == [(P, 2, 0), (P, 2, 1)]

    def test_a_settle_in_flight_may_be_answered_after_a_fence(self) -> None:
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


def test_a_partition_with_a_stale_run_is_not_released_as_drained() -> None:
    d = working()
    d.deliver("a")
    d.fence(P)
    d.assign()
    d.revoke(P, deadline_s=5)
    assert d.drained == []
    d.wait(5)
    assert (d.drained, d.undrained) == ([], [P])


def test_a_partition_is_released_as_drained_once_its_stale_run_has_ended() -> None:
    d = working()
    d.deliver("a")
    d.fence(P)
    d.assign()
    d.revoke(P, deadline_s=5)
    d.done(0)
    assert (d.drained, d.undrained) == ([P], [])
