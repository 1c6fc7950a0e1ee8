"""A consumer of a token queue, on a channel of its own: it carries out what takeover.py decides."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from uuid import uuid4

from onward import clock
from onward.brokers.rabbitmq.amqp import (
    Channel,
    Connection,
    Outbound,
    Properties,
    PublishAnswer,
    Received,
    encoded_properties,
)
from onward.brokers.rabbitmq.ordered.takeover import PREFETCH, Reaction, Takeover, Tenure, TokenStep
from onward.brokers.rabbitmq.ordered.token import Probe, Token, TokenArrival, decoded, encoded

T = TypeVar("T")
_PERSISTENT = encoded_properties(Properties(delivery_mode=2, content_type="application/msgpack"))
_ANSWER_S = 15.0  # at most, for the queue to answer


class TokenLost(Exception):
    """The token is not ours, or may be another member's."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class TokenRefused(TokenLost):
    """The server did not store the token."""


class TokenSilent(TokenLost):
    """The queue neither delivers nor confirms. The server may have forgotten it."""


class TokenLater(TokenLost):
    """This version cannot read the token."""


class QueueAnswers:
    """Whether the queue answers what it is asked."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.has_any = False
        self._asked_at: float | None = None  # the first question that has no answer

    def asked(self, now: float) -> None:
        if self._asked_at is None:
            self._asked_at = now

    def heard(self) -> None:
        self.has_any, self._asked_at = True, None

    def is_late(self, now: float, *, alarm: bool) -> bool:
        if self._asked_at is None:
            return False
        if alarm:
            self._asked_at = now
        return now > self._asked_at + min(self.lease_s, _ANSWER_S)


class TokenChannel:
    """Stands by until the server makes it the active consumer, finds the newest token, then writes tokens.

    `on_lost` is called once, at the moment of the loss. Every call raises TokenLost after that."""

    def __init__(self, channel: Channel, queue: str, *, tenure: str, lease_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.queue = queue
        self.tenure: Tenure | None = None
        self.lost: asyncio.Future[TokenLost] = loop.create_future()  # what it raises from then on
        self.on_lost: Callable[[str], None] = lambda _: None
        self.name = tenure
        self._answers = QueueAnswers(lease_s)
        self._channel = channel
        self._takeover = Takeover(Probe(uuid4().hex))
        self._waiter: asyncio.Future[None] = loop.create_future()  # for the newest token, then for each write
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, connection: Connection, queue: str, *, tenure: str, lease_s: float) -> "TokenChannel":
        """Stand by. Raises ChannelClosed if there is no such queue, and TokenSilent if it does not answer."""
        channel = await connection.channel()
        opened = cls(channel, queue, tenure=tenure, lease_s=lease_s)
        channel.on_answers = opened._answered
        channel.closing.add_done_callback(lambda closing: opened.lose(str(closing.result())))
        try:
            async with asyncio.timeout(min(lease_s, _ANSWER_S)):
                await channel.confirm_select()
                await channel.qos(PREFETCH)
                await channel.consume(queue, opened._arrived, on_cancel=opened._cancelled)
        except TimeoutError as error:
            await opened.close()
            raise TokenSilent(f"queue {queue} does not answer") from error
        except BaseException:
            await opened.close()
            raise
        return opened

    @property
    def is_active(self) -> bool:
        return self._takeover.is_active

    @property
    def held(self) -> Token:
        """The token that was stored last."""
        assert self.tenure is not None, "called by an owner"
        assert self.tenure.held is not None, "called by an owner"
        return self.tenure.held

    @property
    def sure_until(self) -> float:
        return 0.0 if self.tenure is None or self.lost.done() else self.tenure.sure_since + self._answers.lease_s

    async def newest(self) -> Token | None:
        """Wait until we are the active consumer and the newest token is known. None: the queue has no token."""
        await self.unless_lost(self._waiter)
        return self._takeover.newest

    async def write(self, token: Token) -> None:
        """Store this token. The first one is the claim. Raises TokenLost if it does not come back."""
        if self.lost.done():
            raise self.loss()
        if self.tenure is None:
            self.tenure = Tenure(self.name, self._takeover.unacked)
        self._waiter = asyncio.get_running_loop().create_future()
        self.tenure.send(token, clock.now())
        self._send(encoded(token))
        await self.unless_lost(self._waiter)

    def tidy(self) -> None:
        """Remove everything but the newest token, so that those who only look leave no probe behind."""
        if not self.lost.done():
            for tag in self._takeover.spare():
                self._channel.ack(tag)

    def nudge(self) -> None:
        """Send a message that has no effect. If the queue is empty and we are its active consumer, we find that out."""
        if not self.lost.done():
            self._answers.asked(clock.now())
            self._publish(encoded(Probe("nudge")))

    @property
    def is_silent(self) -> bool:
        """The queue has not answered a nudge for a lease, or for 15 s. During an alarm the server answers nothing."""
        return self._answers.is_late(clock.now(), alarm=self._channel.connection.blocked is not None)

    @property
    def has_answered(self) -> bool:
        """The queue has delivered or confirmed something."""
        return self._answers.has_any

    async def unless_lost(self, awaited: "asyncio.Future[T] | Coroutine[Any, Any, T]") -> T:
        """The result, or TokenLost. A coroutine is cancelled by the loss."""
        future = asyncio.ensure_future(awaited)
        future.add_done_callback(_seen)  # if this call is cancelled, no one else looks at its error
        either: list[asyncio.Future[Any]] = [future, self.lost]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if asyncio.iscoroutine(awaited) and not future.done():
                future.cancel()
                await asyncio.wait([future])
        if self.lost.done():
            raise self.loss()
        return future.result()

    def loss(self) -> TokenLost:
        """Why it was lost, as a new error for each caller."""
        lost = self.lost.result()
        return type(lost)(lost.why)

    def lose(self, why: str, kind: type[TokenLost] = TokenLost) -> None:
        """Give the token up, for example because it must have ended by now."""
        self._stop_timer()
        if not self.lost.done():
            self.lost.set_result(kind(why))
            self.on_lost(why)

    async def close(self) -> None:
        """Give the token to the next consumer. What was not acknowledged goes back to the queue."""
        self.lose("closed by us")
        await self._channel.close()

    # -- called by the channel --------------------------------------------------------------------------------------

    def _arrived(self, messages: list[Received]) -> None:
        self._answers.heard()
        for each in messages:
            if self.lost.done():
                return
            arrival = TokenArrival(each.tag, each.redelivered, decoded(each.body))
            self._react((self.tenure or self._takeover).delivered(arrival))

    def _react(self, reaction: Reaction) -> None:
        for tag in reaction.acks:
            self._channel.ack(tag)
        if reaction.ack_to:
            self._channel.ack(reaction.ack_to, multiple=True)
        match reaction.step:
            case TokenStep.PROBE:
                self._send(encoded(self._takeover.probe))
            case TokenStep.FOUND | TokenStep.STORED:
                self._stop_timer()
                if not self._waiter.done():
                    self._waiter.set_result(None)
            case TokenStep.LATER:
                self.lose(
                    f"queue {self.queue} has a token of a later version of Onward. Upgrade this member; if no member "
                    "has a later version, another program wrote it: remove this message from the queue",
                    TokenLater,
                )
            case TokenStep.LOST:
                self.lose(reaction.why)

    def _answered(self, answers: list[PublishAnswer]) -> None:
        """A confirm proves nothing, because the server also confirms the token of a former owner. A refusal counts, but
        not the answer that nothing is known because the channel has ended."""
        for answer in answers:
            if answer.why is None:
                self._answers.heard()
            else:
                kind = TokenLost if answer.unknown and self._channel.is_closed else TokenRefused
                self.lose(f"the server did not store the token in {self.queue}: {answer.why}", kind)

    def _cancelled(self) -> None:
        self.lose(f"the server cancelled the consumer of {self.queue}, or the queue was deleted")

    # -- sending ----------------------------------------------------------------------------------------------------

    def _send(self, body: bytes) -> None:
        """It must come back in the time of a lease."""
        self._stop_timer()
        late = f"what was sent to {self.queue} did not come back in {self._answers.lease_s:g} s"
        self._timer = asyncio.get_running_loop().call_later(self._answers.lease_s, self.lose, late)
        self._publish(body)

    def _publish(self, body: bytes) -> None:
        self._channel.send([Outbound("", self.queue, _PERSISTENT, body)])

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _seen(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()
