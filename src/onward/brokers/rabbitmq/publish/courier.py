"""Sends windows of events in the I/O thread: in bursts, on one channel, with a confirm for each message.

A message is returned only if no queue at all takes it, so a work queue beside a stream would hide that the stream is
missing. Therefore an event goes to its stream directly, and work queues get a copy by the exchange of the topic.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from onward import clock
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError, Channel, Connection, Outbound, PublishAnswer
from onward.brokers.rabbitmq.connecting import pauses
from onward.brokers.rabbitmq.ground import RabbitGround
from onward.brokers.rabbitmq.publish.sending import RabbitOutgoing, RabbitSending, RabbitWindow
from onward.brokers.rabbitmq.publish.stream_watch import StreamWatch
from onward.brokers.rabbitmq.registry import topic_objects
from onward.brokers.rabbitmq.registry.registry_fold import TopicEntry
from onward.errors import OnwardError

log = logging.getLogger("onward")

MOST_IN_FLIGHT = 2_000  # events that are sent and not answered
_BURST = 500
_BURST_BYTES = 2 << 20
_LOOK_S = 0.05
_LAST_WORD_S = 0.2  # so that the reason why there is no connection is known before the deadline
_MOST_NAMED = 3

Done = Callable[[RabbitWindow], object]


class PublishedCount(Protocol):
    def published(self, exchange: str, key: str, count: int = 1) -> None: ...


class PublishLink:
    """A connection for publishing, with its channel and what is known about the streams behind it."""

    def __init__(self, connection: Connection, channel: Channel, watch: StreamWatch) -> None:
        self.connection = connection
        self.channel = channel
        self.watch = watch

    @property
    def is_closed(self) -> bool:
        return self.channel.is_closed or self.connection.is_closed

    async def close(self, timeout_s: float = 3.0) -> None:
        self.watch.close()
        await self.connection.close(timeout_s)


class RabbitCourier:
    def __init__(self, ground: RabbitGround, count: PublishedCount) -> None:
        self._ground = ground
        self._timeout_s = ground.settings.publish_timeout_s  # for the text of errors
        self._count = count
        self._link: PublishLink | None = None

    @property
    def alarm(self) -> str | None:
        """Why the server takes no events now. None if it does. Any thread may ask."""
        link = self._link
        return None if link is None or link.connection.is_closed else link.connection.blocked

    def take(self, window: RabbitWindow, done: Done) -> None:
        self._ground.io.spawn(self._carried(window, done))

    async def close(self) -> None:
        """In the loop of the I/O thread."""
        if self._link is not None:
            await self._link.close()

    async def _carried(self, window: RabbitWindow, done: Done) -> None:
        sending = RabbitSending(window)
        try:
            await self._carry(sending, window)
        except Exception as error:  # each event must have an answer
            log.exception("RabbitMQ: a window of events could not be sent")
            why = f"internal error: {error!r}"
            await self._give_up(sending, refused=why, lost=why)
        finally:
            self._report(window)
            done(window)

    async def _carry(self, sending: RabbitSending, window: RabbitWindow) -> None:
        why, waits = "no answer", pauses()
        while not sending.is_done and clock.now() < window.deadline:
            answered = len(window.answers)
            try:
                async with asyncio.timeout(max(0.0, window.deadline - clock.now())):
                    link = await self._linked(window.deadline)
                    await self._refuse_missing(sending, window, link)
                    await _unblocked(link.connection)
                    await self._send(sending, window, link)
            except TimeoutError:
                break
            except AmqpError as error:
                why = str(error)
                sending.ended(error)
                if self._link is not None:
                    self._link.watch.forget()
            except OnwardError as error:
                sending.refuse(str(error))
            if len(window.answers) == answered:  # nothing was achieved
                await asyncio.sleep(max(0.0, min(next(waits), window.deadline - clock.now())))
        if not sending.is_done:
            late = f"in publish_timeout_s={self._timeout_s:g}: {self._blocked_text() or why}"
            await self._give_up(sending, refused=f"not accepted {late}", lost=f"not answered {late}")

    async def _give_up(self, sending: RabbitSending, *, refused: str, lost: str) -> None:
        """Late answers must not reach another window, so what is in flight ends with its connection."""
        sending.refuse(refused)
        if sending.in_flight:
            sending.lose(lost)
            link, self._link = self._link, None
            if link is not None:
                await link.close(timeout_s=0.1)

    async def _linked(self, deadline: float) -> PublishLink:
        """Raises BrokerError if there is no connection in time."""
        link = self._link
        if link is not None and not link.is_closed:
            return link
        if link is not None and not link.connection.is_closed:
            connection, watch = link.connection, link.watch
        else:
            if link is not None:
                link.watch.close()
            patience_s = max(0.0, deadline - clock.now() - _LAST_WORD_S)
            connection = await self._ground.connect_within("publish", patience_s)
            watch = StreamWatch(connection, self._ground.registry, creates=self._ground.settings.auto_declare)
        try:
            channel = await connection.channel()
            await channel.confirm_select()
        except BaseException:
            watch.close()
            await connection.close(timeout_s=0.1)
            raise
        self._link = PublishLink(connection, channel, watch)
        return self._link

    async def _refuse_missing(self, sending: RabbitSending, window: RabbitWindow, link: PublishLink) -> None:
        """Refuse the events whose topic or stream does not exist. Exchanges of the application have no streams."""
        for topic in {item.event.topic for item in window.items if item.packed.stream is not None}:
            entry = self._ground.registry.topic(topic)
            if entry is None:
                sending.refuse(f"topic {topic} was dropped meanwhile; publish again", topic)
            elif missing := await link.watch.missing(entry):
                sending.refuse(_lost(entry, missing), topic, missing)

    async def _send(self, sending: RabbitSending, window: RabbitWindow, link: PublishLink) -> None:
        """Raises AmqpError when the channel ends before every event has its answer."""
        channel, wake = link.channel, asyncio.Event()

        def answered(answers: list[PublishAnswer]) -> None:
            for answer in answers:
                if not (channel.is_closed and answer.unknown):  # the fate of these depends on how the channel ends
                    sending.answered(answer, _explained)
            wake.set()

        channel.on_answers = answered
        try:
            while not sending.is_done:
                self._burst(sending, window, channel)
                if not sending.in_flight:
                    continue
                wake.clear()
                await wake.wait()  # also when the channel ends: then all open numbers are answered
                if channel.is_closed:
                    raise await asyncio.shield(channel.closing)
        finally:
            channel.on_answers = None

    def _burst(self, sending: RabbitSending, window: RabbitWindow, channel: Channel) -> None:
        """Fill the room for events in flight."""
        while sending.has_waiting and sending.in_flight <= MOST_IN_FLIGHT - _BURST:
            burst = sending.burst(_BURST, _BURST_BYTES)
            messages, events = self._messages(window, burst)
            try:
                sending.sent(channel.send(messages), events)
            except ValueError as error:  # nothing of the burst was sent
                sending.drop(burst, f"RabbitMQ cannot carry one of these events: {error}")

    def _messages(self, window: RabbitWindow, burst: Sequence[int]) -> tuple[list[Outbound], list[int]]:
        """The messages of these events, and the event of each message."""
        at_ms = time.time_ns() // 1_000_000
        messages: list[Outbound] = []
        events: list[int] = []
        for at in burst:
            event, (stream, exchange, packed) = window.items[at].event, window.items[at].packed
            properties = packed.properties(at_ms)
            if stream is not None:
                messages.append(Outbound("", stream, properties, packed.body))
                events.append(at)
            if stream is None or self._is_copied(event.topic):
                messages.append(Outbound(exchange, event.type, properties, packed.body, mandatory=stream is None))
                events.append(at)
        return messages, events

    def _is_copied(self, topic: str) -> bool:
        """Whether there may be queues behind the exchange of the topic."""
        registry = self._ground.registry
        entry = registry.topic(topic)
        return registry.has_work_groups(topic) or (entry is not None and bool(entry.exchange_arguments))

    def _blocked_text(self) -> str:
        alarm = self.alarm
        return "" if alarm is None else f"RabbitMQ takes no events now ({alarm}); free memory or disk there"

    def _report(self, window: RabbitWindow) -> None:
        """Count what was accepted."""
        counts: Counter[tuple[str, str]] = Counter()
        for at, item in enumerate(window.items):
            if window.answers.get(at, True) is None:
                counts[item.packed.exchange, item.event.type] += 1
        for (exchange, type_), count in counts.items():
            self._count.published(exchange, type_, count)


async def _unblocked(connection: Connection) -> None:
    """Do not send while the server takes no messages: what is not sent is surely not stored."""
    while connection.blocked is not None and not connection.is_closed:  # noqa: ASYNC110 - a connection has one listener
        await asyncio.sleep(_LOOK_S)


def _lost(topic: TopicEntry, missing: Collection[int]) -> str:
    streams = ", ".join(names.stream(topic.name, index) for index in sorted(missing)[:_MOST_NAMED])
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return (
        f"topic {topic.name}: stream {streams}{more} does not exist, or exchange {names.exchange(topic.name)} does "
        f"not: it was deleted, with its events; {topic_objects.cure_of_a_deleted_stream(topic.name)}"
    )


def _explained(why: str, item: RabbitOutgoing) -> str:
    if "(nack)" in why:
        place = f"exchange {item.packed.exchange}, routing key {item.event.type!r}"
        place = place if item.packed.stream is None else f"stream {item.packed.stream} and {place}"
        return f"event {item.event.id} to {place}: {why}; publish again when consumers have made room in it"
    if "NO_ROUTE" not in why:
        return f"event {item.event.id}: {why}"
    if item.packed.stream is not None:
        return f"stream {item.packed.stream} does not exist ({why})"
    return (
        f"no binding of exchange {item.packed.exchange} matches event {item.event.id} (routing key "
        f"{item.event.type!r}; a headers exchange compares headers); declare a Binding for it, or an alternate exchange"
    )
