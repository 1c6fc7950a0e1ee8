"""Settles what a member of a work group has done. A message is acknowledged when its event is handled, or when its dead
letter or its retry is stored."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from onward import clock
from onward.brokers.base import AsideRecord, Progress, State
from onward.brokers.rabbitmq.amqp import Received
from onward.brokers.rabbitmq.operate.figures import RabbitFigures, Status
from onward.brokers.rabbitmq.work.rungs import retrying
from onward.brokers.rabbitmq.work.work_message import ALONE, Arrived, arrived, resent, with_properties
from onward.brokers.rabbitmq.work.work_place import SUSPECTS
from onward.brokers.rabbitmq.work.work_queue import tier_of_message
from onward.brokers.rabbitmq.work.work_session import WorkIntake, WorkSession
from onward.errors import BrokerError

_LOOK_S = 0.1  # how soon an alarm is noticed


class LetterStore(Protocol):
    """Stores dead letters. See AsideStream."""

    @property
    def is_closed(self) -> bool: ...

    async def store(self, records: Sequence[AsideRecord], fence: int) -> str | None: ...
    async def close(self) -> None: ...


class LettersUnderWay(NamedTuple):
    """Dead letters that were sent. `answer`: why they were refused."""

    answer: "asyncio.Future[str | None]"
    positions: frozenset[int]


class WorkSettling:
    """The settles of one ownership. Runs in the I/O thread."""

    def __init__(
        self, session: WorkSession, intake: WorkIntake, open_letters: Callable[[], LetterStore], figures: RabbitFigures
    ) -> None:
        self.lock = asyncio.Lock()  # the mover holds it too, so that an event that dies again has one letter
        self._session = session
        self._work = intake.work
        self._open_letters = open_letters
        self._letters = open_letters()
        self._figures = figures
        self._stored: set[int] = set()  # open positions whose dead letter is stored
        self._waiting: set[int] = set()  # open positions whose retry waits
        self._storing: LettersUnderWay | None = None
        session.on_close(self._close)

    async def settle(self, progress: Progress | None, records: Sequence[AsideRecord]) -> dict[int, str]:
        """Returns the positions whose records were refused, and why. Everything else took effect.

        A repeated call sends no record again. Raises AmqpError or BrokerError if the answer was lost."""
        async with self.lock:
            if progress is not None and progress.tries:
                await self._mark(progress)
            refused = await self._store(records) if records else {}
            if progress is not None:
                self._ack([position for position in progress.fresh if position not in refused], records)
            return refused

    async def _mark(self, progress: Progress) -> None:
        """Store which suspects are about to run alone."""
        suspects = self._session.suspects
        for position, tries in progress.tries.items():
            message = self._work.open.get(position)
            if message is None or tier_of_message(message) != SUSPECTS:
                continue
            name = arrived(message).suspect
            if tries.started == ALONE:
                await suspects.starts_alone(name)
            else:
                await suspects.stays(name)

    async def _store(self, records: Sequence[AsideRecord]) -> dict[int, str]:
        open_ = self._work.open
        fresh = [
            each
            for each in records
            if each.position in open_ and each.position not in self._stored and each.position not in self._waiting
        ]
        wall = time.time()
        for each in fresh:
            if each.state is not State.DEAD:
                self._retry(each, open_[each.position], wall)
        dead = [self._dead(each, open_[each.position]) for each in fresh if each.state is State.DEAD]
        return await self._store_letters(dead)

    async def _store_letters(self, dead: Sequence[AsideRecord]) -> dict[int, str]:
        """During an alarm the server does not answer, and other events must not wait for it: the letters count as
        refused, and a later call waits on."""
        left = {each.position: each for each in dead}
        while left:
            if self._storing is None:
                storing = asyncio.ensure_future(self._letters.store(list(left.values()), 0))
                self._storing = LettersUnderWay(storing, frozenset(left))
            answer, places = self._storing
            while not answer.done():
                await asyncio.wait([answer], timeout=_LOOK_S)
                if not answer.done() and self._session.courier.is_blocked:
                    return dict.fromkeys(left, "RabbitMQ has an alarm")
            self._storing = None
            if (why := await self._why_refused(answer)) is not None:
                return dict.fromkeys(left, why)
            self._stored |= places & self._work.open.keys()
            left = {position: each for position, each in left.items() if position not in places}
        return {}

    async def _why_refused(self, answer: "asyncio.Future[str | None]") -> str | None:
        """If the stream of the letters was deleted, its reader has ended for good, and a new one declares it again. The
        letters may be stored or not, so they count as refused, and other events do not wait for them."""
        try:
            return answer.result()
        except BrokerError as error:
            if self._letters.is_closed:
                await self._letters.close()
                self._letters = self._open_letters()
            return str(error)

    async def _close(self) -> None:
        if self._storing is not None:
            self._storing.answer.cancel()
            await asyncio.wait([self._storing.answer])
        await self._letters.close()

    def _retry(self, record: AsideRecord, message: Received, wall: float) -> None:
        """From now on its headers tell of this attempt. As if it was returned: if this member leaves, the message must
        be sent with these headers."""
        tier = tier_of_message(message)
        if tier == SUSPECTS:
            tier = self._session.place.tier(record.event.type)
        state = retrying(record.tries, record.due, record.wait_s, wall, _first(arrived(message), record))
        properties = resent(message, state, id_=record.event.id, type_=record.event.type)
        self._session.diversions.retry(tier, message._replace(properties=properties, redelivered=True))
        self._waiting.add(record.position)

    def _dead(self, record: AsideRecord, message: Received) -> AsideRecord:
        """The letter with the time of the first failure, which was in another delivery, and with all properties."""
        record = record.whole()
        record = msgspec.structs.replace(record, event=with_properties(record.event, message))
        first = _first(arrived(message), record)
        if record.failure is None or first is None or first >= record.failure.first:
            return record
        return msgspec.structs.replace(record, failure=msgspec.structs.replace(record.failure, first=first))

    def _ack(self, positions: Sequence[int], records: Sequence[AsideRecord]) -> None:
        work = self._work
        now = clock.now()
        if self._waiting or self._stored:
            waiting = [position for position in positions if position in self._waiting]
            done = work.passed_on(waiting) + work.done(positions)
            self._waiting.difference_update(positions)
            self._stored.difference_update(positions)
        else:
            done = work.done(positions)
        for message in done:
            if message.consumer.startswith(SUSPECTS):
                self._session.suspects.done(arrived(message).suspect)
        work.prefetch.settled(len(done), now)
        self._count(done, records)

    def _queue(self, consumer: str) -> str:
        place = self._session.place
        return place.queues.get(consumer.partition("-")[0], place.suspects)

    def _count(self, done: Sequence[Received], records: Iterable[AsideRecord]) -> None:
        by_tier = Counter([message.consumer for message in done])
        states: Counter[Status] = Counter(["failed" if each.state is State.DEAD else "retried" for each in records])
        for consumer, count in by_tier.items():
            queue = self._queue(consumer)
            for status, found in states.items():
                part = min(count, found)
                self._figures.processed(queue, status, part)
                count -= part
                states[status] -= part
            if count:
                self._figures.processed(queue, "success", count)


def _first(found: Arrived, record: AsideRecord) -> float | None:
    """The time of the event's first failure."""
    known = found.state.first_failure
    return known if known is not None else record.failure.first if record.failure is not None else None
