"""Each test breaks the control plane on purpose, in one way. The simulator must notice it.

The first group breaks the promises of the architecture. The second restores, one by one, bugs that the simulator has
found in the plane. If a mutant survives, a checker or a fault is missing.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec
import pytest
from tests.flow.test_simulator import refusing, sharing

from onward.brokers.base import Assigned, Failure, Progress, State, Tries
from onward.brokers.core import progress_codec as codec
from onward.brokers.core.progress_codec import LIMIT_CHARS
from onward.event import Delivery, Partition
from onward.flow import intake
from onward.flow import plane as plane_module
from onward.flow import settling as settling_module
from onward.flow.actions import Actions
from onward.flow.aside_index import AsideIndex
from onward.flow.blame import ALONE, Blame
from onward.flow.dispatch import Dispatch
from onward.flow.entry import Again, Entry, Instant, Outcome, ParkedRecord, Stage
from onward.flow.holding import Holding
from onward.flow.lanes import Lanes
from onward.flow.limits import Limits
from onward.flow.parking import Parking
from onward.flow.pending_records import PendingRecords
from onward.flow.plane import ControlPlane
from onward.flow.settling import SettlePart
from onward.flow.tracker import Tracker
from onward.testing.simulator import simulate
from onward.testing.simulator.profile import Profile
from onward.testing.simulator.world import Shape

pytestmark = pytest.mark.slow

SEEDS = 300

Patch = pytest.MonkeyPatch


def caught_by(*checkers: str, shape: Shape | None = None) -> None:
    """Some seed fails, and one of these checkers catches the first. `shape` makes rare cases frequent."""
    for seed in range(SEEDS):
        result = simulate(seed, shape=shape)
        if result.checker is not None:
            assert result.checker in checkers, f"seed {seed}: {result.message}"
            return
    pytest.fail(f"no seed below {SEEDS} notices the mutant")


def in_steps(profile: Profile) -> Profile:
    """A slow broker without transactions, keys that park and come back all the time, and many faults between writes."""
    limits = msgspec.structs.replace(profile.limits, ordering="key", max_in_flight=8, settle_interval_s=0.3)
    return msgspec.structs.replace(
        profile, shared=False, limits=limits, atomic=False, latency_s=0.1, keys=2, partitions=1, faults=60
    )


def deadly(profile: Profile) -> Profile:
    """Many events that kill their process: each process dies of several, one after the other."""
    limits = msgspec.structs.replace(profile.limits, crash_limit=1, concurrency=4, batch_size=1)
    fates = (*profile.fates[:-1], 0.08)
    return msgspec.structs.replace(
        profile, shared=False, limits=limits, fates=fates, kills="process", faults=0, latency_s=0.02
    )


def wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method or function by `around(original, self, *args)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **keywords: around(original, *args, **keywords))


# -- broken promises ---------------------------------------------------------------------------------------------


def test_mutant_settles_before_done(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Tracker, "watermark", property(lambda tracker: tracker.end))
    caught_by("settled")


def test_mutant_claims_open_events_above_the_watermark(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Tracker, "done_above", lambda tracker: [(tracker.watermark + 1, tracker.end + 1)])
    caught_by("settled")


def test_mutant_ignores_the_fence(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ControlPlane, "fenced", lambda *_: None)
    caught_by("epochs")


def test_mutant_ignores_the_epoch_of_a_completion(monkeypatch: Patch) -> None:
    def around(original: Any, plane: ControlPlane, results: Iterable[tuple[Delivery, Outcome]], at: Instant) -> None:
        epochs = {each: plane._holdings[each].epoch for each in plane.held}
        renewed = [(renew(delivery, epochs.get(delivery.partition)), outcome) for delivery, outcome in results]
        original(plane, renewed, at)

    wrap(monkeypatch, ControlPlane, "completed", around)
    caught_by("liveness", "lanes", "bounds", "order", "suffix")


def test_mutant_ignores_the_epoch_of_a_delivery(monkeypatch: Patch) -> None:
    def around(original: Any, plane: ControlPlane, batch: list[Delivery], at: Instant) -> None:
        epochs = {each: plane._holdings[each].epoch for each in plane.held}
        original(plane, [renew(delivery, epochs.get(delivery.partition)) for delivery in batch], at)

    wrap(monkeypatch, ControlPlane, "delivered", around)
    caught_by("settled", "loss", "order", "epochs", "liveness", "repeats")


def renew(delivery: Delivery, epoch: int | None) -> Delivery:
    return delivery if epoch is None else msgspec.structs.replace(delivery, epoch=epoch)


def test_mutant_resumes_without_hysteresis(monkeypatch: Patch) -> None:
    monkeypatch.setattr(plane_module, "RESUME_AT", 0.95)
    caught_by("hysteresis")


def test_mutant_never_resumes(monkeypatch: Patch) -> None:
    monkeypatch.setattr(plane_module, "RESUME_AT", -1.0)
    caught_by("liveness")


def test_mutant_forgets_the_limit_of_bytes(monkeypatch: Patch) -> None:
    with_limits(monkeypatch, max_in_flight_bytes=1 << 40)
    caught_by("bounds", "hysteresis")


def test_mutant_forgets_the_limit_of_events(monkeypatch: Patch) -> None:
    with_limits(monkeypatch, max_in_flight=1 << 40)
    caught_by("bounds", "hysteresis")


def test_mutant_forgets_the_limit_of_records(monkeypatch: Patch) -> None:
    with_limits(monkeypatch, max_parked=1 << 40)
    caught_by("bounds", shape=one_key_far_behind)


def one_key_far_behind(profile: Profile) -> Profile:
    """All events have one key, and wait behind one that waits for its retry."""
    limits = msgspec.structs.replace(
        profile.limits, ordering="key", on_dead="pass", max_in_flight=8, max_parked=4, park_after_s=0.2
    )
    return msgspec.structs.replace(
        profile,
        shared=False,
        limits=limits,
        keys=1,
        partitions=1,
        events=120,
        receive_batch=4,
        attempts=4,
        delays_s=(2.0, 6.0),
    )


def test_mutant_forgets_the_limit_of_the_gap(monkeypatch: Patch) -> None:
    with_limits(monkeypatch, max_gap=1 << 40)
    caught_by("bounds", shape=slow_heads)


def slow_heads(profile: Profile) -> Profile:
    """Some events are slow, and the number of events done above them must stay bounded."""
    limits = msgspec.structs.replace(profile.limits, max_in_flight=8, max_gap=6, batch_size=1, ordering="none")
    fates = (1.0, 0.1, *profile.fates[2:])
    return msgspec.structs.replace(
        profile, shared=False, limits=limits, partitions=1, events=120, receive_batch=4, fates=fates
    )


def test_mutant_counts_positions_instead_of_events(monkeypatch: Patch) -> None:
    spans = Tracker.done_above
    monkeypatch.setattr(Tracker, "gap", property(lambda tracker: sum(stop - start for start, stop in spans(tracker))))
    caught_by("lag", "liveness")


def test_mutant_forgets_the_concurrency(monkeypatch: Patch) -> None:
    with_limits(monkeypatch, concurrency=1 << 40)
    caught_by("bounds")


def with_limits(patch: Patch, **changed: int) -> None:
    def around(original: Any, plane: ControlPlane, limits: Limits) -> None:
        original(plane, msgspec.structs.replace(limits, **changed))

    wrap(patch, ControlPlane, "__init__", around)


def test_mutant_lets_a_successor_pass_a_failed_event(monkeypatch: Patch) -> None:
    def around(original: Any, holding: Holding, entry: Entry, again: Again, at: Instant) -> None:
        original(holding, entry, again, at)
        if entry.stage is Stage.DELAYED:
            holding.events.lanes.leave(entry)

    wrap(monkeypatch, Holding, "failed", around)
    caught_by("order")


def test_mutant_lets_a_successor_pass_a_parked_event(monkeypatch: Patch) -> None:
    def around(original: Any, holding: Holding, entry: Entry) -> None:
        if not holding.events.lanes.add(entry, 1 << 62):
            raise AssertionError

    wrap(monkeypatch, intake, "_line_up_behind", around)
    caught_by("order")


def test_mutant_lets_a_successor_pass_a_letter_that_is_not_stored(monkeypatch: Patch) -> None:
    def around(original: Any, holding: Holding, entry: Entry, failure: Failure, at: Instant) -> None:
        original(holding, entry, failure, at)
        if entry.parked is None:
            holding.events.lanes.leave(entry)

    wrap(monkeypatch, Holding, "dead", around)
    caught_by("order", "liveness")


def test_mutant_passes_a_dead_event_that_holds_its_key(monkeypatch: Patch) -> None:
    with_limits_text(monkeypatch, on_dead="pass")
    caught_by("order")


def with_limits_text(patch: Patch, **changed: str) -> None:
    def around(original: Any, plane: ControlPlane, limits: Limits) -> None:
        original(plane, msgspec.structs.replace(limits, **changed))

    wrap(patch, ControlPlane, "__init__", around)


def test_mutant_runs_two_of_a_key(monkeypatch: Patch) -> None:
    with_limits_text(monkeypatch, ordering="none")
    caught_by("lanes", "order")


def test_mutant_dispatches_before_the_aside_is_loaded(monkeypatch: Patch) -> None:
    def around(original: Any, holding: Holding, assigned: Assigned | None) -> None:
        original(holding, assigned)
        holding.aside.loading.loaded = assigned is not None

    wrap(monkeypatch, Holding, "begin", around)
    caught_by("loading", "order")


def test_mutant_starts_events_while_ownership_is_uncertain(monkeypatch: Patch) -> None:
    wrap(monkeypatch, ControlPlane, "tick", lambda tick, plane, at, sure_until: tick(plane, at, sure_until + 1.0))
    caught_by("epochs")


def test_mutant_starts_events_of_a_revoked_partition(monkeypatch: Patch) -> None:
    def around(original: Any, dispatch: Dispatch, at: Instant) -> Any:
        dates = [(holding, holding.release_at) for holding in dispatch.ready]
        for holding, _ in dates:
            holding.release_at = None
        work = original(dispatch, at)
        for holding, date in dates:
            holding.release_at = date
        return work

    wrap(monkeypatch, Dispatch, "start", around)
    caught_by("epochs")


def test_mutant_drops_a_held_successor(monkeypatch: Patch) -> None:
    def around(original: Any, holding: Holding, entry: Entry, state: State, *more: Any, **named: Any) -> None:
        if state is State.HELD:
            holding.events.tracker.done(entry.delivery.position)
            holding.pending.dirty = True
        else:
            original(holding, entry, state, *more, **named)

    wrap(monkeypatch, Holding, "set_aside", around)
    caught_by("settled")


def test_mutant_removes_a_record_when_it_starts(monkeypatch: Patch) -> None:
    def around(original: Any, holding: Holding, parked: ParkedRecord) -> None:
        original(holding, parked)
        holding.pending.remove(parked.id, None)

    wrap(monkeypatch, Holding, "_draw", around)
    caught_by("records")


def test_mutant_never_removes_a_record(monkeypatch: Patch) -> None:
    wrap(
        monkeypatch, Holding, "done", lambda done, holding, *args: (done(holding, *args), holding.pending.gone.clear())
    )
    caught_by("liveness", "suffix", "repeats")


def test_mutant_brings_records_back_in_the_wrong_order(monkeypatch: Patch) -> None:
    def head(parking: Parking, key: str | None) -> ParkedRecord | None:
        records = parking._keys.get(key) if key is not None else None
        return records[-1] if records else None

    monkeypatch.setattr(Parking, "head", head)
    caught_by("order", "repeats")


def test_mutant_forgets_events_done_before_this_ownership(monkeypatch: Patch) -> None:
    def around(original: Any, tracker: Tracker, stored: Progress | None) -> None:
        original(tracker, msgspec.structs.replace(stored, done_above=()) if stored else None)

    wrap(monkeypatch, Tracker, "__init__", around)
    caught_by("repeats", "suffix", "records")


def test_mutant_releases_before_the_last_settle(monkeypatch: Patch) -> None:
    def around(original: Any, plane: ControlPlane, now: float) -> tuple[list[Partition], list[Partition]]:
        drained = [holding.partition for holding in list(plane._revoking) if not holding.events.running]
        plane.fenced(drained)
        late, undrained = original(plane, now)
        return drained + late, undrained

    wrap(monkeypatch, ControlPlane, "_releases", around)
    caught_by("repeats")


def test_mutant_reports_an_undrained_release_as_drained(monkeypatch: Patch) -> None:
    def around(original: Any, *args: Any) -> Actions:
        actions: Actions = original(*args)
        drained = [*actions.drained, *actions.undrained]
        return msgspec.structs.replace(actions, drained=drained, undrained=())

    wrap(monkeypatch, ControlPlane, "tick", around)
    caught_by("repeats", "lanes", "blame")


def test_mutant_forgets_attempts_at_a_handover(monkeypatch: Patch) -> None:
    def around(original: Any, *args: Any) -> dict[int, Tries]:
        return {position: Tries(0, tries.started, tries.crashes) for position, tries in original(*args).items()}

    wrap(monkeypatch, Blame, "open_tries", around)
    caught_by("records")


def test_mutant_gives_up_too_early(monkeypatch: Patch) -> None:
    def around(original: Any, holding: Holding, entry: Entry, again: Again, at: Instant) -> None:
        failed = entry.delivery.attempt
        entry.delivery = msgspec.structs.replace(entry.delivery, attempt=failed + 1)
        original(holding, entry, again, at)

    wrap(monkeypatch, Holding, "failed", around)
    caught_by("records")


def test_mutant_charges_events_that_ran_beside_the_cause_of_a_crash(monkeypatch: Patch) -> None:
    def charged(blame: Blame, tries: Tries) -> Tries:
        crashes = tries.crashes + (1 if blame.unclean and tries.started else 0)
        return Tries(tries.failed, 0, crashes)

    monkeypatch.setattr(Blame, "charged", charged)
    caught_by("blame")


def test_mutant_never_finds_the_cause_of_a_crash(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Blame, "charged", lambda _, tries: Tries(tries.failed))
    caught_by("blame", "liveness")


def test_mutant_lets_others_run_beside_a_suspect(monkeypatch: Patch) -> None:
    def around(original: Any, blame: Blame, entry: Entry, tries: Tries, cautious: bool) -> None:
        original(blame, entry, tries, cautious)
        if entry.suspect:
            entry.suspect, entry.cautious = False, True

    wrap(monkeypatch, Blame, "weigh", around)
    wrap(monkeypatch, Holding, "mark", lambda original, holding, entry, started: original(holding, entry, ALONE))
    caught_by("blame")


def test_mutant_runs_a_key_twice_at_once_after_a_new_assignment(monkeypatch: Patch) -> None:
    def abandon(lanes: Lanes) -> None:
        lanes.ready.clear()
        lanes._lanes.clear()

    monkeypatch.setattr(Lanes, "abandon", abandon)
    caught_by("lanes")


def test_mutant_does_not_reopen_refused_events(monkeypatch: Patch) -> None:
    def refused(part: SettlePart, now: float) -> None:
        for position in part.records:
            part.holding.pending.leaving.pop(position, None)
        part.holding.pending.dirty = True

    monkeypatch.setattr(plane_module, "part_refused", refused)
    caught_by("settled")


def test_mutant_treats_a_partly_refused_settle_as_settled(monkeypatch: Patch) -> None:
    def around(original: Any, plane: ControlPlane, _: Any, lost: Iterable[Partition], at: Instant) -> None:
        original(plane, (), lost, at)

    wrap(monkeypatch, ControlPlane, "aside_refused", around)
    caught_by("settled")


def test_mutant_ignores_lost_partitions_of_a_refused_settle(monkeypatch: Patch) -> None:
    def around(original: Any, plane: ControlPlane, refused: Iterable[Partition], _: Any, at: Instant) -> None:
        original(plane, refused, (), at)

    wrap(monkeypatch, ControlPlane, "aside_refused", around)
    caught_by("epochs", "exception", shape=refusing)


def test_mutant_ignores_how_far_the_log_was_read(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ControlPlane, "reached", lambda *_: None)
    caught_by("liveness")


def test_mutant_ignores_moves_by_operators(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ControlPlane, "moved", lambda *_: None)
    caught_by("liveness", "removed", "order")


def test_mutant_retries_without_waiting(monkeypatch: Patch) -> None:
    def around(original: Any, holding: Holding, entry: Entry, again: Again, at: Instant) -> None:
        original(holding, entry, msgspec.structs.replace(again, at=min(again.at, at.now + 0.01)), at)

    wrap(monkeypatch, Holding, "failed", around)
    caught_by("early")


def test_mutant_leaves_the_letter_of_an_event_that_later_succeeded(monkeypatch: Patch) -> None:
    """A letter was stored but its progress was not. The next owner ran the event again, with success."""

    def around(original: Any, holding: Holding, entry: Entry, started: int) -> None:
        gone = list(holding.pending.gone)
        original(holding, entry, started)
        if entry.parked is None:
            holding.pending.gone = gone

    wrap(monkeypatch, Holding, "mark", around)
    caught_by("records", shape=flaky_letters)


def flaky_letters(profile: Profile) -> Profile:
    """A broker without transactions, members that die between its writes, events that fail once."""
    limits = msgspec.structs.replace(profile.limits, on_dead="pass", ordering="key", batch_size=1)
    fates = (0.5, 0.0, 1.0, 0.0, 0.0, 0.0)
    return msgspec.structs.replace(
        profile,
        shared=False,
        limits=limits,
        atomic=False,
        metadata=LIMIT_CHARS,
        latency_s=0.2,
        attempts=1,
        fates=fates,
        faults=60,
    )


def test_mutant_runs_events_before_the_record_of_their_predecessor_is_removed(monkeypatch: Patch) -> None:
    """The predecessor was done. If the owner had died then, its record would have run again, after the others."""
    wrap(monkeypatch, PendingRecords, "remove", lambda original, pending, id_, key: original(pending, id_, None))
    caught_by("suffix", "order", shape=rarely_settled)


def rarely_settled(profile: Profile) -> Profile:
    """Keys that park and come back all the time, slow settles, and members that leave between them."""
    limits = msgspec.structs.replace(
        profile.limits,
        ordering="key",
        on_dead="pass",
        batch_size=1,
        max_in_flight=8,
        settle_interval_s=0.3,
        park_after_s=1.0,
        concurrency=4,
    )
    load = msgspec.structs.replace(profile, keys=2, partitions=1, members=3, events=400, active_s=12.0, operations=0)
    return msgspec.structs.replace(
        load,
        shared=False,
        limits=limits,
        atomic=False,
        latency_s=0.3,
        faults=150,
        fates=(1.0, 0.0, 0.1, 0.0, 0.0, 0.0),
        attempts=4,
        delays_s=(0.0, 0.1),
    )


def test_mutant_truncates_the_codec_from_the_bottom(monkeypatch: Patch) -> None:
    """Events next to the watermark would run again although their successors would not."""
    original = codec._done

    def done(progress: Progress, room: int) -> tuple[str, int]:
        section, reached = original(progress, room)
        while progress.done_above and reached < progress.done_above[-1][1]:
            progress = msgspec.structs.replace(progress, done_above=progress.done_above[1:])
            section, reached = original(progress, room)
        return section, reached

    monkeypatch.setattr(codec, "_done", done)
    caught_by("suffix", "order", "repeats", shape=little_room)


def little_room(profile: Profile) -> Profile:
    """Many events are done above a slow one, and not all of them fit in the stored progress."""
    limits = msgspec.structs.replace(profile.limits, ordering="key", max_in_flight=64, max_gap=1_000, concurrency=8)
    fates = (1.0, 0.1, 0.0, 0.0, 0.0, 0.0)
    return msgspec.structs.replace(
        profile,
        shared=False,
        limits=limits,
        metadata=9,
        partitions=1,
        keys=8,
        holes=0.4,
        faults=40,
        fates=fates,
        operations=0,
    )


def test_mutant_forgets_to_store_a_retry_of_a_shared_partition(monkeypatch: Patch) -> None:
    def around(original: Any, holding: Holding, entry: Entry, *more: Any) -> None:
        if holding.aside.shared:
            holding.done(entry, more[2].now)
        else:
            original(holding, entry, *more)

    wrap(monkeypatch, Holding, "_park", around)
    caught_by("settled", shape=sharing)


def test_mutant_remembers_records_that_a_shared_partition_delivers_again(monkeypatch: Patch) -> None:
    def around(original: Any, aside: AsideIndex, parked: ParkedRecord) -> ParkedRecord | None:
        aside.shared = False
        return cast("ParkedRecord | None", original(aside, parked))

    wrap(monkeypatch, AsideIndex, "stored", around)
    caught_by("repeats", "records", shape=sharing)


def test_mutant_ignores_the_tries_of_an_event_that_is_delivered_again(monkeypatch: Patch) -> None:
    def around(original: Any, plane: ControlPlane, batch: list[Delivery], at: Instant) -> None:
        original(plane, [msgspec.structs.replace(delivery, tries=None) for delivery in batch], at)

    wrap(monkeypatch, ControlPlane, "delivered", around)
    caught_by("records", "liveness", shape=sharing)


def test_mutant_retries_in_place_in_a_shared_partition(monkeypatch: Patch) -> None:
    """The next member would not get the tries."""
    wrap(monkeypatch, Holding, "_in_place", lambda original, *args: args[0].aside.shared or original(*args))
    caught_by("records", shape=sharing)


def test_mutant_confuses_a_position_with_one_of_an_earlier_ownership(monkeypatch: Patch) -> None:
    ends: dict[tuple[ControlPlane, Partition], int] = {}

    def forget(original: Any, plane: ControlPlane, holding: Holding) -> None:
        ends[plane, holding.partition] = holding.events.tracker.end
        original(plane, holding)

    def assigned(original: Any, plane: ControlPlane, message: Assigned) -> None:
        original(plane, message)
        plane._holdings[message.partition].events.tracker.reached(ends.get((plane, message.partition), 0))

    wrap(monkeypatch, ControlPlane, "_forget", forget)
    wrap(monkeypatch, ControlPlane, "assigned", assigned)
    caught_by("liveness", shape=sharing)


# -- bugs that the simulator has found ---------------------------------------------------------------------------


def test_mutant_counts_delivered_events_as_done_at_the_end_of_the_log(monkeypatch: Patch) -> None:
    """The end was reached before the records were loaded, and events delivered before that counted as done."""

    def reach(holding: Holding, position: int, now: float) -> None:
        holding.events.tracker.reached(position)
        holding.pending.dirty = True

    monkeypatch.setattr(intake, "reach", reach)
    caught_by("settled", "loss", "order")


def test_mutant_applies_an_old_answer_to_a_new_ownership(monkeypatch: Patch) -> None:
    """A settle of an earlier ownership was answered late, as lost. The partition had been assigned again since."""

    def around(original: Any, plane: ControlPlane, lost: Iterable[Partition], at: Instant) -> None:
        original(plane, lost, at)
        plane.fenced(lost)

    wrap(monkeypatch, ControlPlane, "settled", around)
    caught_by("liveness", "bounds")


def test_mutant_forgets_a_suspect(monkeypatch: Patch) -> None:
    """A suspect was found while nothing else ran, and no later tick was requested for it."""

    def around(original: Any, dispatch: Dispatch, now: float) -> Any:
        found_just_now = dispatch._lone.entry is None and not dispatch.running and not dispatch.ready
        return [] if found_just_now else original(dispatch, now)

    wrap(monkeypatch, Dispatch, "_start_alone", around)
    caught_by("liveness")


def test_mutant_does_not_check_again_whether_ownership_is_certain(monkeypatch: Patch) -> None:
    wrap(monkeypatch, ControlPlane, "_wake_at", lambda original, plane, now, *, sure: original(plane, now, sure=True))
    caught_by("liveness")


def test_mutant_claims_less_than_was_stored(monkeypatch: Patch) -> None:
    """Events done before this ownership were skipped, and left out of the next progress."""
    monkeypatch.setattr(Tracker, "_skip", lambda *_: None)
    caught_by("suffix", "repeats")


def test_mutant_always_asks_to_be_ticked_at_once(monkeypatch: Patch) -> None:
    def around(original: Any, plane: ControlPlane, now: float, *, sure: bool) -> float | None:
        at: float | None = original(plane, now, sure=sure)
        return min(now, at or now) if plane.running else at

    wrap(monkeypatch, ControlPlane, "_wake_at", around)
    caught_by("spin")


def test_mutant_accepts_records_of_outdated_pages(monkeypatch: Patch) -> None:
    """A page was read before its records were done, and they ran again, after their successors."""

    def around(original: Any, aside: AsideIndex, *args: Any, **named: Any) -> Any:
        loaded, aside.loading.loaded = aside.loading.loaded, False
        parked = original(aside, *args, **named)
        aside.loading.loaded = loaded
        return parked

    wrap(monkeypatch, AsideIndex, "learn", around)
    caught_by("suffix", "repeats", "liveness", "order")


class Uncounted(dict[int, Entry]):
    def __len__(self) -> int:
        return 0


def test_mutant_does_not_count_letters_that_are_being_stored(monkeypatch: Patch) -> None:
    """While the store was down, every retry let more events in."""

    def around(original: Any, holding: Holding, now: float) -> Any:
        posted = original(holding, now)
        holding.events.tracker.leaving = Uncounted(holding.events.tracker.leaving)
        return posted

    wrap(monkeypatch, settling_module, "_post", around)
    caught_by("bounds", "hysteresis")


def test_mutant_runs_a_removed_record(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Entry, "removed", property(lambda _: False))

    def around(original: Any, holding: Holding, position: int, to: State | None, *times: float) -> None:
        parked = holding.aside.parking.records.get(position)
        if to is not None or parked is None or not parked.drawn:
            original(holding, position, to, *times)

    wrap(monkeypatch, intake, "move", around)
    caught_by("removed")


def test_mutant_starts_events_before_the_end_of_a_lone_run_is_recorded(monkeypatch: Patch) -> None:
    """A harmless event ended its lone run. Before that was recorded, another event killed the process, and the harmless
    one was charged."""

    def around(original: Any, dispatch: Dispatch, at: Instant) -> Any:
        dispatch._lone.ended = None
        return original(dispatch, at)

    wrap(monkeypatch, Dispatch, "start", around)
    caught_by("blame", shape=deadly)
