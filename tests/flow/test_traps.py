"""Every known way to lose, stall or reorder events that the plane must avoid, by its number in the research.

Kafka research, section 3B (defects of a predecessor):
   1 retries of zero              here, and the policy refuses it: tests/failure/test_retry.py
   2, 3, 4, 5, 6, 8, 10           here; 8 and 10 as far as outcomes go, the rest of them in the engines' suite
   7 a worker's timeout loses     the engines' suite: every outcome resolves the event
   9 batches too big for a pipe   the engines' suite
Kafka research, section 4 (traps):
   1-16, 20, 22                   here
   9 commit errors                the loop (repeats the same settle) and the broker suite too
  11 foreign metadata             the progress codec too: tests/brokers/core/test_progress_codec.py
  12 poll liveness                the loop and the broker suite too
  17 undecodable payloads         the handler and the loop
  18 process workers, 19 BaseException      the engines' suite
  21 transactions                 the Kafka broker
What broke on real servers (contract):
   1-9, 13-15, 23, 24             the broker suite and the brokers' own tests
  10, 11, 12, 16, 19, 20, 21, 22  here; 16 as far as record ids go, the rest of it in the inbox
  17 fences, 18 cursor rows       the brokers and the inbox
"""

import pytest
from tests.flow.driver import FAR_S, Driver, P, Q, claims, failure, record, working

from onward.brokers.base import AsideRecord, Assigned, Progress, State, Tries, record_id
from onward.brokers.core.progress_codec import decode
from onward.flow.entry import DONE, Dead

# -- defects of a predecessor -------------------------------------------------------------------------------------


def test_defect_01_an_event_that_never_ran_is_not_committed() -> None:
    """In the predecessor, zero retries meant that events were not run at all."""
    d = working()
    d.deliver("a", "b")
    assert P not in d.progress or not claims(d.progress[P], 0)
    assert d.new_starts() == [0, 1]
    d.dead(0)
    d.done(1)
    assert d.states() == {0: State.DEAD}
    assert d.progress[P].watermark == 2


def test_defect_02_a_log_that_starts_above_zero_is_committed() -> None:
    d = working()
    d.deliver_at({1_000: "a", 1_001: "b"})
    d.done(1_001)
    assert d.progress[P].watermark == 1_000
    d.done(1_000)
    assert d.progress[P].watermark == 1_002


def test_defect_03_transaction_markers_do_not_stall_the_watermark() -> None:
    d = working()
    for start in range(0, 40, 4):
        d.deliver_at({start: "a", start + 1: "b"})  # a commit marker and an abort marker follow
        d.done(start, start + 1)
        d.reach(start + 4)
        assert d.progress[P].watermark == start + 4


def test_defect_04_an_event_whose_dead_letter_is_not_stored_is_not_committed() -> None:
    d = working()
    d.store_down = True
    d.deliver("a", "b", "c", "d", "e")
    d.dead(0, 1, 2, 3, 4)
    d.wait(60)
    assert (d.progress[P].watermark, list(d.progress[P].done_above)) == (0, [])
    assert d.lag().queued == 5
    d.store_down = False
    d.wait(2)
    assert d.progress[P].watermark == 5
    assert list(d.states().values()) == [State.DEAD] * 5


def test_defect_05_events_done_in_the_stored_map_do_not_run_again_after_a_restart() -> None:
    d = working()
    d.deliver(*(f"k{number}" for number in range(100)))
    d.done(*range(1, 100))
    assert list(d.progress[P].done_above) == [(1, 100)], "the events behind a stuck head were not stored as done"
    d.fence(P)
    d.end({0: DONE}, epoch=1)
    d.new_starts()
    d.assign()
    d.deliver_at({number: f"k{number}" for number in range(100)})
    assert d.new_starts() == [0]
    assert d.plane.counts.skipped == 99


