"""Messages that are sent on: retries to a rung, returned messages to the suspects.

A retry waits in a rung, a queue. While its rung is not ready, it waits here: its message is not acknowledged, so that
the server has it if this process dies. When it is due, it is handed out again.
"""

import asyncio
import contextlib
import time
from typing import NamedTuple

import msgspec

from onward import clock
from onward.brokers.rabbitmq.amqp import Received
from onward.brokers.rabbitmq.work.retrying import WorkCourier, WorkParcel
from onward.brokers.rabbitmq.work.rungs import DUE_MS, RUNGS_MS, rung_for
from onward.brokers.rabbitmq.work.suspects import Suspects, suspected
from onward.brokers.rabbitmq.work.work_message import AMONG_OTHERS, Arrived, Fate, arrived, resent, type_of
from onward.brokers.rabbitmq.work.work_place import SUSPECTS, WorkPlace
from onward.brokers.rabbitmq.work.work_queue import WorkChannel, tier_of_message
from onward.event import Tries

_AGAIN_S = 1.0  # after the server has refused a message
_LOOK_S = 0.02  # how often to look at the retries that wait here
_HELD_S = 60.0  # a retry that has waited here for longer is sent to its queue again: the server limits this time


class Diverted(NamedTuple):
    message: Received
    parcel: WorkParcel


class HeldRetry(NamedTuple):
    """A retry that waits here. `message` tells of all attempts so far. `since`, `due`: see clock.now."""

    tier: str
    message: Received
    since: float
    due: float


class Diversions:
    """Runs in the I/O thread."""

    def __init__(self, place: WorkPlace, courier: WorkCourier, suspects: Suspects) -> None:
        self._place = place
        self._courier = courier
        self._suspects = suspects
        self._outbox: list[Diverted] = []
        self._returned: asyncio.Queue[tuple[Received, Arrived]] = asyncio.Queue()  # suspects to decide about
        self._held: dict[int, HeldRetry] = {}  # by tag
        self._wanted: set[tuple[str, int]] = set()  # tiers and rungs to declare
        self._wake = asyncio.Event()
        self._wake_holder = asyncio.Event()
        self._refusal = ""

    @property
    def trouble(self) -> str:
        """Why some messages cannot be sent on, or not to the right rung. Any thread may ask."""
        return self._refusal or self._courier.trouble

    def sort(self, work: WorkChannel, tier: str, message: Received) -> None:
        """Hand the message out, or have it sent on."""
        found = arrived(message)
        if message.redelivered:
            work.prefetch.came_back(clock.now())
        if tier == SUSPECTS:
            if message.redelivered:
                self._returned.put_nowait((message, found))
            else:
                _hand_out_suspect(work, message, found)
            return
        wall = time.time()
        fate = found.fate(wall, is_counted=self._place.is_counted)
        if fate is Fate.HAND_OUT:
            work.hand_out(tier, message, found.state.tries)
        elif fate is Fate.SUSPECT:
            self._send(message, suspected(message, found, type_of(message)))
        else:
            self._hold(tier, message, found.state.waits_ms(wall))

    def retry(self, tier: str, message: Received) -> None:
        """Let this message wait until it is due. Its headers tell of the attempt that has failed."""
        if tier_of_message(message) == SUSPECTS:  # the next suspect waits until this one is acknowledged
            self._send(message, WorkParcel(tier, None, message.properties, message.body))
        else:
            self._hold(tier, message, arrived(message).state.waits_ms(time.time()))

    def take_held(self) -> list[Received]:
        """The retries that wait here. They are not handed out any more."""
        held, self._held = self._held, {}
        return [each.message for each in held.values()]

    def _hold(self, tier: str, message: Received, left_ms: float) -> None:
        now = clock.now()
        self._held[message.tag] = HeldRetry(tier, message, now, now + left_ms / 1_000)
        self._wake_holder.set()

    async def hold(self, work: WorkChannel) -> None:
        """Look at the retries that wait here, until it is cancelled."""
        while True:
            await self._wake_holder.wait()
            self._wake_holder.clear()
            while self._held:
                now = clock.now()
                for each in list(self._held.values()):
                    if self._lets_go(work, each, now):
                        self._held.pop(each.message.tag, None)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake_holder.wait()
                self._wake_holder.clear()

    def _lets_go(self, work: WorkChannel, held: HeldRetry, now: float) -> bool:
        """Hand it out if it is due, or have it sent to its rung if that is ready."""
        tier, message = held.tier, held.message
        left_ms = (held.due - now) * 1_000
        if left_ms <= DUE_MS:
            self._hand_out(work, tier, message)
            return True
        rung_ms = rung_for(left_ms)
        if rung_ms is None or left_ms < RUNGS_MS[0]:
            return False
        if self._courier.is_ready(tier, rung_ms):
            if not self._courier.is_blocked:
                self._send(message, self._parcel(tier, message, left_ms, rung_ms))
                return True
        else:
            self._wanted.add((tier, rung_ms))
            self._wake.set()
        if now > held.since + _HELD_S:
            self._send(message, self._parcel(tier, message, left_ms, None))
            return True
        return False

    def _hand_out(self, work: WorkChannel, tier: str, message: Received) -> None:
        found = arrived(message)
        tries = found.state.tries
        if tries.crashes or tries.started:
            self._send(message, suspected(message, found, type_of(message)))
        else:
            work.hand_out(tier, message, tries)

    def _parcel(self, tier: str, message: Received, left_ms: float, rung_ms: int | None) -> WorkParcel:
        state = msgspec.structs.replace(arrived(message).state, left_ms=left_ms).after(rung_ms)
        return WorkParcel(tier, rung_ms, resent(message, state, type_=type_of(message)), message.body)

    async def send_on(self, work: WorkChannel) -> None:
        """Send on what was sorted, until it is cancelled. Raises AmqpError if that is not possible any more."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            wanted, self._wanted = self._wanted, set()
            for tier, rung_ms in sorted(wanted):
                await self._courier.declare(tier, rung_ms)
            batch, self._outbox = self._outbox, []
            if batch:
                await self._send_batch(work, batch)

    async def _send_batch(self, work: WorkChannel, batch: list[Diverted]) -> None:
        answers = await self._courier.send([each.parcel for each in batch])
        work.acks.ack([each.message.tag for each, why in zip(batch, answers, strict=True) if why is None])
        again: list[Diverted] = []
        self._refusal = ""
        for each, why in zip(batch, answers, strict=True):
            if why is None:
                continue
            if each.parcel.rung_ms is None:
                self._refusal = why
                again.append(each)
            else:
                left_ms = arrived(each.message).state.waits_ms(time.time())
                self._hold(each.parcel.tier, each.message, left_ms)
        if again:
            await asyncio.sleep(_AGAIN_S)
            self._outbox = again + self._outbox
            self._wake.set()

    async def judge(self, work: WorkChannel) -> None:
        """Decide about the suspects that were returned, one after the other, until it is cancelled. Raises AmqpError or
        BrokerError if that is not possible any more."""
        while True:
            message, found = await self._returned.get()
            if await self._suspects.killed_its_process(found.suspect):
                self._send(message, suspected(message, found, type_of(message), crashed=True))
            else:
                _hand_out_suspect(work, message, found)

    def _send(self, message: Received, parcel: WorkParcel) -> None:
        self._outbox.append(Diverted(message, parcel))
        self._wake.set()


def _hand_out_suspect(work: WorkChannel, message: Received, found: Arrived) -> None:
    tries = found.state.tries
    work.hand_out(SUSPECTS, message, Tries(tries.failed, AMONG_OTHERS, tries.crashes))
