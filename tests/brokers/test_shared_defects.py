"""The reference broker with deliberate defects, one per test. A scenario of the suite must notice each of them.

A defect replaces one method of a class of the broker. It is called with the original method and its arguments.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from onward.brokers.base import BrokerLag, Fenced, Filter, Moved, Progress, State, Tries
from onward.event import Event
from onward.testing import SharedScenarios
from onward.testing import scenario as suite
from tests.brokers.shared_harness import ReferenceHarness, scheme, served, stored
from tests.brokers.shared_reference import Channel, Item, ReferenceBroker, ReferenceSubscription, Store

pytestmark = [pytest.mark.slow, pytest.mark.more]  # the results change only if the scenarios change

__all__ = ["scheme"]

# How long a scenario waits for a message that a defect suppresses. It must be longer than the scenario takes on a
# correct broker.
LOST_S = 2.0
LOST_LATE_S = 5.0  # for scenarios that wait for a second retry, or for the end of max_poll_gap_s


class Defect(NamedTuple):
    scenario: str
    broken: type[Store | ReferenceSubscription | ReferenceBroker]
    method: str
    call: Callable[..., Any]
    limit_s: float | None  # the scenario must fail by this time limit; None: by an assertion

    def subclass(self) -> type[Any]:
        original, call = getattr(self.broken, self.method), self.call

        def method(self: Any, *args: Any, **keywords: Any) -> Any:
            return call(functools.partial(original, self), self, *args, **keywords)

        return type(call.__name__, (self.broken,), {self.method: method})

    def broker(self) -> Any:
        """A context manager that yields a URL of the broken broker."""
        kind = self.subclass()
        if self.broken is Store:
            return served(kind()) if "killed" in self.scenario else stored(kind())
        if self.broken is ReferenceSubscription:
            kind = type(kind.__name__, (ReferenceBroker,), {"subscription": kind})
        return stored(Store(), kind)


DEFECTS: list[Defect] = []


def defect(scenario: str, broken: type[Any], method: str, limit_s: float | None = None) -> Callable[..., Any]:
    def note(call: Callable[..., Any]) -> Callable[..., Any]:
        DEFECTS.append(Defect(f"test_{scenario}", broken, method, call, limit_s))
        return call

    return note


# -- ownership and delivery -------------------------------------------------------------------------------------------

HOLDS = "every_member_holds_a_shared_partition_at_once"


@defect(HOLDS, ReferenceSubscription, "assign")
def assigns_an_owner(original: Any, subscription: Any) -> Any:
    return msgspec.structs.replace(original(), shared=False)


@defect(HOLDS, ReferenceSubscription, "assign")
def assigns_a_fence(original: Any, subscription: Any) -> Any:
    return msgspec.structs.replace(original(), fence=1)


@defect(HOLDS, ReferenceSubscription, "assign")
def assigns_progress(original: Any, subscription: Any) -> Any:
    return msgspec.structs.replace(original(), stored=Progress(subscription.partition, 1, 0))


@defect(HOLDS, ReferenceSubscription, "collect", LOST_S)
def assigns_one_member_only(original: Any, subscription: Any, *limits: int) -> Any:
    return original(*limits) if subscription.own or not subscription.store.channels else []


@defect(HOLDS, Store, "open")
def takes_it_from_the_others(original: Any, store: Store, *place: Any) -> Any:
    for log_id in list(store.channels):
        store.close(log_id)
    return original(*place)


@defect("each_event_goes_to_one_member", Store, "give")
def gives_each_event_twice(original: Any, store: Store, channel: Channel, *limits: int) -> Iterator[tuple[int, Item]]:
    for position, item in original(channel, *limits):
        if item.tries is None:
            store.queues[channel.topic, channel.group].append(Item(item.event, Tries()))
        yield position, item


@defect("every_member_gets_a_share", Store, "give")
def gives_all_to_the_first(original: Any, store: Store, channel: Channel, *limits: int) -> Any:
    return original(channel, *limits) if channel is next(iter(store.channels.values())) else ()


NAMES = "a_delivery_carries_its_epoch_and_its_log_id_and_no_tries"


@defect(NAMES, ReferenceSubscription, "delivery")
def delivers_with_a_fence(original: Any, subscription: Any, *of: Any) -> Any:
    return msgspec.structs.replace(original(*of), fence=1)


@defect(NAMES, ReferenceSubscription, "delivery")
def delivers_without_a_log(original: Any, subscription: Any, *of: Any) -> Any:
    return msgspec.structs.replace(original(*of), log_id="")


@defect(NAMES, ReferenceSubscription, "delivery")
def delivers_as_if_it_was_tried(original: Any, subscription: Any, *of: Any) -> Any:
    return msgspec.structs.replace(original(*of), tries=Tries(started=1))


@defect(NAMES, ReferenceSubscription, "delivery")
def delivers_in_descending_positions(original: Any, subscription: Any, *of: Any) -> Any:
    delivery = original(*of)
    return msgspec.structs.replace(delivery, position=-delivery.position)


CLOSED = "unsettled_events_of_a_closed_member_go_to_another"


@defect(CLOSED, Store, "close", LOST_S)
def forgets_what_was_open(original: Any, store: Store, log_id: str) -> None:
    store.channels.pop(log_id, None)


@defect(CLOSED, Store, "give")
def gives_what_another_holds(original: Any, store: Store, channel: Channel, *limits: int) -> Any:
    for other in store.channels.values():
        if other is not channel:
            store.queues[channel.topic, channel.group].extend(other.open.values())
    return original(channel, *limits)


@defect(CLOSED, ReferenceSubscription, "assign")
def assigns_unclean(original: Any, subscription: Any) -> Any:
    return msgspec.structs.replace(original(), unclean=len(subscription.store.channels) == 2)


STOPPED = "unsettled_events_of_a_member_that_stopped_receiving_go_to_another"


@defect(STOPPED, Store, "_expire", LOST_LATE_S)
def waits_for_ever_for_one_that_stopped(original: Any, store: Store) -> None:
    pass


@defect(STOPPED, ReferenceSubscription, "sure_until")
def is_always_sure(original: Any, subscription: Any) -> float:
    return float("inf")


# -- settling ---------------------------------------------------------------------------------------------------------


@defect("settled_events_of_a_shared_partition_are_not_delivered_again", Store, "settle")
def settles_nothing(original: Any, store: Store, *of: Any) -> bool:
    return True


FRESH = "only_the_fresh_positions_of_a_settle_count"


def _counted(progress: Sequence[Progress], also: Callable[[Progress], Iterable[int]]) -> list[Progress]:
    return [msgspec.structs.replace(each, fresh=[*each.fresh, *also(each)]) for each in progress]


@defect(FRESH, Store, "settle", LOST_S)
def counts_the_watermark(original: Any, store: Store, log_id: str, progress: Any, aside: Any) -> Any:
    return original(log_id, _counted(progress, lambda each: range(min(each.watermark, 100))), aside)


@defect(FRESH, Store, "settle", LOST_S)
def counts_what_is_done_above(original: Any, store: Store, log_id: str, progress: Any, aside: Any) -> Any:
    done = _counted(progress, lambda each: (at for span in each.done_above for at in range(*span)))
    return original(log_id, done, aside)


@defect(FRESH, Store, "settle")
def reopens_above_a_lower_watermark(original: Any, store: Store, log_id: str, progress: Any, aside: Any) -> Any:
    channel = store.channels[log_id]
    given = channel.open.copy()
    done = original(log_id, progress, aside)
    channel.open = given if not progress[0].watermark else channel.open
    return done


@defect("two_groups_each_get_every_event", Store, "publish", LOST_S)
def publishes_for_one_group(original: Any, store: Store, events: Sequence[Event]) -> None:
    next(iter(store.queues.values())).extend(map(Item, events))


EPOCH = "a_settle_of_an_old_epoch_has_no_effect"


@defect(EPOCH, ReferenceSubscription, "settle")
def settles_in_any_epoch(original: Any, subscription: Any, progress: Sequence[Progress], **records: Any) -> Any:
    epoch = subscription.own.epoch if subscription.own else 0
    return original([msgspec.structs.replace(each, epoch=epoch) for each in progress], **records)


@defect(EPOCH, ReferenceSubscription, "settle")
async def reports_no_loss(original: Any, subscription: Any, *of: Any, **records: Any) -> Any:
    await original(*of, **records)
    return []


@defect(EPOCH, ReferenceSubscription, "settle")
async def stores_records_of_an_old_epoch(original: Any, subscription: Any, progress: Any, *, aside: Any = ()) -> Any:
    for record in aside:
        subscription.store.set_aside(record)
    return await original(progress, aside=aside)


@defect(EPOCH, Store, "settle")
def settles_although_others_have_it(original: Any, store: Store, *of: Any) -> bool:
    original(*of)
    return True


@defect(EPOCH, ReferenceSubscription, "collect")
def reports_a_reconnect_too_late(original: Any, subscription: Any, *limits: int) -> Any:
    messages = original(*limits)
    return [] if messages and isinstance(messages[0], Fenced) else messages


@defect("epochs_grow_with_every_ownership", ReferenceSubscription, "assign")
def begins_its_epochs_again(original: Any, subscription: Any) -> Any:
    return msgspec.structs.replace(original(), epoch=1)


# -- pause, release, groups -------------------------------------------------------------------------------------------

PAUSE = "a_paused_member_leaves_the_events_to_the_others"


@defect(PAUSE, ReferenceSubscription, "pause", LOST_S)
async def ignores_a_pause(original: Any, subscription: Any, partitions: Any) -> None:
    pass


@defect(PAUSE, ReferenceSubscription, "collect", LOST_S)
def hoards_while_paused(original: Any, subscription: Any, limit: int, max_bytes: int) -> Any:
    if subscription.paused:
        subscription.store.take(subscription.own.log_id, limit, max_bytes)
    return original(limit, max_bytes)


@defect(PAUSE, ReferenceSubscription, "pause", LOST_S)
async def gives_up_in_a_pause(original: Any, subscription: Any, partitions: Any) -> None:
    await original(partitions)
    subscription.store.close(subscription.own.log_id)


@defect(PAUSE, ReferenceSubscription, "resume", LOST_S)
async def ignores_a_resume(original: Any, subscription: Any, partitions: Any) -> None:
    pass


RELEASE = "unsettled_events_of_a_released_partition_go_to_another_member"


@defect(RELEASE, ReferenceSubscription, "release", LOST_S)
async def gives_nothing_back(original: Any, subscription: Any, partitions: Any, *, drained: bool) -> None:
    pass


@defect(RELEASE, ReferenceSubscription, "release")
async def joins_again_after_a_release(original: Any, subscription: Any, partitions: Any, *, drained: bool) -> None:
    await original(partitions, drained=drained)
    subscription._left = False


@defect(RELEASE, ReferenceSubscription, "settle")
async def settles_what_it_released(original: Any, subscription: Any, *of: Any) -> Any:
    return await original(*of) if subscription.own else []


@defect("key_ordering_uses_owned_partitions_or_is_refused", ReferenceBroker, "check")
def shares_with_key_order(original: Any, broker: Any, ordering: str) -> None:
    pass


DROP = "dropping_a_group_removes_its_events_and_records"


@defect(DROP, Store, "drop")
def drops_no_records(original: Any, store: Store, topic: str, group: str) -> None:
    store.queues.pop((topic, group), None)


@defect(DROP, Store, "drop")
def drops_no_events(original: Any, store: Store, topic: str, group: str) -> None:
    events = store.queues[topic, group]
    original(topic, group)
    asyncio.get_running_loop().call_later(0.01, lambda: store.queues[topic, group].extend(events))


@defect(DROP, Store, "members")
def lists_no_members(original: Any, store: Store) -> Any:
    return []


@defect(DROP, ReferenceBroker, "drop_group")
async def drops_a_group_with_members(original: Any, broker: Any, topic: str, group: str) -> None:
    broker._store.drop(topic, group)


# -- receiving --------------------------------------------------------------------------------------------------------

LIMIT = "receive_of_a_shared_partition_returns_at_most_limit_deliveries"


@defect(LIMIT, ReferenceSubscription, "collect")
def ignores_the_limit(original: Any, subscription: Any, limit: int, max_bytes: int) -> Any:
    return original(100 if limit else 0, max_bytes)


@defect(LIMIT, ReferenceSubscription, "collect")
def gives_one_at_least(original: Any, subscription: Any, limit: int, max_bytes: int) -> Any:
    return original(max(1, limit), max_bytes)


@defect(LIMIT, ReferenceSubscription, "collect", LOST_S)
def reports_nothing_without_room(original: Any, subscription: Any, limit: int, max_bytes: int) -> Any:
    return original(limit, max_bytes) if limit else []


BYTES = "receive_of_a_shared_partition_returns_at_most_max_bytes_but_at_least_one_event"


@defect(BYTES, ReferenceSubscription, "collect")
def ignores_the_bytes(original: Any, subscription: Any, limit: int, max_bytes: int) -> Any:
    return original(limit, 1 << 30)


@defect(BYTES, Store, "give", LOST_S)
def never_gives_a_large_one(original: Any, store: Store, channel: Channel, limit: int, max_bytes: int) -> Any:
    queue = store.queues[channel.topic, channel.group]
    return () if queue and queue[0].event.size > max_bytes else original(channel, limit, max_bytes)


WAKE = "a_waiting_receive_ends_on_an_event_a_retry_or_close"


@defect(WAKE, ReferenceSubscription, "receive", LOST_S)
async def sleeps_for_the_whole_wait(original: Any, subscription: Any, limit: int, max_bytes: int, wait_s: float) -> Any:
    await asyncio.sleep(wait_s)
    return await original(limit, max_bytes, 0.0)


@defect(WAKE, ReferenceSubscription, "close", LOST_S)
async def leaves_a_receive_blocked(original: Any, subscription: Any) -> None:
    subscription._left = True


@defect("a_cancelled_receive_of_a_shared_partition_loses_nothing", ReferenceSubscription, "receive", LOST_S)
async def hands_over_late(original: Any, subscription: Any, *of: Any) -> Any:
    messages = await original(*of)
    await asyncio.sleep(0.01)
    return messages


LAG = "lag_of_a_shared_partition_is_correct_or_unknown"


@defect(LAG, Store, "depth", LOST_S)
def counts_wrongly(original: Any, store: Store, *place: str) -> Any:
    return original(*place) + 1


@defect(LAG, ReferenceSubscription, "lag")
async def reports_no_lag(original: Any, subscription: Any) -> dict[Any, BrokerLag]:
    return {}


# -- records ----------------------------------------------------------------------------------------------------------

RETRY = "a_retry_is_delivered_with_its_tries_when_it_is_due"


@defect(RETRY, Store, "ripen")
def retries_before_it_is_due(original: Any, store: Store, wall: float) -> None:
    original(wall + 60.0)


@defect(RETRY, Store, "set_aside")
def forgets_the_tries(original: Any, store: Store, record: Any) -> None:
    original(msgspec.structs.replace(record, tries=Tries()))


@defect(RETRY, Store, "set_aside")
def forgets_the_headers(original: Any, store: Store, record: Any) -> None:
    original(msgspec.structs.replace(record, event=msgspec.structs.replace(record.event, headers={})))


@defect(RETRY, Store, "set_aside", LOST_S)
def forgets_a_retry(original: Any, store: Store, record: Any) -> None:
    pass


@defect("a_retry_goes_to_any_member", Store, "close", LOST_LATE_S)
def forgets_the_retries_of_a_closed_member(original: Any, store: Store, log_id: str) -> None:
    original(log_id)
    store.records = {id_: record for id_, record in store.records.items() if log_id not in id_}


AGAIN = "a_retry_that_fails_again_is_delivered_again_until_it_is_settled"


@defect(AGAIN, Store, "ripen")
def leaves_the_record_of_a_retry(original: Any, store: Store, wall: float) -> None:
    due = [each for each in store.records.values() if each.state is State.WAITING and (each.due or 0.0) <= wall]
    original(wall)
    store.records |= {each.id: msgspec.structs.replace(each, due=wall + 60.0) for each in due}


@defect(AGAIN, Store, "set_aside")
def counts_one_failure_only(original: Any, store: Store, record: Any) -> None:
    original(msgspec.structs.replace(record, tries=Tries(failed=1)))


@defect("a_retry_that_is_stored_twice_is_delivered_once", Store, "settle")
def stores_a_retry_each_time(original: Any, store: Store, log_id: str, progress: Any, aside: Any) -> Any:
    for record in aside:
        store.set_aside(msgspec.structs.replace(record, id=f"{record.id}-{time.monotonic_ns()}"))
    return original(log_id, progress, ())


@defect("a_retry_waits_no_longer_than_wait_s_whatever_the_clocks_say", Store, "set_aside", LOST_S)
def trusts_the_clock(original: Any, store: Store, record: Any) -> None:
    original(msgspec.structs.replace(record, wait_s=None))


BROWSED = "dead_letters_of_a_shared_partition_are_browsed_and_removed"


@defect(BROWSED, Store, "set_aside")
def runs_the_dead(original: Any, store: Store, record: Any) -> None:
    original(msgspec.structs.replace(record, state=State.WAITING))


@defect(BROWSED, Store, "found")
def finds_no_letters(original: Any, store: Store, *of: Any) -> Any:
    return []


@defect(BROWSED, Store, "found")
def finds_letters_whatever_is_asked(original: Any, store: Store, group: str, where: Filter) -> Any:
    return original(group, Filter())


@defect(BROWSED, Store, "remove")
def removes_in_any_state(original: Any, store: Store, ids: Any, expect: State) -> Any:
    return original(ids, State.DEAD)


@defect(BROWSED, ReferenceSubscription, "collect")
def reports_what_was_removed(original: Any, subscription: Any, *limits: int) -> Any:
    messages = original(*limits)
    if subscription.own and len(subscription.store.records) == 2:
        messages.append(Moved(subscription.partition, subscription.own.epoch, ["x:x:0:1"], None, None))
    return messages


REPLAY = "a_replayed_dead_letter_is_delivered_with_its_tries_reset"


def _moved(store: Store, ids: Sequence[str], **fields: Any) -> None:
    store.records |= {id_: msgspec.structs.replace(store.records[id_], **fields) for id_ in ids}


@defect(REPLAY, Store, "move")
def replays_with_the_old_tries(original: Any, store: Store, ids: Any, *of: Any) -> Any:
    tries, moved = store.records[ids[0]].tries, original(ids, *of)
    _moved(store, ids, tries=tries)
    return moved


@defect(REPLAY, Store, "move")
def replays_at_once(original: Any, store: Store, ids: Any, expect: State, to: State, due: Any) -> Any:
    return original(ids, expect, to, 0.0)


@defect(REPLAY, Store, "move")
def moves_in_any_state(original: Any, store: Store, ids: Any, expect: State, *of: Any) -> Any:
    return original(ids, State.DEAD, *of)


@defect(REPLAY, Store, "move")
def moves_nothing(original: Any, store: Store, ids: Any, expect: State, *of: Any) -> Any:
    return len(store._expected(ids, expect))


NEXT = "a_replay_without_members_waits_for_the_next_member"


@defect(NEXT, Store, "move")
def moves_only_what_a_member_holds(original: Any, store: Store, *of: Any) -> Any:
    return original(*of) if store.channels else 0


@defect(NEXT, Store, "ripen")
def leaves_the_letter_of_a_replay(original: Any, store: Store, wall: float) -> None:
    leave = [each for each in store.records.values() if each.state is State.WAITING]
    original(wall)
    store.records |= {f"{each.id}-old": msgspec.structs.replace(each, id=f"{each.id}-old", due=9e9) for each in leave}


OTHERS = "other_groups_get_nothing_of_a_retry_or_a_replay"


@defect(OTHERS, Store, "ripen")
def retries_for_every_group(original: Any, store: Store, wall: float) -> None:
    due = [each for each in store.records.values() if (each.due or 9e9) <= wall]
    original(wall)
    for record in due:
        for (topic, group), queue in store.queues.items():
            if topic == record.partition.topic and group != record.group:
                queue.append(Item(record.event))


@defect(OTHERS, Store, "found")
def finds_letters_of_every_group(original: Any, store: Store, group: str, where: Filter) -> Any:
    return list(store.records.values())


# -- processes --------------------------------------------------------------------------------------------------------


@defect("unsettled_events_of_a_killed_member_go_to_another", Store, "_expire", 8.0)
def waits_for_the_killed(original: Any, store: Store) -> None:
    pass


@defect("killed_members_of_a_shared_partition_lose_nothing", Store, "close", 12.0)
def forgets_what_the_killed_had(original: Any, store: Store, log_id: str) -> None:
    store.channels.pop(log_id, None)


@pytest.mark.parametrize("broken", DEFECTS, ids=lambda broken: broken.call.__name__)
def test_a_scenario_notices_the_defect(broken: Defect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: tuple[type[BaseException], ...] = (AssertionError, pytest.fail.Exception)
    if broken.limit_s is not None:
        expected = (TimeoutError,)
        monkeypatch.setattr(suite, "SCENARIO_LIMIT_S", broken.limit_s)
    with broken.broker() as url:
        harness = ReferenceHarness(url, tmp_path, in_process="killed" not in broken.scenario)
        with pytest.raises(expected):
            getattr(SharedScenarios(), broken.scenario)(harness)


def test_every_scenario_can_fail() -> None:
    assert {broken.scenario for broken in DEFECTS} == {
        name for name in dir(SharedScenarios) if name.startswith("test_")
    }