def test_defect_06_each_ownership_has_its_own_epoch() -> None:
    d = working()
    d.deliver("a")
    d.fence(P)
    d.assign()
    d.deliver_at({0: "a"})
    d.end({0: DONE}, epoch=1)
    assert d.progress.get(P) is None, "the former owner's completion counted"
    d.end({0: DONE}, epoch=2)
    assert d.progress[P].watermark == 1


def test_defect_08_the_death_of_a_worker_blocks_no_other_event() -> None:
    d = working(concurrency=4)
    d.deliver(*(f"k{number}" for number in range(40)))
    d.again(2, in_s=0.0, crashed=True)
    d.wait(1)
    ended = d.run_out()
    assert sorted(ended) == list(range(40))
    assert d.progress[P].watermark == 40


def test_defect_10_a_cancelled_run_leaks_neither_slot_nor_position() -> None:
    d = working(concurrency=1)
    d.deliver("a", "b")
    for _ in range(5):
        d.cancel(0)
    assert d.run_out() == [0, 1]
    assert d.progress[P].watermark == 2
    assert d.plane.running == 0


# -- correctness traps --------------------------------------------------------------------------------------------


def test_trap_01_non_contiguous_offsets_never_stall() -> None:
    d = working()
    d.deliver_at({3: "a", 10: "b", 500: "c"})
    d.done(500)
    d.done(3)
    assert (d.progress[P].watermark, claims(d.progress[P], 500)) == (10, True)
    d.done(10)
    assert d.progress[P].watermark == 501
    d.reach(503)
    assert d.progress[P].watermark == 503, "trailing markers are not passed, so the lag never reaches zero"


def test_trap_02_only_done_events_are_committed_not_delivered_ones() -> None:
    d = working()
    d.deliver("a", "b", "c")
    d.reach(9)
    d.done(2)
    assert d.progress[P].watermark == 0
    assert not claims(d.progress[P], 1)


def test_trap_03_a_map_below_the_first_record_is_dropped() -> None:
    """Retention removed these events: the watermark must not wait for positions that are never delivered."""
    d = Driver()
    d.assign(stored=Progress(P, 0, 10, [(12, 15), (30, 40)]))
    d.deliver_at({20: "a"})
    d.done(20)
    assert d.progress[P].watermark == 21
    assert claims(d.progress[P], 35)


def test_trap_03_a_map_offset_that_no_longer_exists_is_pruned() -> None:
    d = Driver()
    d.assign(stored=Progress(P, 0, 0, [(1, 3)]))
    d.deliver_at({0: "a", 5: "b"})
    d.done(0, 5)
    assert (d.progress[P].watermark, list(d.progress[P].done_above)) == (6, [])


def test_trap_03_without_a_stored_map_everything_is_replayed() -> None:
    """After a rewind or reset the broker passes no progress, and the plane remembers none."""
    d = working()
    d.deliver("a", "b")
    d.done(0, 1)
    d.progress.clear()
    d.assign()
    d.deliver_at({0: "a", 1: "b"})
    assert d.running() == [0, 1]


def test_trap_04_skipping_happens_at_intake_and_is_counted() -> None:
    d = Driver(max_in_flight=4)
    d.assign(stored=Progress(P, 0, 0, [(0, 100)]))
    d.deliver_at(dict.fromkeys(range(100), "a"))
    assert (d.plane.open, d.plane.counts.skipped, d.paused) == (0, 100, set())


def test_trap_05_a_fresh_record_replaces_the_stale_one_at_its_position() -> None:
    """The partition is lost and assigned again, twice. The event must run under the last ownership."""
    d = working()
    d.deliver("a")
    for _ in range(4):
        d.fence(P)
        d.assign()
        d.deliver_at({0: "a"})
    d.end({0: DONE}, epoch=1)
    assert sorted(d.runs) == [(P, 5, 0)]
    d.done(0)
    assert d.progress[P].watermark == 1


def test_trap_05_an_epoch_is_checked_at_dispatch_too() -> None:
    d = working(concurrency=1)
    d.deliver("a", "b")
    d.fence(P)
    d.done(0)
    assert d.runs == {}


