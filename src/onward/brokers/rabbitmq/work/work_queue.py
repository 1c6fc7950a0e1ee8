"""One ownership of the queues of a work group: a channel, its consumers, and the messages that were delivered to it.

The I/O thread receives and acknowledges. The application's loop takes messages with `take`. A position is the number of
a message in the order in which they were taken. It is not the delivery tag, because the tiers are taken in turns.
"""

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from onward import clock
from onward.brokers.rabbitmq.amqp import Channel, Received
from onward.brokers.rabbitmq.message import received
from onward.brokers.rabbitmq.work.ack_ledger import AckLedger
from onward.brokers.rabbitmq.work.prefetch import Prefetch
from onward.brokers.rabbitmq.work.tiers import TierTurns
from onward.brokers.rabbitmq.work.work_message import is_special, type_of
from onward.brokers.rabbitmq.work.work_place import SUSPECTS, WorkPlace
from onward.event import Delivery, Partition, Tries

TierMessages = Callable[[str, list[Received]], None]
Special = Callable[[str, Received], None]


class WorkBuffers:
    """The messages that arrived and were not taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Received]] = {}
        self._turns = TierTurns()

    def __len__(self) -> int:
        return sum([len(each) for each in tuple(self._waiting.values())])

    def put(self, tier: str, messages: Sequence[Received]) -> int:
        """Returns their size in bytes."""
        size = sum([len(message.body) for message in messages])
        with self._lock:
            self._waiting.setdefault(tier, deque()).extend(messages)
        return size

    def take(self, limit: int) -> list[Received]:
        """At most so many, in turns over the tiers. A suspect comes first, because it waits for everything else."""
        with self._lock:
            taken: list[Received] = []
            if suspects := self._waiting.get(SUSPECTS):
                taken = _taken(suspects, limit)
            waiting = {tier: len(each) for tier, each in self._waiting.items() if each and tier != SUSPECTS}
            if len(waiting) == 1:
                (tier,) = waiting
                taken += _taken(self._waiting[tier], limit - len(taken))
            elif waiting:
                for tier, count in self._turns.share(waiting, limit - len(taken)).items():
                    taken += _taken(self._waiting[tier], count)
        return taken

    def clear(self, *, keep: int = 0) -> list[Received]:
        """Remove and return all but the first `keep` of each tier."""
        with self._lock:
            removed: list[Received] = []
            for each in self._waiting.values():
                while len(each) > keep:
                    removed.append(each.pop())
        return removed


def _taken(waiting: deque[Received], count: int) -> list[Received]:
    return [waiting.popleft() for _ in range(min(count, len(waiting)))]


class TierConsumers:
    """Consumers for each queue, all on one channel. The tag of a consumer begins with its tier.

    To raise the prefetch, a consumer is added. If the former one were cancelled instead, the server would return
    messages that are under way to it and count the return, as if a process had died with them."""

    def __init__(self, channel: Channel, place: WorkPlace, on_messages: TierMessages, on_cancel: Callable[[str], None]):
        self._channel = channel
        self._place = place
        self._on_messages = on_messages
        self._on_cancel = on_cancel
        self._tags: list[str] = []  # of the consumers whose prefetch can change
        self._suspects = ""  # the tag of the consumer of the suspects
        self._started = 0
        self._lock = asyncio.Lock()
        self.prefetch = 0  # of each tier; 0: stopped
        self._has_ended = False

    async def start(self, prefetch: int) -> None:
        """Start the consumers, or change their prefetch. After `end` it does nothing."""
        async with self._lock:
            if self._has_ended:
                return
            before, self.prefetch = self.prefetch, prefetch
            if not self._suspects:
                self._suspects = await self._consume(SUSPECTS, self._place.suspects, 1)
            if prefetch > before:
                self._tags += await self._consume_all(prefetch - before)
            elif prefetch < before:
                former, self._tags = self._tags, await self._consume_all(prefetch)
                await self._cancel(former)

    async def stop(self) -> None:
        """Stop the consumers. Messages that were under way have arrived when this returns."""
        async with self._lock:
            self.prefetch = 0
            tags = [self._suspects, *self._tags] if self._suspects else self._tags
            self._suspects, self._tags = "", []
            await self._cancel(tags)

    async def end(self) -> None:
        """Stop the consumers for good."""
        self._has_ended = True
        await self.stop()

    async def _consume_all(self, prefetch: int) -> list[str]:
        return [await self._consume(tier, queue, prefetch) for tier, queue in self._place.queues.items()]

    async def _consume(self, tier: str, queue: str, prefetch: int) -> str:
        self._started += 1
        await self._channel.qos(prefetch)
        return await self._channel.consume(
            queue,
            functools.partial(self._on_messages, tier),
            tag=f"{tier}-{self._started}",
            on_cancel=functools.partial(self._on_cancel, queue),
        )

    async def _cancel(self, tags: Iterable[str]) -> None:
        for tag in tags:
            await self._channel.cancel(tag)


def tier_of_message(message: Received) -> str:
    """The tier of the queue that delivered it."""
    return message.consumer.partition("-")[0]


class Acknowledger:
    """Acknowledges the deliveries of one channel, or gives them back. Runs in the I/O thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ledger = AckLedger()

    def ack(self, tags: Iterable[int]) -> None:
        plan = self._ledger.finish(tags)
        if plan.up_to:
            self._channel.ack(plan.up_to, multiple=True)
        for tag in plan.singles:
            self._channel.ack(tag)

    def give_back(self, tags: Iterable[int]) -> None:
        """Let the server deliver these to any member, also to this one."""
        tags = sorted(tags)
        for tag in tags:
            self._channel.nack(tag)
        self._ledger.forget(tags)


