"""Who is in a group. Members report to each other that they are alive and what they hold.

Each member has a queue of its own, bound to a fanout exchange of the group. Members also consume a queue that never
gets a message. Its number of consumers is the number of live members, so a process that asks for all members knows how
many answers to wait for.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from onward import clock
from onward.brokers.base import MemberInfo
from onward.brokers.core.observed import Observed
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.amqp import (
    AmqpError,
    Channel,
    ChannelClosed,
    Connection,
    Outbound,
    Properties,
    Received,
    encoded_properties,
)
from onward.brokers.rabbitmq.server_errors import explained
from onward.errors import BrokerError

log = logging.getLogger("onward")

ANSWER_S = 2.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # before joining again
_CLOSE_S = 1.0
_MOST_GONE = 1_000  # names to remember, the newest
_TRANSIENT = encoded_properties(Properties(delivery_mode=1))


class PresenceNote(msgspec.Struct, frozen=True, tag="note", tag_field="onward", omit_defaults=True):
    """What a member reports about itself."""

    owner: str  # unique for each subscription
    member: str  # a text that MemberInfo.parse reads
    lease_s: float
    beat: int
    held: dict[int, tuple[int, int]] = {}  # by index of a partition: the fence and the watermark
    gone: tuple[str, ...] = ()  # names of members that have no process left
    is_leaving: bool = False


class PresenceCall(msgspec.Struct, frozen=True, tag="call", tag_field="onward"):
    """Asks every member for a note."""

    reply_to: str


_decode = msgspec.msgpack.Decoder(PresenceNote | PresenceCall).decode
_encode = msgspec.msgpack.Encoder().encode


class PresencePlace(NamedTuple):
    topic: str
    group: str

    @property
    def exchange(self) -> str:
        return names.members_exchange(self.topic, self.group)

    def new_queue(self) -> str:
        """A name for a queue of one process."""
        return f"{self.exchange}.{uuid4().hex}"

    @property
    def roll(self) -> str:
        """The queue that every member consumes."""
        return names.members_exchange(self.topic, self.group)


class PresenceSelf(NamedTuple):
    owner: str
    member: str
    lease_s: float
    gone: frozenset[str] = frozenset()


class PresenceLink:
    """The channel of a member that has joined. `cut` is done with the reason when the others do not hear it, or it does
    not hear them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.cut: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.unheard_since: float | None = None  # since when our own notes do not reach us
        channel.closing.add_done_callback(lambda closing: self.end(str(closing.result())))

    def end(self, why: str) -> None:
        if not self.cut.done():
            self.cut.set_result(why)

    def look_for_echo(self, now: float, lease_s: float) -> None:
        """Our notes reach our own queue too. If none does for a lease, its binding was removed."""
        if self.unheard_since is None or self.channel.connection.blocked is not None:  # then the server takes no notes
            self.unheard_since = now
        elif now > self.unheard_since + lease_s:
            self.end("what this member sends does not reach its own queue; was its binding removed?")

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError, AmqpError):
            async with asyncio.timeout(_CLOSE_S):
                await self.channel.close()