def test_trap_06_a_partition_that_returns_does_not_run_a_key_twice_at_once() -> None:
    d = working()
    d.deliver("a", "b")
    d.revoke(P, deadline_s=1)
    d.wait(2)
    assert d.undrained == [P]
    d.assign(unclean=True)
    d.deliver_at({0: "a", 1: "b", 2: "c"})
    assert sorted(d.runs) == [(P, 1, 0), (P, 1, 1), (P, 2, 2)]
    d.end({1: DONE}, epoch=1)
    assert (P, 2, 1) in d.runs
    assert (P, 2, 0) not in d.runs


def test_trap_07_a_revoke_waits_for_runs_then_commits_then_forgets() -> None:
    d = working()
    d.assign(Q)
    d.deliver("a", "a")
    d.deliver("x", "x", partition=Q)
    d.revoke(P, deadline_s=10)
    d.done(0)
    assert (d.drained, d.progress[P].watermark, d.plane.held) == ([P], 1, [Q])
    d.done(0, partition=Q)
    assert d.running(Q) == [1], "the rebalance of one partition stopped another"


def test_trap_07_an_empty_list_of_partitions_is_allowed() -> None:
    d = working()
    d.deliver("a", "a")
    d.revoke()
    d.fence()
    d.done(0)
    assert d.running() == [1]


def test_trap_08_a_lost_partition_is_not_handled_like_a_revoked_one() -> None:
    d = working()
    d.deliver("a", "b")
    d.end({0: DONE}, turn=False)
    d.fence(P)
    d.wait(10)
    assert (d.settlements, d.drained, d.undrained) == ([], [], [])


def test_trap_09_the_next_commit_waits_for_the_answer_and_loses_nothing() -> None:
    d = working()
    d.deliver("a", "b")
    d.end({0: DONE}, turn=False)
    assert d.tick().settle is not None
    d.end({1: DONE}, turn=False)
    assert d.tick().settle is None, "the second commit could overtake the first"
    d.answer_settle()
    d.turn()
    assert d.progress[P].watermark == 2


def test_trap_09_a_late_answer_to_an_older_commit_changes_nothing() -> None:
    d = working()
    d.deliver("a")
    d.end({0: DONE}, turn=False)
    d.tick()
    d.assign(load=False)  # lost and assigned again before the answer
    d.answer_settle()
    d.turn()
    d.deliver_at({0: "a"})
    assert d.running() == [0]


def test_trap_10_an_overlong_map_is_cut_at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.flow.tracker.MAX_INTERVALS", 3)
    d = working()
    d.deliver(*(f"k{number}" for number in range(20)))
    d.done(*range(1, 20, 2))
    assert list(d.progress[P].done_above) == [(1, 2), (3, 4), (5, 6)]
    d.done(0)
    assert d.progress[P].watermark == 2, "the events that block the watermark no longer run"


def test_trap_11_with_foreign_metadata_nothing_counts_as_done() -> None:
    for text in ("", "R2-199", "\u3400" * 20, "Streams\x00magic"):
        assert decode(text, 7).done_above == []


def test_trap_12_a_paused_partition_that_is_assigned_again_is_paused_again_when_it_is_full() -> None:
    d = working(max_in_flight=8)
    d.deliver(*"abcdefgh")
    assert d.paused == {P}
    d.fence(P)
    d.assign()
    assert d.paused == set()
    d.deliver_at(dict(enumerate("abcdefgh")))
    assert d.paused == {P}


def test_trap_12_only_the_full_partition_is_paused() -> None:
    d = working(max_in_flight=2)
    d.deliver("a", "b")
    d.assign(Q)
    d.deliver("a", partition=Q)
    assert d.paused == {P}
    assert d.running(Q) == [0]


def test_trap_13_successors_never_pass_a_failed_event() -> None:
    for in_s in (0.0, 1.0, FAR_S):
        d = working()
        d.deliver("a", "a", "a")
        d.again(0, in_s=in_s)
        assert d.running() in ([], [0])
        d.wait(in_s + 1)
        assert d.run_out() == [0, 1, 2]


