"""Which publish numbers of a channel are open, and what the server has answered for them. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onward.brokers.rabbitmq.amqp.assembly import Confirm, ReturnedMessage
from onward.brokers.rabbitmq.amqp.faults import Malformed
from onward.brokers.rabbitmq.amqp.frames import message_id

NACKED = "not every queue has stored the message (nack); probably one of them is full (max_length)"


class Outbound(NamedTuple):
    """A message to publish. `properties`: see frames.encoded_properties."""

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    mandatory: bool = True


class PublishAnswer(NamedTuple):
    """The server has accepted the publish numbers `first` to `last` (`why` None), or not. `unknown`: some queue may
    have stored them all the same."""

    first: int
    last: int
    why: str | None
    unknown: bool


class Confirms:
    """Each number gets one answer. A returned message is answered by its return, and its confirm is dropped."""

    def __init__(self) -> None:
        self._open: dict[int, Outbound] = {}
        self._lowest = 1  # no number below it is open
        self._next = 1

    def sent(self, messages: Sequence[Outbound]) -> int:
        """Give numbers to these messages. Returns the first."""
        first = self._next
        self._next += len(messages)
        self._open.update(zip(range(first, self._next), messages, strict=True))
        return first

    def confirmed(self, confirm: Confirm) -> list[PublishAnswer]:
        """Raises Malformed if no message with that number was sent."""
        last = confirm.tag or self._next - 1  # 0 stands for all
        if last >= self._next:
            raise Malformed(f"a confirm for the publish number {last}, and {self._next - 1} were sent")
        why = None if confirm.accepted else NACKED
        if not (confirm.multiple or confirm.tag == 0):
            answers = [PublishAnswer(last, last, why, why is not None)] if self._open.pop(last, None) else []
            self._raise_lowest()
            return answers
        return self._answered(range(self._lowest, last + 1), why)

    def returned(self, message: ReturnedMessage) -> PublishAnswer:
        """Raises Malformed if no such message is open."""
        number = self._number_of(message)
        del self._open[number]
        self._raise_lowest()
        where = f"exchange {message.exchange!r}, routing key {message.routing_key!r}"
        return PublishAnswer(number, number, f"{where}: {message.code} {message.text}", unknown=False)

    def ended(self, why: str) -> list[PublishAnswer]:
        """No answer can come any more."""
        return self._answered(range(self._lowest, self._next), why)

    def _raise_lowest(self) -> None:
        while self._lowest < self._next and self._lowest not in self._open:
            self._lowest += 1

    def _number_of(self, returned: ReturnedMessage) -> int:
        """The oldest that it can be: a return comes before the confirm of its message."""
        wanted = message_id(returned.properties)
        for number in range(self._lowest, self._next):
            sent = self._open.get(number)
            if (
                sent is not None
                and sent.routing_key == returned.routing_key
                and sent.exchange == returned.exchange
                and len(sent.body) == len(returned.body)
                and message_id(sent.properties) == wanted
            ):
                return number
        raise Malformed(f"a returned message that was not sent: routing key {returned.routing_key!r}")

    def _answered(self, numbers: range, why: str | None) -> list[PublishAnswer]:
        """One answer for each run of open numbers. `numbers` begins with the lowest open one."""
        answers: list[PublishAnswer] = []
        first = None
        for number in numbers:
            if self._open.pop(number, None) is not None:
                first = number if first is None else first
            elif first is not None:
                answers.append(PublishAnswer(first, number - 1, why, why is not None))
                first = None
        if first is not None:
            answers.append(PublishAnswer(first, numbers.stop - 1, why, why is not None))
        self._lowest = max(self._lowest, numbers.stop)
        return answers


def merged(answers: Iterable[PublishAnswer]) -> list[PublishAnswer]:
    """The same, with neighbouring numbers of one fate in one answer."""
    runs: list[PublishAnswer] = []
    first = last = 0
    fate: tuple[str | None, bool] = (None, False)
    for each in answers:
        if each.first == last + 1 and each[2:] == fate and first:
            last = each.last
            continue
        if first:
            runs.append(PublishAnswer(first, last, *fate))
        first, last, *_ = each
        fate = each[2:]
    if first:
        runs.append(PublishAnswer(first, last, *fate))
    return runs
