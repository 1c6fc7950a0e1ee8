"""Events that may have killed their process.

A message that was returned twice is sent to the queue of suspects. A member reads that queue one message at a time, and
the control plane runs a suspect alone. Before that, its start is written to a stream. So if a suspect is returned, the
next member knows whether it was running, and in which process. It charges a crash only if that process has ended: a
lost connection returns messages too.
"""

from collections.abc import Awaitable, Callable
from uuid import uuid4

import msgspec

from onward.brokers.rabbitmq.amqp import (
    Channel,
    ChannelClosed,
    Connection,
    Outbound,
    Properties,
    Received,
    encoded_properties,
)
from onward.brokers.rabbitmq.names import LOG_ARGUMENTS, Arguments
from onward.brokers.rabbitmq.server_errors import explained
from onward.brokers.rabbitmq.stream_reader import EmptyStream, end_of, read
from onward.brokers.rabbitmq.work.retrying import WorkParcel
from onward.brokers.rabbitmq.work.rungs import Retrying
from onward.brokers.rabbitmq.work.work_message import AMONG_OTHERS, Arrived, resent
from onward.brokers.rabbitmq.work.work_place import SUSPECTS
from onward.errors import BrokerError
from onward.event import Tries

STARTS_ARGUMENTS: Arguments = {**LOG_ARGUMENTS, "x-max-age": "7D", "x-stream-max-segment-size-bytes": 1 << 20}
_PROPERTIES = encoded_properties(Properties(delivery_mode=2, content_type="application/json"))


class SuspectStart(msgspec.Struct, frozen=True):
    """A suspect runs alone. `owner`: the subscription in which it runs; empty: it does not run any more, and its
    process lives. `member`: the name of the process."""

    suspect: str
    owner: str = ""
    member: str = ""


_decode = msgspec.json.Decoder(SuspectStart).decode


class StartLog:
    """The starts of the suspects of a group."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection = connection
        self._stream = stream
        self._channel: Channel | None = None

    async def note(self, start: SuspectStart) -> None:
        """Returns when the start is stored. Raises BrokerError if it is not."""
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._connection.channel()
        message = Outbound("", self._stream, _PROPERTIES, msgspec.json.encode(start))
        (why,) = await self._channel.publish([message])
        if why is not None:
            raise BrokerError(f"stream {self._stream} did not store the start of an event: {why}; is the stream there?")

    async def last(self, suspect: str) -> SuspectStart:
        """Where this suspect was last started."""
        found: dict[str, SuspectStart] = {}

        def arrived(messages: list[Received]) -> None:
            for message in messages:
                try:
                    start = _decode(message.body)
                except (msgspec.MsgspecError, UnicodeDecodeError):  # of another program
                    continue
                found[start.suspect] = start

        try:
            end = await end_of(self._connection, self._stream)
            await read(self._connection, self._stream, offset="first", until=end, on_messages=arrived)
        except EmptyStream:
            return SuspectStart(suspect)
        except ChannelClosed as error:
            raise BrokerError(explained(error, f"stream {self._stream}")) from error
        return found.get(suspect, SuspectStart(suspect))


def suspected(message: Received, found: Arrived, type_: str, *, crashed: bool = False) -> WorkParcel:
    """The message as a suspect. `crashed`: the process has died in which it ran alone. It has a new name each time,
    because a start belongs to one name. `type_`: its type, if the publisher gave it none."""
    tries = Tries(found.state.tries.failed, AMONG_OTHERS, found.state.tries.crashes + crashed)
    state = Retrying(tries, first_failure=found.state.first_failure)
    return WorkParcel(SUSPECTS, None, resent(message, state, type_=type_, suspect=uuid4().hex), message.body)


class Suspects:
    """Decides about suspects that were returned. `owner`, `member`: of this subscription. `is_alive`: whether the
    subscription of a start lives; it may wait."""

    def __init__(
        self, starts: StartLog, owner: str, member: str, is_alive: Callable[[SuspectStart], Awaitable[bool]]
    ) -> None:
        self._starts = starts
        self._owner = owner
        self._member = member
        self._is_alive = is_alive
        self._running: set[str] = set()  # names of suspects whose start we have stored

    async def killed_its_process(self, suspect: str) -> bool:
        """Whether this suspect, which was returned, ran alone in a process that has ended."""
        start = await self._starts.last(suspect)
        if not start.owner:
            return False
        if start.owner != self._owner and not await self._is_alive(start):
            return True
        await self._starts.note(SuspectStart(suspect))
        return False

    async def starts_alone(self, suspect: str) -> None:
        """It is about to run alone. Returns when that is stored."""
        if suspect not in self._running:
            await self._starts.note(SuspectStart(suspect, self._owner, self._member))
            self._running.add(suspect)

    async def stays(self, suspect: str) -> None:
        """It does not run after all, or its process lives on without it."""
        if suspect in self._running:
            await self._starts.note(SuspectStart(suspect))
            self._running.discard(suspect)

    async def all_stay(self) -> None:
        for suspect in list(self._running):
            await self.stays(suspect)

    def done(self, suspect: str) -> None:
        self._running.discard(suspect)
