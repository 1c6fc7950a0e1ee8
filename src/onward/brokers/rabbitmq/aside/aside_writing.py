"""Writes entries into the stream of an aside, and waits until they are read back."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from uuid import uuid4

from onward.brokers.core.folded_aside import MOVE
from onward.brokers.rabbitmq.amqp import AmqpError, Channel, ChannelClosed, Connection, Outbound
from onward.brokers.rabbitmq.amqp.frames import Properties, encoded_properties
from onward.brokers.rabbitmq.aside.aside_entries import AsideEntry, EntryBatch, batches, encoded, entry_bytes
from onward.brokers.rabbitmq.aside.aside_reader import AsideReader
from onward.brokers.rabbitmq.server_errors import DIFFERS
from onward.errors import BrokerError

_ROUND_BYTES = 8 << 20  # that are on their way at the same time


class EntryRefused(BrokerError):
    """The server did not store an entry. `some_stored`: it may have stored others of the same call."""

    def __init__(self, text: str, *, some_stored: bool) -> None:
        super().__init__(text)
        self.some_stored = some_stored


class EntryChannel:
    """The channel on which all asides of a connection write."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()

    async def publish(self, stream: str, messages: Sequence[tuple[str, bytes]]) -> list[str | None]:
        """Publish these messages, each with its id. None: stored, else why not. Raises AmqpError if it is unknown.

        The server closes the channel if a message is too large. It may be a message of another aside, so these are
        published once more on a channel of their own."""
        outbound = [Outbound("", stream, _properties(id_), body) for id_, body in messages]
        try:
            return await (await self._opened()).publish(outbound)
        except ChannelClosed:
            channel = await self.connection.channel()
            try:
                return await channel.publish(outbound)
            finally:
                await channel.close()

    async def _opened(self) -> Channel:
        async with self._opening:
            if self._channel is None or self._channel.is_closed:
                self._channel = await self.connection.channel()
            return self._channel


def _properties(id_: str) -> bytes:
    return encoded_properties(
        Properties(content_type="application/msgpack", delivery_mode=2, message_id=id_, type="onward.aside")
    )


class SentBatch:
    """`answer` after it was read back: for a request how many records it moved, else whether it has an effect.
    `is_void`: it has to be written again, into the next generation."""

    def __init__(self, generation: int, entries: Sequence[AsideEntry]) -> None:
        self.generation = generation
        self.entries = entries
        self.answer: int | None = None
        self.is_void = False

    @property
    def is_done(self) -> bool:
        return self.is_void or self.answer is not None


class EntryWriter:
    """One writer of one aside."""

    def __init__(self, reader: AsideReader, channel: EntryChannel) -> None:
        self._id = uuid4().hex
        self._reader = reader
        self._channel = channel
        self._number = 0
        self._sent: dict[int, SentBatch] = {}

    def arrived(self, batch: EntryBatch, *, effective: bool) -> SentBatch | None:
        """The batch, if we wrote it and wait for it."""
        sent = self._sent.pop(batch.number, None) if batch.writer == self._id else None
        if sent is not None:
            key = batch.entries[0].key
            outcomes = self._reader.fold.facts.outcomes
            sent.answer = outcomes.get(key, 0) if key.startswith(MOVE) else int(effective)
        return sent

    def moved_on(self, generation: int) -> None:
        for sent in self._sent.values():
            sent.is_void = sent.is_void or sent.generation < generation

    async def write(self, entries: Iterable[AsideEntry]) -> bool:
        """Write entries that are not requests. False: they have no effect, because a newer owner has claimed the aside.

        Raises EntryRefused, and BrokerError if it is unknown whether they were stored."""
        effective, stored = True, False
        for some in _rounds(batches(entries)):
            todo: list[Sequence[AsideEntry]] = list(some)
            while todo:
                try:
                    sent = await self.send(todo)
                except EntryRefused as error:
                    raise EntryRefused(str(error), some_stored=stored or error.some_stored) from error
                stored = True
                effective = effective and all(each.answer != 0 for each in sent)
                todo = [each.entries for each in sent if each.is_void]
        return effective

    async def send(self, groups: Sequence[Sequence[AsideEntry]]) -> list[SentBatch]:
        """Write each group as one message into the current generation, and wait until all are read back or void."""
        reader, generation = self._reader, self._reader.fold.generation
        sent: dict[int, SentBatch] = {}
        for entries in groups:
            self._number += 1
            sent[self._number] = SentBatch(generation, entries)
        self._sent |= sent
        try:
            answers = await self._published(generation, sent)
            refused = [(each, why) for each, why in zip(sent.values(), answers, strict=True) if why is not None]
            if refused:
                if not await self._is_replaced(generation):
                    raise EntryRefused(refused[0][1], some_stored=len(refused) < len(sent))
                for each, _ in refused:
                    each.is_void = True
            await reader.until(lambda: all(each.is_done for each in sent.values()))
            return list(sent.values())
        finally:
            for number in sent:
                self._sent.pop(number, None)

    async def copy(self, entries: Iterable[AsideEntry], generation: int) -> None:
        """Write entries into this generation, and wait only until they are stored. BrokerError: they are not."""
        for some in _rounds(batches(entries)):
            sent: dict[int, SentBatch] = {}
            for group in some:
                self._number += 1
                sent[self._number] = SentBatch(generation, group)
            answers = await self._published(generation, sent)
            if why := next((each for each in answers if each is not None), None):
                raise EntryRefused(f"RabbitMQ: {self._reader.source.place} cannot be copied: {why}", some_stored=True)

    async def _published(self, generation: int, sent: Mapping[int, SentBatch]) -> list[str | None]:
        if self._reader.failure is not None:
            raise self._reader.failure
        source = self._reader.source
        messages = [(f"{self._id}:{number}", encoded(self._id, number, each.entries)) for number, each in sent.items()]
        try:
            return await self._channel.publish(source.stream(generation), messages)
        except AmqpError as error:
            if isinstance(error, ChannelClosed) and error.code == DIFFERS:  # too large
                raise EntryRefused(error.text, some_stored=len(sent) > 1) from error
            raise BrokerError(
                f"RabbitMQ: {source.place}: it is unknown whether records were stored: {error}"
            ) from error

    async def _is_replaced(self, generation: int) -> bool:
        """Whether the generation was deleted because there is a newer one. Then waits until that one is read."""
        reader = self._reader
        await reader.source.generations.catch_up()
        if max(reader.fold.generation, reader.source.registered()) <= generation:
            return False
        await reader.until(lambda: reader.fold.generation > generation)
        return True


def _rounds(groups: Iterable[list[AsideEntry]]) -> Iterator[list[list[AsideEntry]]]:
    """Several messages that are written together."""
    found: list[list[AsideEntry]] = []
    size = 0
    for group in groups:
        found.append(group)
        size += sum(entry_bytes(entry) for entry in group)
        if size >= _ROUND_BYTES:
            yield found
            found, size = [], 0
    if found:
        yield found
