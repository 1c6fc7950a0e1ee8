"""Adds to a partition: deliveries, records read from the store, and records that operators moved or removed. Pure."""

from collections.abc import Sequence

from onward.brokers.base import AsideRecord, State
from onward.event import Delivery
from onward.flow.entry import Entry, Instant, ParkedRecord
from onward.flow.holding import Holding
from onward.flow.open_events import BeforeLoad

_NO_LIMIT = 1 << 62


def take(holding: Holding, batch: Sequence[Delivery], start: int) -> tuple[int, int, int]:
    """Add the deliveries from `start` on, up to the first one of another ownership.

    Returns the index of that one, how many were already done, and how many have a type that the handler filters out.
    """
    if not holding.aside.loading.loaded:
        return _take_early(holding, batch, start), 0, 0
    partition, epoch = batch[start].partition, holding.epoch
    entries: list[Entry] = []
    size_bytes, stop, end = 0, start, len(batch)
    while stop < end:
        delivery = batch[stop]
        if delivery.partition is not partition or delivery.epoch != epoch:
            break
        stop += 1
        size = delivery.event.size
        size_bytes += size
        entries.append(Entry(delivery, size))
    taken, filtered = _admit(holding, entries)
    if len(taken) < len(entries):
        holding.pending.dirty = True
        size_bytes = sum(entry.size for entry in taken)
    holding.events.bytes += size_bytes
    blame = holding.blame
    if blame.unclean or blame.tries or holding.aside.shared:
        for entry in taken:
            blame.arrived(entry, holding.events.tracker.watermark)
    _line_up(holding, taken)
    return stop, len(entries) - len(taken) - filtered, filtered


def _take_early(holding: Holding, batch: Sequence[Delivery], start: int) -> int:
    """Queue deliveries until the records of the aside are loaded."""
    events = holding.events
    for stop in range(start, len(batch)):
        delivery = batch[stop]
        if delivery.partition != holding.partition or delivery.epoch != holding.epoch:
            return stop
        events.before_load.backlog.append(delivery)
        events.bytes += delivery.event.size
    return len(batch)


def _admit(holding: Holding, entries: Sequence[Entry]) -> tuple[Sequence[Entry], int]:
    """The entries that should run, and how many of the others are done because the handler filters out their type."""
    tracker, records, wants = holding.events.tracker, holding.aside.parking.records, holding.limits.wants
    if not records and wants is None:
        return tracker.add_all(entries), 0
    taken: list[Entry] = []
    filtered = 0
    for entry in entries:
        position = entry.delivery.position
        if position in records:
            tracker.pass_over(position)  # the aside has a record of this event, so it is done in the log
        elif wants is not None and not wants(entry.delivery.event.type):
            filtered += tracker.pass_over(position)
        elif tracker.add(position, entry):
            taken.append(entry)
    return taken, filtered


def _line_up(holding: Holding, entries: Sequence[Entry]) -> None:
    """Queue events in their lanes, or in the aside behind records that they must not overtake."""
    count = 0
    if not holding.aside.parking.records and not holding.pending.gone:
        count = holding.events.lanes.add_all(entries, holding.limits.share)
    if count < len(entries):
        for entry in entries[count:]:
            _line_up_behind(holding, entry)


def _line_up_behind(holding: Holding, entry: Entry) -> None:
    """Queue an event in its lane, or in the aside behind the records of its key.

    A key stays parked until the store has removed its last record. If a later event of the key were settled before, and
    this process died, the record would run again after that event.
    """
    parking, key, limits = holding.aside.parking, holding.key(entry), holding.limits
    head = parking.head(key)
    behind = (head is not None and head.position < entry.delivery.position) or (
        key is not None and key in holding.pending.going
    )
    share = limits.share if len(parking) < limits.max_parked else _NO_LIMIT
    if behind or not holding.events.lanes.add(entry, share):
        holding.set_aside(entry, State.HELD)


def reach(holding: Holding, position: int, now: float) -> None:
    """The log was read up to this position. Lower positions that were not delivered are holes."""
    events = holding.events
    if not holding.aside.loading.loaded:  # lower deliveries are still in the backlog
        events.before_load.reached = max(events.before_load.reached, position)
    elif position > events.tracker.end:
        events.tracker.reached(position)
        holding.pending.dirty = True
        read_past(holding, now)


def read_past(holding: Holding, now: float) -> None:
    """The log was read further: records below its end may get their turn."""
    for parked in holding.aside.passed(holding.events.tracker.end):
        holding.turn(parked, now)


def load(holding: Holding, records: Sequence[AsideRecord], at: Instant) -> tuple[int, int]:
    """Add a page of records. Of the deliveries that waited for it, returns how many were already done, and how many
    have a type that the handler filters out."""
    loading = holding.aside.loading
    known = loading.loaded
    for record in records:
        _learn(holding, record, at)
    for parked in holding.aside.page_read(records[-1].position if records else None):
        holding.turn(parked, at.now)
    return (0, 0) if known or not loading.loaded else _open_gate(holding, at.now)


def _learn(holding: Holding, record: AsideRecord, at: Instant) -> None:
    aside, blame, position = holding.aside, holding.blame, record.position
    is_open = position in holding.events.tracker.open
    parked = aside.learn(record, at, tries=blame.charged(record.tries), cautious=blame.unclean, is_open=is_open)
    if parked is not None:
        _insert(holding, parked, at)
    elif is_open and position in aside.loading.wanted and position not in holding.pending.leaving:
        holding.pending.doubled.add(position)


def _insert(holding: Holding, parked: ParkedRecord, at: Instant) -> None:
    """A record came back into the flow. Newer events of its key that wait in memory go into the aside behind it."""
    if parked.key is None:
        holding.turn(parked, at.now)
        return
    for entry in holding.events.lanes.withdraw(parked.key, parked.position):
        holding.withdraw(entry, at)
    holding.advance(parked.key, at.now)  # the lane may be empty now; the next record may be an older one


def _open_gate(holding: Holding, now: float) -> tuple[int, int]:
    """All records are loaded: add what arrived meanwhile, and let the records have their turns."""
    events = holding.events
    early, events.before_load = events.before_load, BeforeLoad()
    events.bytes = 0
    start = done = filtered = 0
    while start < len(early.backlog):
        start, skipped, unwanted = take(holding, early.backlog, start)
        done += skipped
        filtered += unwanted
    reach(holding, early.reached, now)
    for position, to, due in early.moved:
        move(holding, position, to, due, now)
    for parked in holding.aside.heads():
        holding.turn(parked, now)
    return done, filtered


def move(holding: Holding, position: int, to: State | None, due: float, now: float) -> None:
    """An operator moved or removed a record."""
    aside = holding.aside
    if aside.shared:
        return  # the store delivers its records itself
    if not aside.loading.loaded:
        holding.events.before_load.moved.append((position, to, due))
        return
    if holding.pending.is_removing(position):  # the move does not matter: the next settle removes the record
        aside.loading.forget(position)
        return
    parked = aside.move(position, to, due)
    if parked is None:
        return
    if to is None:
        holding.remove(parked, now)
    else:
        holding.turn(parked, now)
