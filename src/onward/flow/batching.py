"""Calls of a batch handler: several events of one partition at once."""

from heapq import heappop

from onward.event import Delivery
from onward.flow.entry import Entry, Stage, Unit
from onward.flow.holding import Holding
from onward.flow.limits import Limits


def batch_of(holding: Holding, first: Entry, size: int) -> tuple[Delivery, ...]:
    """One call of a batch handler: events of one partition, each key's in order."""
    limit = first.batch_limit or size
    entries = [first, *_followers(holding, first, limit - 1)]
    while len(entries) < limit and holding.lanes.ready:
        entry = holding.find(holding.lanes.ready[0])
        assert entry is not None, "something was ready that is not open"
        limit = min(limit, entry.batch_limit or limit)
        if _by_itself(entry) or len(entries) >= limit:
            break
        heappop(holding.lanes.ready)
        entries.append(entry)
        entries.extend(_followers(holding, entry, limit - len(entries)))
    unit = Unit(len(entries), len(entries))
    for entry in entries:
        entry.unit, entry.stage = unit, Stage.RUNNING
    holding.running += len(entries) - 1
    holding.fill_since = None
    return tuple(entry.delivery for entry in sorted(entries, key=lambda each: each.delivery.position))


def _followers(holding: Holding, entry: Entry, count: int) -> list[Entry]:
    followers: list[Entry] = []
    for follower in holding.lanes.followers(entry, count):
        if _by_itself(follower) or 0 < follower.batch_limit <= len(followers) + 1:
            break
        followers.append(follower)
    return followers


def waits_to_fill(holding: Holding, limits: Limits, now: float) -> bool:
    waiting = len(holding.tracker) + len(holding.drawn) - holding.running - holding.delayed
    if waiting >= limits.batch_size:
        return False
    if holding.fill_since is None:
        holding.fill_since = now
    return now < holding.fill_since + limits.batch_wait_s


def _by_itself(entry: Entry) -> bool:
    """Not to be taken into another's batch: it has to be looked at first, or waits for its time."""
    return entry.cautious or entry.suspect or entry.removed or entry.stage is not Stage.QUEUED
