"""Sends windows of events, one script for each partition and some hundred events, from a thread of its own.

Each call of the script has a number of its producer, gapless within a partition. One without an answer is sent again
with its number and stored once. A number never stands for other events: after a refusal the producer takes a new name,
and the old one is sealed, so that a late copy of a call stores nothing.
"""

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from onward import clock
from onward.brokers.base import Relay
from onward.brokers.core.publishing import BEHIND, Key, Outgoing, Refusal, Window
from onward.brokers.redis import log_scripts
from onward.brokers.redis.backlog import BacklogLimit
from onward.brokers.redis.foreign.scripts import PUBLISH_STREAM
from onward.brokers.redis.keys import RELAYS
from onward.brokers.redis.link import Link, LinkDown, NoAnswer, Pauses
from onward.brokers.redis.scripts import Command
from onward.brokers.redis.server_errors import explained, is_passing
from onward.brokers.redis.topics import RedisTopics
from onward.errors import Backlogged, BrokerError, OnwardError, RelayFenced
from onward.event import Partition
from onward.settings import Settings

log = logging.getLogger("onward")

_CALL_EVENTS = 500  # in one call of the script, which holds up the server for some 5 µs each
_CALL_BYTES = 1 << 20
_ASK_AGAIN_S = 1_800.0  # half the time that the server remembers a producer
_IDLE_ROUNDS = 3  # that accept nothing and give no reason to wait, before there is a pause
_SKEW_MS = 60_000  # how far the clocks of two servers may differ


_partition = lru_cache(maxsize=4_096)(Partition)


class Packed(NamedTuple):
    data: bytes
    relay: Relay | None


RedisOutgoing = Outgoing[Packed]
RedisWindow = Window[Packed]
Done = Callable[[RedisWindow], object]
Fate = tuple[Sequence[int], Refusal]  # events by their index, and why they are refused


class Producer:
    """Our name and number in one partition."""

    __slots__ = ("is_doubtful", "name", "number", "sealing", "used")

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.number = 1  # of the next call
        self.is_doubtful = False  # a late copy of one of its calls may still arrive
        self.sealing: list[str] = []  # former names, to be sealed before the next call
        self.used = clock.now()

    def rename(self) -> None:
        self.sealing.append(self.name)
        self.name, self.number, self.is_doubtful = uuid.uuid4().hex, 1, False


class ScriptCall(NamedTuple):
    """One call of PUBLISH."""

    partition: Partition
    items: tuple[int, ...]  # indexes in the window
    size: int
    relay: Relay | None


class WindowState:
    """What became of a window's events."""

    def __init__(self, window: RedisWindow) -> None:
        self.window = window
        self.open: dict[Partition, list[int]] = {}
        self.doubtful: set[int] = set()  # sent, and not answered
        self.again = ""  # why something was to be sent again at once
        for at, item in enumerate(window.items):
            self.open.setdefault(_partition(item.event.topic, item.partition), []).append(at)

    def calls(self, partition: Partition) -> list[ScriptCall]:
        """The open events of a partition in calls: always the same ones while nothing was answered."""
        calls, items, size, first = [], list[int](), 0, None
        for at in self.open[partition]:
            data, relay = self.window.items[at].packed
            if items and (len(items) >= _CALL_EVENTS or size + len(data) > _CALL_BYTES or relay != first):
                calls.append(ScriptCall(partition, tuple(items), size, first))
                items, size = [], 0
            items.append(at)
            size, first = size + len(data), relay
        if items:
            calls.append(ScriptCall(partition, tuple(items), size, first))
        return calls

    def accept(self, call: ScriptCall) -> None:
        self.window.answers |= dict.fromkeys(call.items)
        self._close([call.partition])

    def refuse(self, items: Sequence[int], refusal: Refusal) -> None:
        """With everything of the same keys behind them."""
        answers, all_items = self.window.answers, self.window.items
        answers |= {at: refusal._replace(unknown=at in self.doubtful) for at in items}
        first: dict[Key, int] = {}  # of each key, the first event that is refused
        for at in items:
            if all_items[at].event.key is not None:
                first.setdefault(all_items[at].lane, at)
        for at in [at for each in self.open.values() for at in each if at not in answers]:
            if at > first.get(all_items[at].lane, at):
                answers[at] = BEHIND._replace(unknown=at in self.doubtful)
        self._close(list(self.open))

    def _close(self, partitions: Sequence[Partition]) -> None:
        """Only these: with many partitions, a look at all of them for each call would take longer than the calls."""
        for each in partitions:
            if left := [at for at in self.open.pop(each, ()) if at not in self.window.answers]:
                self.open[each] = left


