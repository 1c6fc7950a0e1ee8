"""A member's seat at one partition: it stands by at the token queue, takes over, owns, and stands by again.

Every member of a group has a seat at every partition. The server makes one of them the active consumer.
"""

import asyncio
import logging
import random
from typing import Protocol

from onward import clock
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError, ChannelClosed, Connection
from onward.brokers.rabbitmq.ordered.group_start import delete_silent
from onward.brokers.rabbitmq.ordered.ordered_hold import OrderedHold
from onward.brokers.rabbitmq.ordered.seat_trouble import SeatTrouble
from onward.brokers.rabbitmq.ordered.tenancy import Tenancy
from onward.brokers.rabbitmq.ordered.tenancy_parts import TenancyParts
from onward.brokers.rabbitmq.ordered.token import Token, wait_note
from onward.brokers.rabbitmq.ordered.token_channel import TokenChannel, TokenLater, TokenLost, TokenRefused, TokenSilent
from onward.brokers.rabbitmq.ordered.token_search import TokenSearch
from onward.brokers.rabbitmq.server_errors import explained, is_missing
from onward.errors import BrokerError
from onward.event import Partition

log = logging.getLogger("onward")

_PAUSE_S = 0.05  # before standing by again
_PASS_PAUSE_S = 0.2
_LONG_WAIT_S = 30.0  # a wait for the last owner that the operator should know of
# A queue whose leader has died is silent until the others have elected a new one, so replace it only after a while. But
# about a minute after a consume that the queue did not answer, the server closes the connection.
_SILENT_S = 30.0
_MOST_PASSES, _PASSES_S = 3, 1.0  # then a member accepts a partition although it has enough


class SeatOffice(Protocol):
    """What a seat asks of its member."""

    @property
    def is_open(self) -> bool:
        """Whether this member takes partitions."""

    def accepts(self, partition: Partition) -> bool:
        """Whether this member should own one more."""

    def accepted_anyway(self, partition: Partition) -> None:
        """It owns one more than it should, because no other member takes it."""

    def new_tenure(self) -> str: ...
    def ended(self, tenure: str) -> None: ...
    def wait_s(self, partition: Partition, token: Token) -> float:
        """How long to wait before the first event."""

    def took_over(self, partition: Partition, token: Token) -> None:
        """The partition is claimed. The owner that this token names may have died."""

    def changed(self) -> None:
        """What this member holds has changed."""

    def is_claimed_elsewhere(self, partition: Partition) -> bool: ...
    def may_replace(self, partition: Partition) -> bool:
        """Whether this member, and no other one, may delete the partition's token queue: no member has it."""

    async def queue_is_missing(self, partition: Partition) -> None:
        """Create the token queue again, unless the group was dropped."""


class KnownQueue:
    """What a seat knows of its queue."""

    def __init__(self) -> None:
        self.is_new = False  # it was missing, so it has no token
        self.is_doubtful = False  # it was silent, and has not answered since
        self.silent_since: float | None = None  # on this connection


