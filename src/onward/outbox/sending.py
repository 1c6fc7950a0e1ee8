"""Publishing the rows of a batch: which calls to make, and what an error means for each row."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from onward.brokers.base import Relay as RelayTag
from onward.error_report import message_of, name_of, storable
from onward.errors import BadName, OnwardError, PayloadError, PublishError, RelayFenced
from onward.event import Event
from onward.outbox.base import Lane, OutboxRow
from onward.settings import check_name

log = logging.getLogger("onward")

_MOST_CHARS = 2_000  # of a reason


class Publish(Protocol):
    """Broker.publish."""

    async def __call__(self, events: Sequence[Event], *, relay: RelayTag | None = None) -> None: ...


class RowFailure(NamedTuple):
    """A row that was not published. `refused`: it would never be accepted as it is."""

    row: OutboxRow
    why: str
    refused: bool = False


class SendResult(NamedTuple):
    """What a round of calls has left. A row that is in no list is published."""

    failed: Sequence[RowFailure]
    fenced: Mapping[int, int]  # by shard: the higher fence that the broker has seen. Their rows are in no other list


class Route(NamedTuple):
    """How the broker is called. `tags`: by shard, the relay's tag for publish; empty if the broker does not check it.
    `by_topic`: a call for each topic, so that one topic's trouble does not affect the others."""

    publish: Publish
    tags: Mapping[int, RelayTag]
    by_topic: bool = False


async def send(rows: Sequence[OutboxRow], route: Route) -> SendResult:
    """Publish the rows once, in their order. A row behind a failed one of its key is not published, and is in `failed`
    too."""
    sound, faulty = _sorted_out(rows)
    calls = _calls(sound, route)
    results = await asyncio.gather(*[_publish(call, route) for call in calls])
    fenced = {shard: seen for result in results for shard, seen in result.fenced.items()}
    failed = [*faulty, *(failure for result in results for failure in result.failed)]
    return SendResult([each for each in failed if each.row.shard not in fenced], fenced)


def _sorted_out(rows: Sequence[OutboxRow]) -> tuple[list[OutboxRow], list[RowFailure]]:
    """The rows that can be published, and the others: those with a fault, and those behind one in their lane."""
    sound: list[OutboxRow] = []
    faulty: list[RowFailure] = []
    stopped: set[Lane] = set()
    for row in rows:
        fault = row.fault or _name_fault(row.event.topic)
        if row.lane in stopped:
            faulty.append(RowFailure(row, BEHIND))
        elif fault:
            faulty.append(RowFailure(row, fault[:_MOST_CHARS], refused=True))
            stopped.update([row.lane] if row.lane else [])
        else:
            sound.append(row)
    return sound, faulty


BEHIND = "an earlier event of its key was not accepted"


def _name_fault(topic: str) -> str:
    try:
        check_name("topic", topic)
    except BadName as error:
        return reason(error)
    return ""


def _calls(rows: Iterable[OutboxRow], route: Route) -> list[list[OutboxRow]]:
    """The rows of each call: a call has one tag, and with `by_topic` one topic. Lanes never span two calls."""
    calls: dict[tuple[int, str], list[OutboxRow]] = {}
    for row in rows:
        place = (row.shard if route.tags else 0, row.event.topic if route.by_topic else "")
        calls.setdefault(place, []).append(row)
    return list(calls.values())


async def _publish(rows: Sequence[OutboxRow], route: Route) -> SendResult:
    shard = rows[0].shard
    try:
        await route.publish([row.event for row in rows], relay=route.tags.get(shard))
    except RelayFenced as error:
        return SendResult((), {shard: error.seen})
    except PublishError as error:
        failed = {event.id for event in (*error.refused, *error.unknown)}
        return SendResult([RowFailure(row, reason(error)) for row in rows if row.event.id in failed], {})
    except (PayloadError, BadName) as error:  # nothing of the call was written
        return await _halved(rows, route, error)
    except OnwardError as error:
        return _all_failed(rows, error)
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return _all_failed(rows, error)  # the broker's client has cancelled something of its own
    except Exception as error:  # a fault of the broker's client; the rows stay in the outbox
        log.exception("publishing from the outbox failed")
        return _all_failed(rows, error)
    return SendResult((), {})


def _all_failed(rows: Sequence[OutboxRow], error: BaseException) -> SendResult:
    return SendResult([RowFailure(row, reason(error)) for row in rows], {})


def reason(error: BaseException) -> str:
    """Why a row failed, as every database can store it."""
    return storable(message_of(error) or name_of(error)).replace("\0", "\\0")[:_MOST_CHARS]


async def _halved(rows: Sequence[OutboxRow], route: Route, error: Exception) -> SendResult:
    """Find the rows that the broker refuses, by publishing the two halves one after the other."""
    if len(rows) == 1:
        return SendResult([RowFailure(rows[0], reason(error), refused=True)], {})
    half = len(rows) // 2
    first = await _publish(rows[:half], route)
    if first.fenced:
        return first
    stopped = {failure.row.lane for failure in first.failed} - {None}
    behind = [RowFailure(row, BEHIND) for row in rows[half:] if row.lane in stopped]
    rest = [row for row in rows[half:] if row.lane not in stopped]
    second = await _publish(rest, route) if rest else SendResult((), {})
    return SendResult([*first.failed, *behind, *second.failed], second.fenced)