class RedisCourier:
    def __init__(self, link: Link, topics: RedisTopics, backlog: BacklogLimit, settings: Settings) -> None:
        self._link = link
        self._topics = topics
        self._backlog = backlog
        self._timeout_s = settings.publish_timeout_s  # in errors
        self._copies = (settings.replication or 1) - 1
        self._producers: dict[Partition, Producer] = {}
        self._work: queue.SimpleQueue[tuple[RedisWindow, Done] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, window: RedisWindow, done: Done) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="onward-redis-publisher", daemon=True)
            self._thread.start()
        self._work.put((window, done))

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            window, done = work
            try:
                self._carry(WindowState(window))
            except Exception:  # each event must have an answer
                log.exception("Redis: a window of events could not be sent")
            done(window)
        self._forget_producers()
        self._link.close()

    def _forget_producers(self) -> None:
        """Delete what the server remembers of us, where every call has its answer. The rest it forgets in an hour."""
        names = [
            ("DEL", self._topics.keyspace.of(partition).producer(producer.name))
            for partition, producer in self._producers.items()
            if producer.number > 1 and not producer.is_doubtful
        ]
        if names and self._link.is_connected:
            with contextlib.suppress(LinkDown):
                self._link.call(*names)

    def _carry(self, state: WindowState) -> None:
        deadline, pauses, seen_relays = state.window.deadline, Pauses(), False
        end = min(deadline, clock.now() + _ASK_AGAIN_S)
        why, idle = "", 0
        while state.open and clock.now() < end:
            answered = len(state.window.answers)
            try:
                if not seen_relays:
                    self._see_relays(state)
                    seen_relays = True
                why = self._round(state)
            except LinkDown as error:
                why = str(error)
            except OnwardError as error:  # a topic that is not as we expect
                self._refuse_all(state, str(error))
            idle = 0 if len(state.window.answers) > answered else idle + 1
            if not why and idle > _IDLE_ROUNDS:
                why = state.again
            if why and state.open:
                time.sleep(max(0.0, min(pauses.next_s(), end - clock.now())))
        if state.open:
            self._refuse_all(state, f"not accepted in publish_timeout_s={self._timeout_s:g}: {why or 'no answer'}")

    def _refuse_all(self, state: WindowState, why: str) -> None:
        for partition, items in list(state.open.items()):
            if state.doubtful & set(items):
                self._producer(partition).rename()
            state.refuse(items, Refusal(why))

    def _see_relays(self, state: WindowState) -> None:
        """Refuse the events of a relay that was replaced, in all partitions, also in those that the new one has not
        published to yet. The partitions compare once more, with what they store."""
        relays = {item.packed.relay: None for item in state.window.items if item.packed.relay is not None}
        if not relays:
            return
        replies = self._link.ask(*[log_scripts.SEE([RELAYS], shard, f"{fence:019d}") for shard, fence in relays])
        for relay, seen in zip(relays, replies, strict=True):
            if int(seen) > relay[1]:
                items = [at for at, item in enumerate(state.window.items) if item.packed.relay == relay]
                state.refuse(items, _fenced(relay, int(seen)))

    def _round(self, state: WindowState) -> str:
        """Send what is open, once. Returns why it must be sent again after a pause, or ""."""
        self._link.connect()
        calls = {partition: state.calls(partition) for partition in state.open}
        seals, commands = [], list[Command]()
        for partition, mine in calls.items():
            producer = self._producer(partition)
            seals += [
                log_scripts.SEAL([self._topics.keyspace.of(partition).producer(name)]) for name in producer.sealing
            ]
            commands += [self._command(state, call, producer, at) for at, call in enumerate(mine)]
        try:
            replies = self._link.call(*seals, *commands, copies=self._copies)
        except LinkDown as error:
            if error.sent:
                state.doubtful.update(at for mine in calls.values() for call in mine for at in call.items)
                for partition in calls:
                    self._producer(partition).is_doubtful = True
            raise
        answers = iter(replies[len(seals) :])
        if not any(isinstance(reply, ResponseError) for reply in replies[: len(seals)]):
            for partition in calls:
                self._producer(partition).sealing.clear()
        found = [self._answered(state, mine, [next(answers) for _ in mine]) for mine in calls.values()]
        return next(filter(None, found), "")

    def _command(self, state: WindowState, call: ScriptCall, producer: Producer, at: int) -> Command:
        keys, topic = self._topics.keyspace.of(call.partition), self._topics.known(call.partition.topic)
        version = topic.version if topic is not None else ""
        names = [keys.stream, keys.meta, keys.producer(producer.name), keys.marks]
        shard, fence = call.relay or ("", 0)
        if topic is not None and topic.streams is not None:  # of others
            return PUBLISH_STREAM(
                [*names[:3], keys.relays] if call.relay else names[:3],
                *(version, producer.number + at, shard, f"{fence:019d}"),
                *[state.window.items[each].packed.data for each in call.items],
            )
        allowance = self._backlog.allowance(call.partition, topic.partitions if topic is not None else 1)
        return log_scripts.PUBLISH(
            [*names, keys.relays] if call.relay else names,
            self._link.incarnation(keys.meta),
            version,
            producer.number + at,
            allowance,
            shard,
            f"{fence:019d}",
            *[state.window.items[each].packed.data for each in call.items],
        )

    def _answered(self, state: WindowState, calls: Sequence[ScriptCall], replies: Sequence[Any]) -> str:
        """Take the answers of one partition, up to the first that is not ok: nothing behind that was stored."""
        producer = self._producer(calls[0].partition)
        producer.used = clock.now()
        accepted = producer.number - 1  # before this round
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, ResponseError) or reply[0] not in (b"ok", b"gap"):
                for each, lost in zip(calls, replies, strict=True):
                    if isinstance(lost, NoAnswer) and lost.sent:
                        state.doubtful.update(each.items)
                        producer.is_doubtful = True
                return self._failed(state, call, reply)
            if reply[0] == b"gap":
                self._note_gap(call.partition, accepted - reply[1])
                state.again = _endless(call.partition, "gap")
                break
            producer.number += 1
            state.accept(call)
        return ""

    def _note_gap(self, partition: Partition, lost: int) -> None:
        """A call was sent again behind this one, because the server had forgotten the script. Or it has lost calls."""
        if lost > 0:
            log.error(
                "Redis lost events of %s that it had accepted: its last %d publish calls are gone (a restart or "
                "fail-over; what it keeps is up to its durability)",
                *(partition, lost),
            )
            self._producer(partition).rename()

    def _failed(self, state: WindowState, call: ScriptCall, reply: Any) -> str:
        """Returns why the call must be sent again after a pause; "": it was refused, or can be sent again at once."""
        partition = call.partition
        if isinstance(reply, ResponseError):
            if is_passing(reply):
                return explained(reply)
            return self._refused(state, call, Refusal(explained(reply)))
        state.again = _endless(partition, reply[0].decode())
        match reply[0]:
            case b"void":
                keys = self._topics.keyspace.of(partition)
                self._link.refresh()
                incarnation = self._link.incarnation(keys.meta)
                self._link.ask(log_scripts.OPEN([keys.stream, keys.meta], incarnation, _SKEW_MS))
            case b"version":
                self._redeclare(partition)
            case b"full":
                if full := self._backlog.refreshed(self._link, partition, call.size):
                    return self._refused(state, call, Refusal(full, kind=Backlogged))
            case b"fenced":
                assert call.relay is not None, "only a relay is fenced"
                return self._refused(state, call, _fenced(call.relay, int(reply[1])))
            case other:
                raise BrokerError(f"Redis answered {other!r} to a publish")
        return ""

    def _refused(self, state: WindowState, call: ScriptCall, refusal: Refusal) -> str:
        self._producer(call.partition).rename()
        state.refuse(call.items, refusal)
        return ""

    def _redeclare(self, partition: Partition) -> None:
        """Its keys were deleted, or it has another partition count. PartitionsDiffer: the latter."""
        if self._topics.known(partition.topic) is None:
            raise BrokerError(f"topic {partition.topic} was dropped meanwhile; publish again")
        try:
            self._topics.resolve(self._link, partition.topic)
        except LinkDown:
            raise
        except OnwardError:
            self._topics.forget(partition.topic)  # the next call of publish says so
            raise

    def _producer(self, partition: Partition) -> Producer:
        producer = self._producers.get(partition)
        if producer is None or clock.now() - producer.used > _ASK_AGAIN_S:
            producer = self._producers[partition] = Producer()
        return producer


def _endless(partition: Partition, answer: str) -> str:
    return (
        f"Redis answers {answer!r} for {partition} again and again; another program changes its keys, or has damaged "
        "them: stop that program, restore the keys from a backup, or drop the topic"
    )


def _fenced(relay: Relay, seen: int) -> Refusal:
    shard, fence = relay
    why = f"outbox shard {shard} belongs to a relay with fence {seen}; this one has {fence} and has lost its lease"
    return Refusal(why, kind=RelayFenced, seen=seen)
