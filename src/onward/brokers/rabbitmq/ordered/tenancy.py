"""One ownership of a partition: claim, wait for the last owner, check the log, then store progress until the end."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from onward import clock
from onward.brokers.base import AsideRecord, Assigned, Moved, Progress, record_log
from onward.brokers.core.folded_aside import AppliedMove
from onward.brokers.core.holdings import Hold
from onward.brokers.core.progress_codec import decode, encode
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import AmqpError, Connection
from onward.brokers.rabbitmq.aside.aside_log import AsideLost
from onward.brokers.rabbitmq.ordered.log_anchors import AnchorTrail, LogVerdict
from onward.brokers.rabbitmq.ordered.log_reader import PartitionReader, deleted
from onward.brokers.rabbitmq.ordered.log_start import LogStart, checked
from onward.brokers.rabbitmq.ordered.ordered_hold import OrderedHold, OrderedOwn
from onward.brokers.rabbitmq.ordered.tenancy_parts import TenancyParts
from onward.brokers.rabbitmq.ordered.token import Awaited, Token, encoded
from onward.brokers.rabbitmq.ordered.token_channel import TokenChannel, TokenLost
from onward.brokers.rabbitmq.ordered.token_search import FoundToken
from onward.brokers.rabbitmq.ordered.write_orders import WriteOrders
from onward.brokers.rabbitmq.server_errors import is_missing
from onward.errors import BrokerError
from onward.event import Partition

log = logging.getLogger("onward")

LIMIT_CHARS = 8_192  # of the progress in a token
_WITNESS_S = 60.0
_LAST_WRITE_S = 2.0
_RENEWALS = 3  # in the time of a lease


class Tenancy:
    """Runs in one task; `settle` and `end` are called by others."""

    def __init__(
        self, partition: Partition, parts: TenancyParts, connection: Connection, desk: TokenChannel, found: FoundToken
    ) -> None:
        self.partition = partition
        self.hold: OrderedHold | None = None
        self.reader: PartitionReader | None = None
        self._parts = parts
        self._connection = connection
        self._desk = desk
        self._found = found
        self._orders = WriteOrders()
        self._witnessed = (0.0, 0)  # when, and the watermark
        self._compacting: asyncio.Task[None] | None = None
        desk.on_lost = self._lost

    @property
    def standing(self) -> tuple[int, int] | None:
        """The fence and the watermark, once the claim is stored."""
        tenure = self._desk.tenure
        if tenure is None or tenure.held is None or self._desk.lost.done():
            return None
        return tenure.held.fence, tenure.held.watermark

    @property
    def is_ending(self) -> bool:
        return self._orders.is_ending

    def wake(self) -> None:
        """Look again, for example because the last owner is known to be gone."""
        self._orders.wake()

    async def settle(self, hold: OrderedHold, progress: Progress) -> bool:
        """Store this progress. False: the partition is not ours any more, and nothing was stored."""
        if self.hold is not hold or self._desk.lost.done():
            return False
        return await self._orders.settle(progress)

    async def store(self, records: Sequence[AsideRecord]) -> str | None:
        """Store records in the aside. Returns why they were refused. AsideLost: the partition is not ours any more."""
        with self._aside_in_use():
            return await self._found.aside.store(records, self._desk.held.fence)

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove records from the aside. AsideLost: the partition is not ours any more."""
        with self._aside_in_use():
            await self._found.aside.remove(ids, self._desk.held.fence)

    @contextlib.contextmanager
    def _aside_in_use(self) -> Iterator[None]:
        """An aside that can no longer be read is not read again, so the seat must start with a new one."""
        try:
            yield
        except BrokerError as error:
            if isinstance(error, AsideLost) or self._found.aside.is_closed:
                self._desk.lose(str(error))
            raise

    async def end(self, *, drained: bool) -> None:
        """Give the partition up. Returns when the last token is stored, or could not be stored."""
        if not self._desk.lost.done():
            await self._orders.end(drained=drained)

    def withdraw(self) -> bool:
        """Begin to give the partition back as it was, because nothing of it can have run. False: receive has reported
        it, so the member must release it."""
        if self.hold is not None and not self._parts.holdings.withhold(self.hold):
            return False
        self._orders.begin_end(drained=True)
        return True

    # -- the task ---------------------------------------------------------------------------------------------------

    async def run(self, wait_s: Callable[[], float], on_claim: Callable[[], None]) -> None:
        """Until the end. Raises TokenLost if another member may be the owner; BrokerError or AmqpError if the log
        cannot be read. `wait_s`: how long to wait for the last owner, from now."""
        found_at, base = clock.now(), self._found.token
        try:
            claim = base.claimed(self._me.tenure)
            if not wait_s():
                claim = msgspec.structs.replace(claim, awaits=self._me)
            await self._desk.write(claim)
            on_claim()
            await self._witness()
            while clock.now() < (until := found_at + wait_s()):
                if await self._rest(until):
                    return await self._finish()
            await self._begin()
            while not await self._rest(float("inf")):
                pass
            await self._finish()
        finally:
            self._orders.fail()
            if self._compacting is not None:
                self._compacting.cancel()
                await asyncio.wait([self._compacting])
            if self.reader is not None:
                await self.reader.close()

    @property
    def _me(self) -> Awaited:
        return Awaited(self._desk.name, self._parts.member, self._parts.settings.lease_s)

    async def _rest(self, until: float) -> bool:
        """Wait for something to do, and write a token if one is wanted or due. True: the ownership shall end."""
        desk, orders = self._desk, self._orders
        renew_at = desk.sure_until - self._parts.settings.lease_s * (1 - 1 / _RENEWALS)
        await orders.wait(min(renew_at, until) - clock.now(), desk.lost)
        if desk.lost.done():
            raise desk.loss()
        if orders.is_ending:
            return True
        if orders.has_settles or clock.now() >= renew_at:
            await self._write()
            if clock.now() > self._witnessed[0] + _WITNESS_S and self._witnessed[1] != desk.held.watermark:
                await self._witness()
            self._compact()
        return False

    async def _write(self) -> None:
        waiters = self._orders.taken()
        try:
            await self._desk.write(self._token(self._desk.held.awaits))
        except TokenLost:
            self._orders.answer(waiters, stored=False)
            raise
        if self.hold is not None:
            self.hold.own.sure_until = self._desk.sure_until
        self._orders.answer(waiters, stored=True)

    def _token(self, awaits: Awaited | None) -> Token:
        """The next token, with the latest progress."""
        following = msgspec.structs.replace(self._desk.held.next(), awaits=awaits)
        progress = self._orders.progress
        if progress is None or self.hold is None:
            return following
        text = encode(
            progress,
            fence=following.fence,
            clean=awaits is None,
            log_id=following.log_id,
            limit=LIMIT_CHARS,
            alphabet="bytes",
        )
        self._parts.holdings.throttle(self.hold, throttled=text.done_dropped > 0)
        return msgspec.structs.replace(
            following,
            watermark=progress.watermark,
            progress=text.text,
            anchors=self.hold.own.trail.below(progress.watermark),
            is_seed=False,
        )

    # -- becoming the owner -----------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        desk, aside, base = self._desk, self._found.aside, self._found.token
        start = await desk.unless_lost(self._start())
        if start.note:
            log.error("RabbitMQ: %s, group %s: %s", self.partition, self._parts.group, start.note)
        token = msgspec.structs.replace(start.token, awaits=self._me)
        if token != desk.held:
            await desk.write(token.next())
        if aside.log_id != token.log_id:
            await desk.unless_lost(aside.bury(token.log_id, token.fence))
        if self._orders.is_ending:
            return  # receive must not report it any more
        aside.on_moves = self._moved
        unclean = not base.is_clean or start.verdict is LogVerdict.CUT
        assigned = Assigned(
            self.partition,
            next(self._parts.epochs),
            token.fence,
            token.log_id,
            stored_progress(self.partition, token),
            unclean,
        )
        own = OrderedOwn(AnchorTrail(token.anchors), desk.sure_until)
        self.hold = Hold(assigned, own, position=token.watermark)
        self.reader = PartitionReader(self.hold, self._parts.holdings, self._parts.stalled, desk.lose)
        self.reader.start(self._connection, is_empty=start.is_empty)
        self._parts.holdings.add(self.hold)

    async def _start(self) -> LogStart:
        try:
            return await checked(self._connection, names.stream(*self.partition), self._desk.held)
        except AmqpError as error:
            if is_missing(error):
                raise BrokerError(deleted(self.partition)) from error
            raise

    def _moved(self, moves: Sequence[AppliedMove]) -> None:
        hold = self.hold
        for move in moves if hold is not None else ():
            assert hold is not None
            ids = [name for name in move.ids if record_log(name) == hold.log_id]
            if ids:
                self._parts.holdings.report(Moved(hold.partition, hold.epoch, ids, move.to, move.due))

    # -- the end ----------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Write the last token. Events that were never announced cannot have run, so the partition is given back as
        it was."""
        hold, holdings = self.hold, self._parts.holdings
        awaits = self._found.token.awaits
        if hold is not None and not holdings.withhold(hold):
            awaits = None if self._orders.is_drained else self._me.ended()
        token = self._token(awaits)
        self.hold = None
        if hold is not None:
            holdings.drop([hold], fenced=False)
        if token.awaits != self._desk.held.awaits or token.watermark != self._desk.held.watermark:
            with contextlib.suppress(TokenLost, TimeoutError):
                async with asyncio.timeout(_LAST_WRITE_S):
                    await self._desk.write(token)

    def _lost(self, why: str) -> None:
        """Called at the moment of the loss."""
        hold, self.hold = self.hold, None
        if hold is not None:
            log.info("RabbitMQ: %s of group %s is lost: %s", self.partition, self._parts.group, why)
            self._parts.holdings.drop([hold], fenced=True)
        self._orders.fail()

    # -- notes in the aside -----------------------------------------------------------------------------------------

    async def _witness(self) -> None:
        """Note how far the group is, in case the token is deleted. Without the note, more events would run again."""
        held = self._desk.held
        self._witnessed = clock.now(), held.watermark
        try:
            await self._desk.unless_lost(self._found.aside.witness(encoded(held), held.fence))
        except (AmqpError, BrokerError) as error:
            log.debug("RabbitMQ: %s: the progress was not noted: %s", self.partition, error)

    def _compact(self) -> None:
        if self._compacting is None or self._compacting.done():
            self._compacting = asyncio.create_task(self._compacted())

    async def _compacted(self) -> None:
        try:
            await self._found.aside.compact_if_long(self._desk.held.fence)
        except (AmqpError, BrokerError) as error:
            log.debug("RabbitMQ: %s: its aside was not compacted: %s", self.partition, error)


def stored_progress(partition: Partition, token: Token) -> Progress | None:
    """The progress in a token. None: nothing was stored yet."""
    if token.is_seed:
        return None
    found = decode(token.progress, token.watermark, log_id=token.log_id)
    return Progress(partition, 0, token.watermark, found.done_above, tries=found.tries)