class WorkChannel:
    """`special` is called for messages whose headers must be read first. `rang`: there is something to take."""

    def __init__(self, channel: Channel, prefetch: Prefetch, *, special: Special, rang: Callable[[], None]) -> None:
        self.prefetch = prefetch
        self.acks = Acknowledger(channel)
        self.buffers = WorkBuffers()
        self.open: dict[int, Received] = {}  # by position: taken and not done
        self._tries: dict[int, Tries] = {}  # by tag, of the messages that are no first attempts
        self._position = 0
        self._special = special
        self._rang = rang

    # -- in the I/O thread --------------------------------------------------------------------------------------------

    def arrived(self, tier: str, messages: list[Received]) -> None:
        plain = messages
        if tier == SUSPECTS or any([is_special(message) for message in messages]):  # noqa: C419  # twice as fast
            plain = []
            for message in messages:
                if tier == SUSPECTS or is_special(message):
                    self._special(tier, message)
                else:
                    plain.append(message)
        if plain:
            self.prefetch.received(len(plain), self.buffers.put(tier, plain))
            self._rang()

    def hand_out(self, tier: str, message: Received, tries: Tries) -> None:
        """A message whose headers were read can be taken."""
        if tries != Tries():
            self._tries[message.tag] = tries
        self.prefetch.received(1, self.buffers.put(tier, [message]))
        self._rang()

    def done(self, positions: Iterable[int]) -> list[Received]:
        """Acknowledge what was taken at these positions, and return it."""
        found = self.passed_on(positions)
        self.acks.ack([message.tag for message in found])
        return found

    def passed_on(self, positions: Iterable[int]) -> list[Received]:
        """What was taken at these positions. It is not ours any more."""
        taken = self.open
        return [message for position in positions if (message := taken.pop(position, None)) is not None]

    def surplus(self, *, keep: int = 0) -> list[Received]:
        """The messages that were not taken, without the first `keep` of each tier. They are not handed out any more."""
        removed = self.buffers.clear(keep=keep)
        self.prefetch.gave_back(len(removed), clock.now())
        return removed

    # -- in the application's loop ------------------------------------------------------------------------------------

    def take(self, limit: int, partition: Partition, epoch: int, log_id: str) -> list[Delivery]:
        """The next messages as deliveries, at most so many."""
        messages = self.buffers.take(limit)
        taken, tries, topic, position = self.open, self._tries, partition.topic, self._position
        deliveries: list[Delivery] = []
        for message in messages:
            position += 1
            taken[position] = message
            event = received(message.properties, message.body, topic, f"{log_id}/{position}", type_of(message))
            known = tries.pop(message.tag, None) if tries else None
            deliveries.append(Delivery(event, partition, position, epoch, 1, None, log_id, False, known))
        self._position = position
        return deliveries
