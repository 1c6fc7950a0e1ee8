"""What became of the events of one window. Pure.

An event is a message to its stream, and another one to the exchange of its topic if there are work groups. It is
accepted when all its messages are. Messages are sent in bursts on one channel. When the server closes the channel
because of one message, it has ignored everything behind that message: these events are sent again on a new channel. For
what was sent before, the answer is lost.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from onward.brokers.core.publishing import BEHIND, Key, Outgoing, Refusal, Window
from onward.brokers.rabbitmq.amqp import AmqpError, ChannelClosed, PublishAnswer
from onward.brokers.rabbitmq.message import PackedEvent

_NO_EXCHANGE = re.compile(r"no exchange '([^']*)'")
_TOO_LARGE = re.compile(r"message size (\d+) is larger")
_OVERTAKEN = Refusal(
    "an earlier event of the same key was not accepted, and this one was already sent; it may be stored", unknown=True
)


class RabbitPacked(NamedTuple):
    """An event, ready to be sent. `stream` is None if its topic is an exchange of the application."""

    stream: str | None
    exchange: str
    message: PackedEvent


RabbitOutgoing = Outgoing[RabbitPacked]
RabbitWindow = Window[RabbitPacked]


class RabbitSending:
    def __init__(self, window: RabbitWindow) -> None:
        self._items = window.items
        self._answers = window.answers
        self._waiting = deque(range(len(window.items)))  # not sent yet, in order
        self._open: dict[int, int] = {}  # by publish number: sent and not answered
        self._split: dict[int, bool] = {}  # events with two messages: whether one of these was accepted
        self._failed: set[Key] = set()  # keys with an event that was not accepted

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._open

    @property
    def in_flight(self) -> int:
        return len(self._open)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def burst(self, most: int, most_bytes: int) -> list[int]:
        """The next events to send. Those behind a failed event of their key are refused instead."""
        found: list[int] = []
        while self._waiting and len(found) < most and most_bytes > 0:
            at = self._waiting.popleft()
            if self._failed and self._items[at].lane in self._failed:
                self._answers[at] = BEHIND
                continue
            found.append(at)
            most_bytes -= self._items[at].size
        return found

    def sent(self, first: int, events: Sequence[int]) -> None:
        """`first`: the publish number of the first message. `events`: of each message, its event."""
        self._open.update(zip(range(first, first + len(events)), events, strict=True))
        self._split |= {at: False for at, following in pairwise(events) if at == following}

    def answered(self, answer: PublishAnswer, explain: Callable[[str, RabbitOutgoing], str]) -> None:
        """The server has answered. `explain`: the reason in words, for this event."""
        for number in range(answer.first, answer.last + 1):
            at = self._open.pop(number, None)
            if at is None or at in self._answers:
                continue
            if answer.why is not None:
                unknown = answer.unknown or at in self._split
                self._fail(at, Refusal(explain(answer.why, self._items[at]), unknown=unknown))
            elif self._split.get(at, True) is False:
                self._split[at] = True
            elif self._failed and self._items[at].lane in self._failed:
                self._answers[at] = _OVERTAKEN
            else:
                self._answers[at] = None

    def ended(self, error: AmqpError) -> None:
        """The channel has ended. Events that the server has surely ignored are sent again."""
        numbers = sorted(self._open)
        suspects = [number for number in numbers if self._is_suspect(self._items[self._open[number]], error)]
        if not suspects or not isinstance(error, ChannelClosed):
            self.lose(str(error))
            return
        last = suspects[0] if _TOO_LARGE.search(error.text) else suspects[-1]
        sent = {self._open[number] for number in numbers if number <= last}
        again = dict.fromkeys(at for at in self._open.values() if at not in sent)
        self._open = {number: at for number, at in self._open.items() if at in sent}
        if last == suspects[0]:
            at = self._open.pop(last)
            self._fail(at, Refusal(str(error)))
            self.lose(f"the channel was closed because of another event: {error}")
        else:
            self.lose(str(error))
        self._waiting.extendleft(reversed(again))

    def lose(self, why: str) -> None:
        """The answers for everything that was sent are lost."""
        for at in self._open.values():
            if at not in self._answers:
                self._fail(at, Refusal(why, unknown=True))
        self._open.clear()

    def refuse(self, why: str, topic: str | None = None, partitions: Collection[int] | None = None) -> None:
        """Refuse what was not sent yet: everything, or what goes to the topic, or to these partitions of it."""
        kept: deque[int] = deque()
        for at in self._waiting:
            event, partition, *_ = self._items[at]
            if (topic is None or event.topic == topic) and (partitions is None or partition in partitions):
                self._fail(at, Refusal(why))
            else:
                kept.append(at)
        self._waiting = kept

    def drop(self, burst: Sequence[int], why: str) -> None:
        """Refuse events of a burst that was not sent."""
        for at in burst:
            self._fail(at, Refusal(why))

    def _fail(self, at: int, refusal: Refusal) -> None:
        item = self._items[at]
        self._answers[at] = refusal
        if item.event.key is not None:
            self._failed.add(item.lane)

    def _is_suspect(self, item: RabbitOutgoing, error: AmqpError) -> bool:
        """Whether the server may have closed the channel because of this event."""
        if not isinstance(error, ChannelClosed):
            return False
        if (found := _NO_EXCHANGE.search(error.text)) is not None:
            return found[1] == item.packed.exchange
        if (found := _TOO_LARGE.search(error.text)) is not None:
            return len(item.packed.message.body) == int(found[1])
        return False