def test_trap_14_a_waiting_retry_holds_no_slot_and_does_not_pause_its_partition() -> None:
    d = working(concurrency=2, max_in_flight=10, max_delayed=2)
    for number in range(50):
        (position,) = d.deliver(f"bad-{number}")
        d.again(position, in_s=25)
    assert d.paused == set()
    fine = d.deliver("fine-1", "fine-2")
    assert d.running() == fine


def test_trap_14_a_waiting_retry_counts_as_memory() -> None:
    d = working(max_in_flight_bytes=100, max_delayed=100)
    for number in range(10):
        (position,) = d.deliver(f"k{number}", size=10)
        d.again(position, in_s=25)
    assert d.paused == {P}


def test_trap_15_an_event_is_done_only_when_its_letter_is_stored() -> None:
    d = working()
    d.deliver("a", "b")
    d.end({0: Dead(failure())}, turn=False)
    call = d.tick().settle
    assert call is not None
    assert [each.event.key for each in call.aside] == ["a"], "the letter is not in the settle that claims it"
    d.refuse_settle()
    d.turn()
    assert not claims(d.progress.get(P), 0)
    assert d.running() == [1], "another key waited"


def test_trap_15_the_dead_letter_has_the_complete_event() -> None:
    d = working()
    d.deliver("a", size=7)
    (run,) = d.runs.values()
    d.dead(0)
    assert d.letter(0).event == run.event


def test_trap_16_an_empty_key_is_a_key_and_none_is_not() -> None:
    d = working()
    d.deliver("", "", None, None)
    assert d.running() == [0, 2, 3]


def test_trap_16_a_lane_belongs_to_its_topic() -> None:
    d = working()
    elsewhere = P._replace(topic="payments")
    d.assign(elsewhere)
    d.deliver("a", "a")
    d.deliver("a", "a", partition=elsewhere)
    assert (d.running(P), d.running(elsewhere)) == ([0], [0])


def test_trap_20_an_event_that_runs_again_has_the_same_identity() -> None:
    d = working()
    d.deliver("a")
    first = d.runs[(P, 1, 0)]
    d.fence(P)
    d.assign(unclean=True)
    d.deliver_at({0: "a"})
    d.done(0)
    d.wait(1)
    again = d.starts[-1]
    assert (again.partition, again.position, again.event.id) == (first.partition, first.position, first.event.id)
    assert again.epoch > first.epoch


def test_trap_22_messages_after_a_revoke_are_dropped_and_do_not_count_as_done() -> None:
    d = working()
    d.revoke(P)
    assert d.drained == [P]
    d.deliver_at({0: "a", 1: "b"}, epoch=1)
    assert (d.runs, d.settlements, d.plane.counts.stale, d.plane.open) == ({}, [], 2, 0)


# -- what broke on real servers -----------------------------------------------------------------------------------


def test_contract_10_one_settle_in_flight_and_a_release_waits_for_its_answer() -> None:
    d = working()
    d.deliver("a", "b")
    d.end({0: DONE}, turn=False)
    d.tick()
    d.end({1: DONE}, turn=False)
    d.revoke(P, turn=False)
    for _ in range(3):
        actions = d.tick()
        assert (actions.settle, list(actions.drained)) == (None, [])
    d.answer_settle()
    assert d.tick().settle is not None
    assert d.drained == []
    d.answer_settle()
    d.tick()
    assert (d.drained, d.progress[P].watermark) == ([P], 2)


def test_contract_11_the_watermark_passes_trailing_markers_to_the_end() -> None:
    d = working()
    d.deliver("a")
    d.reach(2)
    d.done(0)
    assert d.progress[P].watermark == 2


