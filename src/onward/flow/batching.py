"""Calls of a batch handler: several events of one partition at once."""

from heapq import heappop

from onward.event import Delivery
from onward.flow.entry import QUEUED, RUNNING, BatchCall, Entry
from onward.flow.holding import Holding
from onward.flow.limits import Limits


def batch_of(holding: Holding, first: Entry, size: int) -> tuple[Delivery, ...]:
    """One call of a batch handler: events of one partition, those of each key in order."""
    events, ready = holding.events, holding.events.lanes.ready
    limit = first.batch_limit or size
    entries = [first, *_followers(holding, first, limit - 1)]
    while len(entries) < limit and ready:
        entry = events.find(ready[0])
        assert entry is not None, "an event is ready but not open"
        limit = min(limit, entry.batch_limit or limit)
        if _by_itself(entry) or len(entries) >= limit:
            break
        heappop(ready)
        entries.append(entry)
        entries.extend(_followers(holding, entry, limit - len(entries)))
    call = BatchCall(len(entries), len(entries))
    for entry in entries:
        entry.call, entry.stage = call, RUNNING
    events.running += len(entries)
    events.fill_since = None
    return tuple(entry.delivery for entry in sorted(entries, key=lambda each: each.delivery.position))


def _followers(holding: Holding, entry: Entry, count: int) -> list[Entry]:
    followers: list[Entry] = []
    for follower in holding.events.lanes.followers(entry, count):
        if _by_itself(follower) or 0 < follower.batch_limit <= len(followers) + 1:
            break
        followers.append(follower)
    return followers


def waits_to_fill(holding: Holding, limits: Limits, now: float) -> bool:
    events = holding.events
    waiting = len(events.tracker) + len(events.drawn) - events.running - events.delayed
    if waiting >= limits.batch_size:
        return False
    if events.fill_since is None:
        events.fill_since = now
    return now < events.fill_since + limits.batch_wait_s


def _by_itself(entry: Entry) -> bool:
    """Whether the event cannot join the batch of another: it may have to run alone, was removed, or is not queued."""
    return entry.cautious or entry.suspect or entry.removed or entry.stage is not QUEUED