class Presence:
    """This member's part. All of it runs in the loop of the connection. `trouble`: why the others do not hear it."""

    def __init__(
        self,
        place: PresencePlace,
        me: PresenceSelf,
        *,
        held: Callable[[], Mapping[int, tuple[int, int]]] = dict,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`held` is called for each note. `on_change`: the live members, or what they hold, may have changed."""
        self._place = place
        self._me = me
        self._held = held
        self._on_change = on_change
        self._others: dict[str, PresenceNote] = {}
        self._observed = Observed()
        self._gone = dict.fromkeys(me.gone)  # names of members that have no process left
        self._beat = 0
        self._link: PresenceLink | None = None
        self.trouble = ""

    # -- what is known ----------------------------------------------------------------------------------------------

    @property
    def owner(self) -> str:
        return self._me.owner

    @property
    def gone(self) -> frozenset[str]:
        """The names of members that have no process left, as this member or another one knows."""
        return frozenset(self._gone)

    def live(self) -> dict[str, str]:
        """The other members whose lease has not ended: by owner, the member's text."""
        return {owner: note.member for owner, note in self.notes().items()}

    def notes(self) -> dict[str, PresenceNote]:
        """The last note of each other live member."""
        now = clock.now()
        self._drop([owner for owner, note in self._others.items() if self._observed.is_over(owner, note.lease_s, now)])
        return dict(self._others)

    def over_at(self) -> float:
        """When the first of the others is no longer live, if it is not heard again."""
        times = [self._observed.over_at(owner, note.lease_s) or 0.0 for owner, note in self._others.items()]
        return min(times, default=float("inf"))

    def forget(self, owner: str) -> None:
        """This member does not answer the server any more. It counts again when it is heard again."""
        if owner in self._others:
            self._drop([owner])
            self._on_change()

    # -- talking ----------------------------------------------------------------------------------------------------

    async def open(self, connection: Connection) -> None:
        """Join: report to the others, and ask them for notes. Again after each new connection."""
        place, self._link = self._place, None
        channel = await connection.channel()
        link = PresenceLink(channel)
        await declare(channel, *place)
        mine = place.new_queue()
        await channel.declare_queue(mine, durable=False, exclusive=True, auto_delete=True)
        await channel.bind_queue(mine, place.exchange)
        for queue, arrived, no_ack in ((mine, self._arrived, True), (place.roll, _pass_over, False)):
            why = f"the server cancelled the consumer of queue {queue}; was the queue deleted?"
            await channel.consume(queue, arrived, no_ack=no_ack, on_cancel=functools.partial(link.end, why))
        self._link, self.trouble = link, ""
        self.announce()
        self._send(place.exchange, "", PresenceCall(mine))

    async def stay(self, connection: Connection, *, patience_s: float = math.inf) -> None:
        """After `open`, until the connection ends: join again when something of the group's exchange or queues was
        deleted. Raises BrokerError if that fails for so long."""
        while (link := self._link) is not None:
            why = await asyncio.shield(link.cut)
            if connection.is_closed:
                return
            log.warning("RabbitMQ: %s: %s; this member joins again", self._place.exchange, why)
            self._link = None
            await link.close()  # so that the member is counted once
            await self._join_again(connection, patience_s)

    async def _join_again(self, connection: Connection, patience_s: float) -> None:
        since, pause_s = clock.now(), _PAUSE_S
        while not connection.is_closed:
            await asyncio.sleep(pause_s)
            try:
                return await self.open(connection)
            except ChannelClosed as error:
                self.trouble = explained(error, f"exchange {self._place.exchange}, over which members report")
                if clock.now() > since + patience_s:
                    raise BrokerError(self.trouble) from error
            except AmqpError:
                return  # the connection has ended
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def announce(self, *, leaving: bool = False) -> None:
        if self._link is not None:
            self._link.look_for_echo(clock.now(), self._me.lease_s)
        self._beat += 1
        self._send(self._place.exchange, "", self._note(leaving=leaving))

    def close(self) -> None:
        """Send no more notes, and answer no more calls."""
        self._link = None

    def _note(self, *, leaving: bool = False) -> PresenceNote:
        owner, member, lease_s, _ = self._me
        return PresenceNote(owner, member, lease_s, self._beat, dict(self._held()), tuple(self._gone), leaving)

    def _send(self, exchange: str, key: str, message: PresenceNote | PresenceCall) -> None:
        if self._link is not None and not self._link.channel.is_closed:
            self._link.channel.send([Outbound(exchange, key, _TRANSIENT, _encode(message), mandatory=False)])

    def _arrived(self, messages: list[Received]) -> None:
        has_changed = False
        for each in messages:
            try:
                message = _decode(each.body)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # from another program, or a later version
            if isinstance(message, PresenceCall):
                self._send("", message.reply_to, self._note())
            elif message.owner == self._me.owner:
                if self._link is not None:
                    self._link.unheard_since = None
            else:
                has_changed |= self._heard(message)
        if has_changed:
            self._on_change()

    def _heard(self, note: PresenceNote) -> bool:
        """Whether the live members, or what they hold, may have changed."""
        known = self._others.get(note.owner)
        fresh = self._remember_gone(note.gone)
        if note.is_leaving or _name(note) in self._gone:  # a note of an ended process may arrive late
            self._drop([note.owner])
            return known is not None or fresh
        self._others[note.owner] = note
        self._observed.saw(note.owner, note.beat, clock.now())
        return fresh or known is None or known.held != note.held

    def _remember_gone(self, names: Iterable[str]) -> bool:
        """Whether one of these names is new. Their members count no longer."""
        fresh = dict.fromkeys(name for name in names if name not in self._gone)
        self._gone |= fresh
        while len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]
        self._drop([owner for owner, note in self._others.items() if fresh and _name(note) in fresh])
        return bool(fresh)

    def _drop(self, owners: Iterable[str]) -> None:
        for owner in owners:
            self._others.pop(owner, None)
            self._observed.forget({owner})


