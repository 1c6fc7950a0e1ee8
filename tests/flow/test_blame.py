"""Attempts survive a crash, and the event that causes crashes is found."""

from tests.flow.driver import FAR_S, WALL, Driver, P, Q, record, stored, working

from onward.brokers.base import State, Tries
from onward.flow.entry import DONE


class TestAttempts:
    def test_they_are_stored_with_the_progress(self) -> None:
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

    def test_they_are_removed_when_the_event_is_done(self) -> None:
        d = working()
        d.deliver("a", "b")
        d.again(0, in_s=1)
        d.wait(1)
        d.done(0)
        assert d.progress[P].tries == {}

    def test_those_of_events_not_yet_delivered_again_are_kept(self) -> None:
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
        assert d.letter(0).tries == Tries(2)
        assert d.progress[P].tries == {}


class TestBlame:
    def unclean(self, tries: dict[int, Tries] | None = None, **limits: object) -> Driver:
        d = Driver(**limits)
        d.assign(stored=stored(0, tries=tries), unclean=True)
        return d

    def test_after_a_crash_starts_are_recorded_before_the_events_run(self) -> None:
        d = self.unclean()
        d.deliver("a", "b", turn=False)
        call = d.tick().settle
        assert call is not None
        assert call.progress[0].tries == {0: Tries(0, 1), 1: Tries(0, 1)}
        assert d.running() == []
        d.answer_settle()
        d.tick()
        assert d.running() == [0, 1]

    def test_after_a_clean_end_no_start_is_recorded_and_no_event_is_charged(self) -> None:
        d = Driver()
        d.assign(stored=stored(0, tries={0: Tries(0, 2)}))
        d.deliver("a", "b", turn=False)
        d.tick()
        assert d.running() == [0, 1]
        d.again(0, in_s=1)
        assert d.progress[P].tries == {0: Tries(1)}

    def test_only_starts_of_events_that_could_have_been_running_are_recorded(self) -> None:
        d = self.unclean(max_in_flight=2)
        d.deliver("a", "b")
        d.done(0, 1)
        d.deliver("c", turn=False)
        d.tick()
        assert d.running() == [2]

    def test_starts_are_also_recorded_if_positions_are_far_apart(self) -> None:
        d = self.unclean(max_in_flight=10)
        d.deliver_at({1 << 40: "a", 2 << 40: "b"}, turn=False)
        call = d.tick().settle
        assert call is not None
        assert set(call.progress[0].tries) == {1 << 40, 2 << 40}

    def test_an_event_that_was_running_in_the_crash_runs_alone(self) -> None:
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

    def test_a_suspect_runs_even_if_nothing_else_happens(self) -> None:
        d = self.unclean({0: Tries(0, 1)})
        d.deliver("a")
        d.wait(60)
        assert d.running() == [0]
        assert d.progress[P].tries == {0: Tries(0, 2)}

    def test_a_suspect_runs_alone_over_all_partitions_of_this_process(self) -> None:
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

    def test_a_crash_during_a_run_among_others_is_not_charged(self) -> None:
        d = self.unclean({0: Tries(0, 1)}, crash_limit=1)
        d.deliver("a")
        d.wait(1)
        assert d.running() == [0]
        assert d.progress[P].tries[0].crashes == 0

    def test_a_crash_during_a_lone_run_is_charged(self) -> None:
        d = self.unclean({0: Tries(2, 2, 0)})
        d.deliver("a")
        d.wait(1)
        assert d.progress[P].tries == {0: Tries(2, 2, 1)}
        assert d.starts[-1].attempt == 3

    def test_at_the_crash_limit_the_event_becomes_a_dead_letter(self) -> None:
        d = self.unclean({0: Tries(0, 2, 2)}, crash_limit=3)
        d.deliver("a", "a", "b")
        d.wait(1)
        story = d.letter(0).failure
        assert story is not None
        assert story.reason == "crashed"
        assert sorted(d.run_out()) == [1, 2]
        assert d.plane.counts.dead == 1

    def test_charged_crashes_survive_a_clean_end(self) -> None:
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
        assert d.running() == [1], "the suspect did not wait for the other run"
        d.done(1)
        d.wait(1)
        assert d.running() == [0]
        assert d.starts[-1].attempt == 2

    def test_deaths_of_workers_count_to_the_crash_limit_too(self) -> None:
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
        call = d.settlement
        assert call is not None
        assert [(each.tries, each.state, each.due) for each in call.aside] == [(Tries(0, 1), State.WAITING, WALL + 9)]
        assert d.running() == []
        d.turn()
        assert d.running() == [0]

    def test_a_record_whose_lone_run_crashed_is_charged(self) -> None:
        d = Driver(crash_limit=2)
        d.assign(stored=stored(5), records=[record(0, "a", tries=Tries(0, 2, 1)), record(1, "a")], unclean=True)
        d.wait(1)
        assert d.states() == {0: State.DEAD, 1: State.HELD}
        assert d.running() == [1]

    def test_fencing_the_partition_of_the_lone_run_lets_the_others_start(self) -> None:
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

    def test_revoking_the_partition_of_the_lone_run_lets_the_others_start(self) -> None:
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

    def test_a_cancelled_run_is_no_longer_marked_as_started(self) -> None:
        d = self.unclean(concurrency=1)
        d.deliver("a")
        d.revoke(P)
        d.cancel(0)
        assert d.progress[P].tries.get(0, Tries()).started == 0


def test_tries_of_positions_that_became_holes_are_forgotten() -> None:
    d = Driver()
    d.assign(stored=stored(0, tries={p: Tries(1) for p in range(10)}))
    assert len(d.plane._holdings[P].blame.tries) == 10
    d.deliver_at({3: "a", 20: "b"})
    d.done(20)
    assert set(d.plane._holdings[P].blame.tries) == {3}
    assert set(d.progress[P].tries) == {3}


def test_tries_survive_a_refused_dead_letter() -> None:
    d = Driver()
    d.assign(stored=stored(0, tries={0: Tries(2)}))
    d.deliver("a", "b")
    d.store_down = True
    d.dead(0)
    d.done(1)
    assert d.progress[P].tries == {0: Tries(2)}


def test_a_lone_run_that_outlives_its_release_is_not_charged_with_a_crash() -> None:
    d = Driver()
    d.assign(stored=stored(0, tries={0: Tries(0, 2)}), unclean=True)
    d.deliver("a")
    assert d.progress[P].tries == {0: Tries(0, 2, 1)}
    d.revoke(P, deadline_s=5)
    d.wait(5)
    assert d.undrained == [P]
    assert d.progress[P].tries == {0: Tries(0, 0, 1)}


def test_a_suspect_that_outlives_its_release_is_still_suspected() -> None:
    d = Driver()
    d.assign(stored=stored(0, tries={0: Tries(0, 1)}), unclean=True)
    d.deliver("a")
    d.revoke(P, deadline_s=5)
    d.wait(5)
    assert d.undrained == [P]
    assert d.progress[P].tries == {0: Tries(0, 1)}


def test_a_watched_run_that_outlives_its_release_is_not_suspected() -> None:
    d = Driver()
    d.assign(stored=stored(0), unclean=True)
    d.deliver("a")
    assert d.progress[P].tries == {0: Tries(0, 1)}
    d.revoke(P, deadline_s=5)
    d.wait(5)
    assert d.progress[P].tries == {0: Tries(0, 0)}