def test_contract_12_a_suspended_owner_starts_nothing_and_settles_nothing() -> None:
    """It resumes long after its lease. Its running events may end, but that has no effect."""
    d = working(concurrency=1)
    d.sure_until = d.now + 10
    d.deliver("a", "b")
    d.now += 60
    d.end({0: DONE}, turn=False)
    d.tick()
    assert d.running() == []
    assert d.settlement is not None
    d.answer_settle(lost=[P])
    d.turn()
    assert (d.progress, d.plane.held, d.runs) == ({}, [], {})


def test_contract_16_a_recreated_log_has_its_own_records() -> None:
    d = working()
    d.plane.assigned(Assigned(P, 2, 2, "log-2", None, False))
    d._begin(P, 2, None)
    d.turn()
    d.deliver_at({0: "a"})
    d.dead(0)
    assert list(d.records) == [record_id("g", "log-2", P, 0)]


def test_contract_19_attempts_survive_a_crash() -> None:
    d = working()
    d.deliver("a")
    for attempt in (1, 2):
        d.again(0, in_s=1)
        assert d.progress[P].tries == {0: Tries(attempt)}
        d.wait(1)
    d.fence(P)
    d.end({0: DONE}, epoch=1)
    d.assign(unclean=True)
    d.deliver_at({0: "a"})
    d.wait(1)
    assert d.starts[-1].attempt == 3


def test_contract_19_an_event_that_kills_its_process_is_distinguished_from_the_others() -> None:
    """It kills its process whenever it runs. A crash must cost the other events only a repeated run."""
    keys = {number: f"k{number}" for number in range(6)}
    killer, crashes = 3, 0
    progress: Progress | None = None
    records: dict[str, AsideRecord] = {}
    for _ in range(20):
        d = Driver(crash_limit=3)
        d.records = records
        d.assign(stored=progress, unclean=crashes > 0)
        d.deliver_at(keys)
        while d.runs and killer not in d.running():
            d.done(d.running()[0])
        progress, records = d.progress.get(P), d.records
        if not d.runs:
            break
        crashes += 1
    assert d.states() == {killer: State.DEAD}
    assert claims(progress, killer)
    assert crashes <= 5, "more crashes than one among others and three alone"
    story = d.letter(killer).failure
    assert story is not None
    assert story.reason == "crashed"


def test_contract_20_a_replay_runs_through_its_lane_and_not_behind_newer_events() -> None:
    d = working()
    d.deliver("a")
    d.dead(0)
    d.deliver("a", "a", "a")
    d.move(0, to=State.WAITING, due=0.0)
    assert d.running() == [1]
    d.done(1)
    assert d.running() == [0]
    assert d.run_out() == [0, 2, 3]


def test_contract_21_one_failing_key_does_not_fill_its_partition() -> None:
    d = working(max_in_flight=40)
    d.deliver("bad")
    d.again(0, in_s=10)
    good = 0
    for _ in range(100):
        d.deliver("bad", "bad")
        d.done(*d.deliver("good"))
        good += 1
        assert d.paused == set()
    assert d.plane.counts.done == good
    assert d.plane.open <= 10
    d.wait(11)
    ended = d.run_out()
    assert ended == sorted(ended)
    assert len(ended) == 201


def test_contract_22_the_next_owner_reads_the_records_before_its_first_dispatch() -> None:
    d = working()
    d.deliver("a", "a")
    d.again(0, in_s=FAR_S)
    d.revoke(P)
    d.assign(load=False)
    d.tick()
    d.deliver_at({2: "a", 3: "b"}, turn=False)
    d.tick()
    assert d.running() == []
    d.turn()
    assert d.running() == [3]
    assert d.states() == {0: State.WAITING, 1: State.HELD, 2: State.HELD}


def test_contract_22_a_crash_between_the_park_and_the_settle_keeps_the_order() -> None:
    """The records were stored but the progress was not, so everything is delivered again."""
    d = Driver()
    d.assign(records=[record(0, "a", State.WAITING, due=0.0), record(1, "a")], unclean=True)
    d.deliver("a", "a", "a")
    d.wait(1)
    assert d.run_out() == [0, 1, 2]
    assert (d.states(), d.progress[P].watermark) == ({}, 3)
