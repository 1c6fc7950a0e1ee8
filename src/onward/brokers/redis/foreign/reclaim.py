"""Reclaiming: a thread for each topic that is on streams of another program, so that no topic waits for another one.

It adopts the partitions that were claimed, one after another. In rounds it looks for entries that other consumers have
left since then: such a partition is given back, claimed again and adopted."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from onward import clock
from onward.brokers.core.holdings import ReadAhead
from onward.brokers.redis.event_count import EventCount
from onward.brokers.redis.foreign.adoption import Adopted, Adopter, Waits
from onward.brokers.redis.foreign.lost_entries import entries
from onward.brokers.redis.link import LinkDown
from onward.brokers.redis.member import RedisHold, RedisHoldings
from onward.brokers.redis.turn_schedule import Step, TurnSchedule
from onward.errors import BrokerError
from onward.event import Partition

log = logging.getLogger("onward")


class ReclaimLog:
    """What is logged for all topics of a member: a line for each round, with the total, one when other consumers begin
    to disturb a partition, and one when it goes on. Topics that reclaim at the same time share a round. Any thread may
    use it."""

    def __init__(self, group: str) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._working = 0
        self._taken: dict[Partition, int] = {}
        self._disturbed: set[Partition] = set()

    def disturbed(self, partition: Partition, why: str, level: int = logging.ERROR) -> None:
        with self._lock:
            is_known = partition in self._disturbed
            self._disturbed.add(partition)
        if not is_known:
            log.log(level, "%s of group %s %s", partition, self.group, why)

    def undisturbed(self, partition: Partition) -> None:
        with self._lock:
            was_disturbed = partition in self._disturbed
            self._disturbed.discard(partition)
        if was_disturbed:
            log.info("%s of group %s goes on: no consumer of another program is active", partition, self.group)

    def begin(self) -> None:
        with self._lock:
            self._working += 1

    def took(self, partition: Partition, count: int) -> None:
        with self._lock:
            self._taken[partition] = self._taken.get(partition, 0) + count

    def end(self) -> None:
        """The last topic of a round writes the line."""
        with self._lock:
            self._working -= 1
            if self._working or not self._taken:
                return
            found, self._taken = self._taken, {}
        parts = ", ".join(f"{count} of {partition}" for partition, count in sorted(found.items()))
        total = entries(sum(found.values()))
        log.info("group %s reclaimed %s of other consumers: %s", self.group, total, parts)


class TopicReclaimer:
    """The streams of one topic."""

    def __init__(self, topic: str, adopter: Adopter, holdings: RedisHoldings, lines: ReclaimLog) -> None:
        self.topic = topic
        self.troubles: dict[Partition, str] = {}
        self.ring: Callable[[], None] = lambda: None  # the keeper of the leases has something to do
        self._adopter = adopter
        self._holdings = holdings
        self._log = lines
        self._claimed: dict[RedisHold, float] = {}  # not adopted yet: when they may be announced
        self._returns: deque[RedisHold] = deque()  # to give back, so that they are adopted again
        self._schedule = TurnSchedule()
        self._round_at = 0.0

    def claimed(self, holds: Iterable[RedisHold]) -> None:
        """They are announced when they are adopted."""
        for hold in holds:
            self._claimed[hold] = hold.ready_at
            hold.ready_at = math.inf
        self._schedule.kick()

    def asked(self) -> list[RedisHold]:
        """Each ownership once: the next round asks again, if that is still needed."""
        return [self._returns.popleft() for _ in range(len(self._returns))]

    def start(self, group: str) -> None:
        threading.Thread(target=self._run, name=f"onward-redis-reclaim-{group}-{self.topic}", daemon=True).start()

    def stop(self) -> None:
        self._schedule.close()

    def _run(self) -> None:
        while self._schedule.wait() is not Step.END:
            try:
                self._work()
                self._schedule.succeeded()
            except LinkDown:  # the keeper of the leases reports it
                self._schedule.failed(by=math.inf)
            except Exception:
                log.exception("Redis: reclaiming of topic %s failed; it is tried again", self.topic)
                self._schedule.failed(by=math.inf)
        self._adopter.close()

    def _work(self) -> None:
        for partition in list(self.troubles):
            if partition not in self._holdings.held:
                self.troubles.pop(partition, None)
        self._log.begin()
        try:
            for hold in list(self._claimed):
                self._adopt(hold)
        finally:
            self._log.end()
        if clock.now() >= self._round_at:
            for hold in self._holdings.announced():
                if hold.partition.topic == self.topic and not hold.revoking:
                    self._look(hold)
            self._round_at = clock.now() + self._adopter.every_s
        self._schedule.kick(self._round_at)

    def _adopt(self, hold: RedisHold) -> None:
        partition = hold.partition
        if self._holdings.held.get(partition) is not hold:
            self._forget(hold)
            return
        try:
            answer = self._adopter.adopt(hold)
        except LinkDown:
            raise
        except BrokerError as error:
            answer = Waits(str(error), self._adopter.look_s)
        if isinstance(answer, Adopted):
            if answer.taken:
                self._log.took(partition, answer.taken)
            self._announce(hold, answer)
        if isinstance(answer, Waits):
            self._waits(partition, answer)
            self._schedule.kick(clock.now() + answer.for_s)
        else:
            self._forget(hold)
            if answer is not None:
                self._log.undisturbed(partition)

    def _waits(self, partition: Partition, answer: Waits) -> None:
        if answer.is_disturbed:
            self._log.disturbed(partition, answer.why, logging.WARNING)
            self.troubles[partition] = f"{partition} of group {self._log.group} {answer.why}"
        else:
            self._troubled(partition, f"{partition} is not read: {answer.why}")

    def _announce(self, hold: RedisHold, adopted: Adopted) -> None:
        with self._holdings.lock:
            hold.assigned = msgspec.structs.replace(hold.assigned, stored=adopted.progress)
            hold.ahead = ReadAhead(adopted.progress.watermark)
            hold.own.count = EventCount(adopted.before)
            if hold.own.shard is not None:
                hold.own.shard.adopted(adopted.progress, adopted.leftovers, adopted.pending)
            hold.ready_at = self._claimed[hold]
        self._holdings.bell.ring()

    def _forget(self, hold: RedisHold) -> None:
        self._claimed.pop(hold, None)
        self.troubles.pop(hold.partition, None)

    def _look(self, hold: RedisHold) -> None:
        """An error in one stream does not stop the round."""
        if hold.own.shard is not None and hold.own.shard.intruders:
            return  # it is given back
        partition = hold.partition
        try:
            why, has_left = self._adopter.others(hold)
        except LinkDown:
            raise
        except BrokerError as error:
            self._troubled(partition, str(error))
            return
        if why:
            self._log.disturbed(partition, f"is disturbed: {why}")
            self.troubles[partition] = f"{partition} of group {self._log.group} is disturbed: {why}"
            return
        self.troubles.pop(partition, None)
        if has_left:
            self._returns.append(hold)
            self.ring()
        else:
            self._log.undisturbed(partition)

    def intruded(self, hold: RedisHold) -> None:
        """Another consumer reads the group, so the partition is given back."""
        self._log.disturbed(hold.partition, f"stands still: {hold.own.damage}")

    def _troubled(self, partition: Partition, why: str) -> None:
        if self.troubles.get(partition) != why:
            log.warning("%s", why)
        self.troubles[partition] = why


class Reclaimer:
    """All topics of a member that are on streams of another program."""

    def __init__(self, topics: Mapping[str, TopicReclaimer]) -> None:
        self._topics = topics

    def start(self, group: str, ring: Callable[[], None]) -> None:
        for topic in self._topics.values():
            topic.ring = ring
            topic.start(group)

    def stop(self) -> None:
        for topic in self._topics.values():
            topic.stop()

    def claimed(self, holds: Sequence[RedisHold]) -> None:
        """The member holds these from now on. A thread that has nothing to adopt is not woken."""
        for name, topic in self._topics.items():
            if mine := [hold for hold in holds if hold.partition.topic == name]:
                topic.claimed(mine)

    def returns(self, held: Iterable[RedisHold]) -> list[RedisHold]:
        """Which of these must be given back now, to be adopted again."""
        if not self._topics:
            return []
        asked = {hold for topic in self._topics.values() for hold in topic.asked()}
        intruded = [hold for hold in held if hold.own.shard and hold.own.shard.intruders]
        for hold in intruded:
            self._topics[hold.partition.topic].intruded(hold)
        asked |= set(intruded)
        return [hold for hold in held if hold in asked and hold.announced and not hold.revoking]

    @property
    def troubles(self) -> list[str]:
        return [why for topic in self._topics.values() for why in list(topic.troubles.values())]