def _name(note: PresenceNote) -> str:
    return MemberInfo.parse(note.member).name


def _pass_over(_: list[Received]) -> None:
    """What another program sends to the queue that gets no message."""


async def declare(channel: Channel, topic: str, group: str) -> None:
    place = PresencePlace(topic, group)
    await channel.declare_exchange(place.exchange, "fanout")
    await channel.declare_queue(place.roll, arguments=names.QUORUM_ARGUMENTS)  # it survives the death of a node


async def delete(channel: Channel, topic: str, group: str) -> None:
    place = PresencePlace(topic, group)
    await channel.delete_queue(place.roll)
    await channel.delete_exchange(place.exchange)


async def asked(connection: Connection, topic: str, group: str, *, within_s: float = ANSWER_S) -> list[PresenceNote]:
    """The notes of all live members. One that is suspended does not answer, and is left out after `within_s`."""
    place = PresencePlace(topic, group)
    channel = await connection.channel()
    try:
        count = (await channel.declare_queue(place.roll, passive=True)).consumers
        return await _answers(channel, place, count, within_s) if count else []
    except ChannelClosed as error:
        if error.code == 404:  # the group was dropped, or has had no member yet
            return []
        raise
    finally:
        await channel.close()


async def counted(connection: Connection, topic: str, group: str) -> int:
    """How many live members the group has."""
    channel = await connection.channel()
    try:
        return (await channel.declare_queue(PresencePlace(topic, group).roll, passive=True)).consumers
    except ChannelClosed as error:
        if error.code == 404:
            return 0
        raise
    finally:
        await channel.close()


async def living(connection: Connection, topic: str, group: str) -> list[str]:
    """The names of all live members. One that does not answer, because it is suspended, has no name."""
    names_ = sorted(map(_name, await asked(connection, topic, group)))
    silent = max(0, await counted(connection, topic, group) - len(names_))
    return [*names_, *["a member that does not answer"] * silent]


async def _answers(channel: Channel, place: PresencePlace, count: int, within_s: float) -> list[PresenceNote]:
    found: dict[str, PresenceNote] = {}
    complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def arrived(messages: list[Received]) -> None:
        for each in messages:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # of another program
                note = _decode(each.body)
                if isinstance(note, PresenceNote):
                    found[note.owner] = note
        if len(found) >= count and not complete.done():
            complete.set_result(None)

    mine = place.new_queue()
    await channel.declare_queue(mine, durable=False, exclusive=True, auto_delete=True)
    await channel.consume(mine, arrived, no_ack=True)
    channel.send([Outbound(place.exchange, "", _TRANSIENT, _encode(PresenceCall(mine)), mandatory=False)])
    either: list[asyncio.Future[Any]] = [complete, channel.closing]
    await asyncio.wait(either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    return [note for note in found.values() if not note.is_leaving]
