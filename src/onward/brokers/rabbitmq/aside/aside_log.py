"""The aside of one place, as its owner and operators use it. Everything here runs in the loop of the connection.

The records are in a stream, see aside_fold. A writer reads on until it finds its own entry, so it knows what the entry
has changed.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from onward.brokers.base import AsideRecord, State, record_log
from onward.brokers.core.asides import buried
from onward.brokers.core.folded_aside import FENCE, AppliedMove, AsideRow, AsideTable, MoveRequest
from onward.brokers.rabbitmq.amqp import AmqpError, ChannelClosed
from onward.brokers.rabbitmq.aside.aside_bodies import bodies
from onward.brokers.rabbitmq.aside.aside_entries import (
    OPEN,
    AsideEntry,
    AsidePlace,
    EntryBatch,
    chain_offset,
    fence_entry,
    move_entry,
    next_entry,
    owned_entry,
    record_entry,
)
from onward.brokers.rabbitmq.aside.aside_reader import AsideMissing, AsideReader, AsideSource
from onward.brokers.rabbitmq.aside.aside_writing import EntryChannel, EntryRefused, EntryWriter
from onward.brokers.rabbitmq.server_errors import explained, is_missing
from onward.brokers.rabbitmq.stream_reader import EmptyStream, end_of
from onward.errors import BrokerError

log = logging.getLogger("onward")

OnMoves = Callable[[Sequence[AppliedMove]], None]

# RabbitMQ 3.10 stores a declaration some seconds later. Before that, a stream is not used in place of another one.
DECLARED_S = 5.0
DELETE_S = 5.0  # how long a closed generation is left to those who still read it
_FIRST_FENCES = 2  # up to so far above the fences of a former group, an owner may be the first one
_STEP = 200  # how many records have their bodies in memory at once
RECREATED = "the log of its partition is another one now; `onward dead send` publishes it again"


class AsideLost(BrokerError):
    """A newer owner has claimed the aside, so the call had no effect."""


class AsideStream:
    """One aside. Operators `follow` it, the owner `claim`s it, and a member of a work group just stores its dead
    letters.

    `on_moves` gets the requests of operators that took effect after the claim. After a BrokerError of any call, repeat
    the call; if the connection was lost, on a new object."""

    def __init__(self, source: AsideSource, channel: EntryChannel) -> None:
        self.place: AsidePlace = source.place
        self.on_moves: OnMoves | None = None
        self.is_new = False  # its stream did not exist before the claim
        self._source = source
        self._reader = AsideReader(source, self)
        self._writer = EntryWriter(self._reader, channel)
        self._claimed_at: int | None = None
        self._joining = asyncio.Lock()
        self._rewriting = asyncio.Lock()

    @property
    def table(self) -> AsideTable:
        return self._reader.fold.table

    @property
    def fence_seen(self) -> int:
        """The highest fence that was read."""
        return self._reader.fold.table.fence

    @property
    def witnessed(self) -> tuple[int, bytes] | None:
        """The fence and the progress that an owner witnessed last."""
        return self._reader.fold.facts.witnessed

    @property
    def log_id(self) -> str | None:
        """The id of the log to which the records belong, if the owner has noted it. See `bury`."""
        return self._reader.fold.facts.log_id

    @property
    def is_claimed(self) -> bool:
        """Whether this is the owner's, and can be used."""
        return self._claimed_at is not None and not self.is_closed

    @property
    def is_closed(self) -> bool:
        """Whether it can no longer be used, for example because the connection was lost."""
        return self._reader.failure is not None or self._source.connection.is_closed

    # -- reading --------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Begin to read. AsideMissing: there is nothing to read."""
        async with self._joining:
            if not self._reader.is_started:
                await self._reader.start()

    async def catch_up(self) -> None:
        """Read everything that was stored before this call. BrokerError: it cannot be read."""
        reader = self._reader
        while True:
            generation = reader.fold.generation
            end = await self._end(generation)
            await reader.until(partial(self._has_passed, generation, end))
            if reader.fold.generation == generation:
                return

    def _has_passed(self, generation: int, end: int) -> bool:
        return self._reader.fold.passed(generation, end)

    async def _end(self, generation: int) -> int:
        stream = self._source.stream(generation)
        try:
            return await end_of(self._source.connection, stream)
        except EmptyStream:
            return 0
        except AmqpError as error:
            if isinstance(error, ChannelClosed) and is_missing(error):
                await self._reader.until(lambda: self._reader.fold.generation != generation)
                return 0
            raise BrokerError(f"RabbitMQ: {explained(error, f'stream {stream}')}") from error

    async def records(self, rows: Sequence[AsideRow]) -> list[AsideRecord]:
        """The records of these rows, without those that were removed meanwhile. BrokerError: they cannot be read."""
        try:
            found = await bodies(self._source, rows)
        except AmqpError as error:
            raise BrokerError(f"RabbitMQ: records of {self.place} cannot be read: {error}") from error
        records = {row.id: row.record(found[row.id]) for row in rows if row.id in found}
        if absent := [row for row in rows if row.id not in found]:
            records |= {each.id: each for each in await self.records(await self._moved_rows(absent))}
        return [records[row.id] for row in rows if row.id in records]

    async def _moved_rows(self, rows: Sequence[AsideRow]) -> list[AsideRow]:
        """The bodies of these are no longer where they were: the stream was rewritten, or the records were removed."""
        await self.catch_up()
        current = [self.table.rows[row.id] for row in rows if row.id in self.table.rows]
        for row in [row for row in rows if row in current]:
            self.table.remove(row.id)
            log.error("RabbitMQ: record %s is lost: its entry in %s was removed by others", row.id, self.place)
        return [row for row in current if row not in rows]

    # -- the owner ------------------------------------------------------------------------------------------------

    async def claim(self, fence: int) -> AsideTable:
        """Become the owner: what owners with a lower fence write from now on has no effect. Returns the records.

        AsideLost: an owner with a higher fence has claimed it."""
        await self._join([fence_entry(fence)])
        self._reader.is_owner = True
        if self._claimed_at is None and not await self._writer.write([fence_entry(fence)]):
            raise AsideLost(f"RabbitMQ: {self.place} belongs to an owner with fence {self.fence_seen}, we have {fence}")
        if self.is_new and fence > self._source.generations.fence_floor(*self.place[:2]) + _FIRST_FENCES:
            log.error(
                "RabbitMQ: the stream of %s was deleted. Its records are lost; only Onward may delete it", self.place
            )
        await self._open()
        await self._register()
        return self.table

    async def _join(self, first: Sequence[AsideEntry] = ()) -> None:
        """Begin to read, and create the stream if it does not exist. Its first entries are then `first`."""
        async with self._joining:
            if self._reader.is_started:
                return
            async with self._source.using:
                try:
                    await self._reader.start()
                except AsideMissing:
                    await self._found()
            if self.is_new:
                await self._writer.write([AsideEntry(OPEN), *first])

    async def _found(self) -> None:
        """The generation is only missing if the registry does not know a newer one."""
        known = self._source.registered()
        await self._source.generations.catch_up()
        if self._source.registered() == known:
            await self._source.declare(known)
            self.is_new = True
        await self._reader.start()

    async def _open(self) -> None:
        """To be called after a write. A stream that is not open then was declared by one that was interrupted."""
        fold = self._reader.fold
        if not fold.is_open and fold.base is None:
            await self._writer.write([AsideEntry(OPEN)])

    async def store(self, records: Sequence[AsideRecord], fence: int = 0) -> str | None:
        """Store these records. Returns why they were refused; then none of them is stored. AsideLost: see there."""
        try:
            entries = [record_entry(record, fence) for record in records]
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            return f"a record cannot be encoded: {error}"
        try:
            await self._join()
        except EntryRefused as error:  # the first entry of a new stream
            return str(error)
        before = [self.table.rows.get(record.id) for record in records]
        try:
            await self._write(entries)
            await self._open()
        except EntryRefused as error:
            if error.some_stored:
                await self._undo(entries, before)
            return str(error)
        return None

    async def _undo(self, entries: Sequence[AsideEntry], before: Sequence[AsideRow | None]) -> None:
        """Restore what these entries have replaced."""
        known = {record.id: record for record in await self.records([row for row in before if row is not None])}
        fence = entries[0].fence
        again = [
            record_entry(known[entry.key], fence) if entry.key in known else AsideEntry(entry.key, None, fence)
            for entry in entries
        ]
        await self._writer.write(again)

    async def remove(self, ids: Iterable[str], fence: int = 0) -> None:
        """Remove these records. AsideLost: see there."""
        await self._join()
        known = self.table.rows
        await self._write(
            [AsideEntry(name, None, fence) for name in ids if name in known or not self._source.keeps_rows]
        )

    async def witness(self, progress: bytes, fence: int) -> None:
        """Note how far the owner is, in case its token is lost. AsideLost: see there."""
        await self._write([owned_entry(progress, fence)])

    async def bury(self, log_id: str, fence: int) -> int:
        """Note that the partition has this log now. Waiting and held records of a former log become dead letters: their
        positions belong to other events. Returns how many."""
        await self._write([fence_entry(fence, log_id)])
        rows = self.table.rows.values()
        stale = [row for row in rows if row.state is not State.DEAD and record_log(row.id) != log_id]
        for at in range(0, len(stale), _STEP):
            records = await self.records(stale[at : at + _STEP])
            await self._write([record_entry(buried(each, RECREATED, time.time()), fence) for each in records])
        if stale:
            log.warning("RabbitMQ: %d records of %s are dead letters now: %s", len(stale), self.place, RECREATED)
        return len(stale)

    async def _write(self, entries: Sequence[AsideEntry]) -> None:
        if not await self._writer.write(entries):
            raise AsideLost(f"RabbitMQ: {self.place} was claimed by an owner with fence {self.fence_seen}")

    # -- operators ------------------------------------------------------------------------------------------------

    async def request(self, name: str, request: MoveRequest) -> int:
        """Move or remove records as an operator. Returns how many. The same name again gives the same answer."""
        entry = move_entry(name, request)
        while True:
            known = self._reader.fold.facts.outcomes.get(entry.key)
            if known is not None:
                return known
            (sent,) = await self._writer.send([[entry]])
            if sent.answer is not None:
                return sent.answer
            await self.catch_up()

    # -- rewriting ------------------------------------------------------------------------------------------------

    async def compact_if_long(self, fence: int = 0) -> None:
        """Rewrite the aside into a new generation if it has become long, or complete an interrupted rewriting.

        It may take some time and can be cancelled at any moment; the next call completes it. AsideLost: see there."""
        fold = self._reader.fold
        if self._rewriting.locked() or (fold.base is None and not fold.is_long):
            return
        async with self._rewriting:
            if fold.base is None:
                await self._close_generation(fence)
            try:
                await self._copy()
            except AmqpError as error:
                raise BrokerError(f"RabbitMQ: {self.place} cannot be rewritten: {error}") from error

    async def _close_generation(self, fence: int) -> None:
        generation = self._reader.fold.generation
        await self._source.declare(generation + 1)
        await asyncio.sleep(DECLARED_S)
        (sent,) = await self._writer.send([[next_entry(generation + 1, fence)]])
        if sent.answer == 0 and self.fence_seen > fence:
            raise AsideLost(f"RabbitMQ: {self.place} was claimed by an owner with fence {self.fence_seen}")

    async def _copy(self) -> None:
        """Copy the state with which the current generation begins, so that the earlier one can be deleted."""
        reader, base, generation = self._reader, self._reader.fold.base, self._reader.fold.generation
        if base is None:
            return
        for at in range(0, len(base.rows), _STEP):
            rows = base.rows[at : at + _STEP]
            found = await bodies(self._source, rows)
            if reader.fold.base is not base:
                return  # another one has completed it
            if lost := [row.id for row in rows if row.id not in found]:
                log.error("RabbitMQ: %d records of %s are lost, such as %s", len(lost), self.place, lost[0])
            records = [row.record(found[row.id]) for row in rows if row.id in found]
            copies = [msgspec.structs.replace(record_entry(each, 0), copied=True) for each in records]
            await self._writer.copy(copies, generation)
        await self._writer.copy(base.last_entries(), generation)
        await reader.until(lambda: reader.fold.is_open or reader.fold.generation != generation)
        await self._register()
        await asyncio.sleep(DELETE_S)
        for old in (generation - 1, generation - 2):  # the second was left by an interrupted rewriting
            await self._source.delete(old)

    async def _register(self) -> None:
        """From now on, readers begin with this generation."""
        fold = self._reader.fold
        if fold.is_open and fold.generation > self._source.registered():
            await self._source.generations.set_generation(*self.place, fold.generation)

    async def close(self) -> None:
        await self._reader.close()

    # -- for the reader -------------------------------------------------------------------------------------------

    def arrived(self, batch: EntryBatch, place: tuple[int, int], *, effective: bool) -> None:
        sent = self._writer.arrived(batch, effective=effective)
        if self._claimed_at is None and sent is not None and effective and sent.entries[-1].key == FENCE:
            self._claimed_at = chain_offset(*place)
        claimed_at = math.inf if self._claimed_at is None else self._claimed_at
        moves = [move for move in self.table.news if move.offset > claimed_at]
        self.table.news.clear()
        if moves and self.on_moves is not None:
            self.on_moves(moves)

    def moved_on(self, generation: int) -> None:
        self._writer.moved_on(generation)
