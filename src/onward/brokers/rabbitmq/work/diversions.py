"""Messages whose headers must be read first: retries, and messages that were returned. Most are handed out; the others
are sent on, to the next rung or to the suspects."""

import asyncio
import time
from typing import NamedTuple

from onward import clock
from onward.brokers.rabbitmq.amqp import Received
from onward.brokers.rabbitmq.work.retrying import WorkCourier, WorkParcel
from onward.brokers.rabbitmq.work.rungs import rung_for
from onward.brokers.rabbitmq.work.suspects import Suspects, suspected
from onward.brokers.rabbitmq.work.work_message import AMONG_OTHERS, Arrived, Fate, arrived, resent
from onward.brokers.rabbitmq.work.work_place import SUSPECTS, WorkPlace
from onward.brokers.rabbitmq.work.work_queue import WorkChannel
from onward.event import Tries

_AGAIN_S = 1.0  # after the server has refused a message


class Diverted(NamedTuple):
    message: Received
    parcel: WorkParcel


class Diversions:
    """Runs in the I/O thread. `trouble`: why some messages cannot be sent on."""

    def __init__(self, place: WorkPlace, courier: WorkCourier, suspects: Suspects) -> None:
        self._place = place
        self._courier = courier
        self._suspects = suspects
        self._outbox: list[Diverted] = []
        self._returned: asyncio.Queue[tuple[Received, Arrived]] = asyncio.Queue()  # suspects to decide about
        self._wake = asyncio.Event()
        self.trouble = ""

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
            self._send(message, suspected(message, found, type_of(self._place, message)))
        else:
            rung_ms = rung_for(found.state.waits_ms(wall))
            properties = resent(message, found.state.after(rung_ms), type_=type_of(self._place, message))
            self._send(message, WorkParcel(tier, rung_ms, properties, message.body))

    async def send_on(self, work: WorkChannel) -> None:
        """Send on what was sorted, until it is cancelled. Raises AmqpError if that is not possible any more."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._outbox = self._outbox, []
            answers = await self._courier.send([each.parcel for each in batch])
            refused = [each for each, why in zip(batch, answers, strict=True) if why is not None]
            now = clock.now()
            for each, why in zip(batch, answers, strict=True):
                if why is None:
                    work.acks.ack_at(each.message.tag, self._courier.safe_at(each.parcel), now)
            self.trouble = next((why for why in answers if why is not None), "")
            if refused:
                await asyncio.sleep(_AGAIN_S)
                self._outbox = refused + self._outbox
                self._wake.set()

    async def judge(self, work: WorkChannel) -> None:
        """Decide about the suspects that were returned, one after the other, until it is cancelled. Raises AmqpError or
        BrokerError if that is not possible any more."""
        while True:
            message, found = await self._returned.get()
            if await self._suspects.killed_its_process(found.suspect):
                self._send(message, suspected(message, found, type_of(self._place, message), crashed=True))
            else:
                _hand_out_suspect(work, message, found)

    def _send(self, message: Received, parcel: WorkParcel) -> None:
        self._outbox.append(Diverted(message, parcel))
        self._wake.set()


def _hand_out_suspect(work: WorkChannel, message: Received, found: Arrived) -> None:
    tries = found.state.tries
    work.hand_out(SUSPECTS, message, Tries(tries.failed, AMONG_OTHERS, tries.crashes))


def type_of(place: WorkPlace, message: Received) -> str | None:
    """The type of an event to which its publisher, another program, gave none: it is the routing key."""
    return message.routing_key if place.is_typed and message.exchange else None