class TokenSeat:
    def __init__(self, partition: Partition, office: SeatOffice, parts: TenancyParts) -> None:
        self.partition = partition
        self.trouble = SeatTrouble(partition, parts.group, parts.settings.lease_s)
        self.tenancy: Tenancy | None = None
        self._office = office
        self._parts = parts
        self._search = TokenSearch(partition, parts)
        self._is_taking = False
        self._known = KnownQueue()
        self._passes: list[float] = []

    @property
    def _queue(self) -> str:
        return names.token_queue(*self.partition, self._parts.group)

    @property
    def standing(self) -> tuple[int, int] | None:
        """The fence and the watermark, if we own the partition or wait for its last owner."""
        return None if self.tenancy is None else self.tenancy.standing

    @property
    def is_busy(self) -> bool:
        """Whether this member owns the partition, or is about to."""
        return self._is_taking

    async def give_up(self, *, drained: bool) -> None:
        """Give the partition to the next member. Nothing of it may start any more."""
        if self.tenancy is not None:
            await self.tenancy.end(drained=drained)

    def withdraw(self) -> OrderedHold | None:
        """Give the partition back at once, unless receive has reported it. That ownership is returned: it must be
        revoked, so that the member can release it."""
        if self.tenancy is None or self.tenancy.withdraw():
            return None
        return self.tenancy.hold

    def look(self, now: float, *, is_sure: bool) -> None:
        """Find out whether the partition has an owner. `is_sure`: this member stands by, and hears the others.

        What has failed here is no trouble once another member has the partition."""
        is_claimed = self._office.is_claimed_elsewhere(self.partition)
        if is_claimed and not self.is_busy:
            self.trouble.clear_all()
        if is_claimed or self.standing is not None or not is_sure:
            self.trouble.occupied()
        else:
            self.trouble.vacant(now, self._queue)

    async def run(self, connection: Connection) -> None:
        """Until the connection ends, the member takes no more partitions, or the task is cancelled."""
        self._known.silent_since = None
        self.trouble.occupied()
        while not connection.is_closed and self._office.is_open:
            try:
                pause_s = await self._live(connection)
            except TokenSilent as silent:
                pause_s = await self._silent(connection, silent.why)
            except TokenLost as lost:
                log.debug("RabbitMQ: %s stands by again: %s", self.partition, lost.why)
                self.trouble.lost(lost.why)
                pause_s = self.trouble.fault(lost.why) if isinstance(lost, TokenRefused | TokenLater) else _PAUSE_S
            except ChannelClosed as error:
                pause_s = self.trouble.fault(explained(error, f"queue {self._queue}"))
                if is_missing(error):
                    pause_s = await self._declared()
            except BrokerError as error:
                pause_s = self.trouble.fault(str(error))
            except AmqpError:
                return  # the connection has ended
            except Exception as error:
                log.exception("RabbitMQ: %s of group %s failed", self.partition, self._parts.group)
                pause_s = self.trouble.fault(f"unexpected error, tried again: {error!r}; the log has its traceback")
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)

    async def _silent(self, connection: Connection, why: str) -> float:
        """The server forgets a quorum queue if it is killed in the first seconds of it. The queue exists, but it never
        delivers or confirms anything again, so it is deleted and created again."""
        now = clock.now()
        if connection.blocked is not None:  # then the server answers nothing
            self._known.silent_since = None
            return _PAUSE_S
        self._known.is_doubtful = True
        if self._known.silent_since is None:
            self._known.silent_since = now
        if now < self._known.silent_since + _SILENT_S or not self._office.may_replace(self.partition):
            return self.trouble.fault(
                f"{why}; if this lasts and its node runs, a member deletes it and creates it again"
            )
        try:
            await delete_silent(connection, self._queue)
        except (AmqpError, BrokerError) as error:
            return self.trouble.fault(str(error))
        log.error(
            "RabbitMQ: %s of group %s: queue %s did not answer and is created again; its messages could not be read. "
            "The group goes on from the progress that the last owner noted, so some events run again",
            *(self.partition, self._parts.group, self._queue),
        )
        self._known.silent_since = None
        return await self._declared()

    def _answered(self) -> None:
        """The queue answers again."""
        if self._known.is_doubtful:
            self.trouble.clear()
            self._known = KnownQueue()

    async def _declared(self) -> float:
        try:
            await self._office.queue_is_missing(self.partition)
        except (AmqpError, BrokerError) as error:
            return self.trouble.fault(str(error))
        self._known.is_new = True
        return _PAUSE_S

    async def _live(self, connection: Connection) -> float:
        """From standing by to the end of an ownership. Returns how long to pause after it."""
        tenure, lease_s = self._office.new_tenure(), self._parts.settings.lease_s
        desk = await TokenChannel.open(connection, self._queue, tenure=tenure, lease_s=lease_s)
        try:
            newest = await self._newest(desk)
            if newest is not None and newest.is_clean and not self._accepts():
                return _PASS_PAUSE_S
            self._is_taking = True
            await self._own(connection, desk, newest)
        finally:
            self.tenancy, self._is_taking = None, False
            self._office.ended(tenure)
            await desk.close()
            self._office.changed()
        return _PAUSE_S

    async def _newest(self, desk: TokenChannel) -> Token | None:
        """Wait for our turn. If no member seems to have the token, the queue may be empty: a nudge finds that out."""
        if self._known.is_new or self._known.is_doubtful:
            self._known.is_new = False
            desk.nudge()
        while True:
            try:
                async with asyncio.timeout(random.uniform(1.0, 1.5) * self._parts.settings.lease_s):
                    return await desk.newest()
            except TimeoutError:
                if desk.is_silent:
                    raise TokenSilent(f"queue {self._queue} does not answer") from None
            finally:
                if desk.has_answered:
                    self._answered()
            if not desk.is_active and not self._office.is_claimed_elsewhere(self.partition):
                desk.nudge()

    def _accepts(self) -> bool:
        """Whether to take a partition that is free at once. The others are taken in any case, so that the wait
        for a dead owner begins only once."""
        if self._office.accepts(self.partition):
            self._passes.clear()
            return True
        now = clock.now()
        self._passes = [*(each for each in self._passes if each > now - _PASSES_S), now]
        if len(self._passes) <= _MOST_PASSES:
            return False
        self._office.accepted_anyway(self.partition)
        return True

    async def _own(self, connection: Connection, desk: TokenChannel, newest: Token | None) -> None:
        found = await self._search.real(connection, desk, newest)
        token = found.token

        try:
            self.tenancy = Tenancy(self.partition, self._parts, connection, desk, found)
            await self.tenancy.run(
                lambda: self._wait_s(token),
                lambda: self._office.took_over(self.partition, token),
            )
        finally:
            if self.standing is not None:
                self.trouble.clear()  # it was the owner, or has waited for the last one
            if self.tenancy is not None and self.tenancy.reader is not None:
                self.trouble.clear_all()
            await found.aside.close()

    def _wait_s(self, token: Token) -> float:
        """How long to wait for the last owner, from the moment its token was found. A long wait is a trouble."""
        waits_s = self._office.wait_s(self.partition, token)
        if token.awaits is not None and waits_s > _LONG_WAIT_S:
            self.trouble.warn(wait_note(token.awaits, waits_s))
        return waits_s
