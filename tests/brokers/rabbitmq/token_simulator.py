"""A model of a quorum queue with a single active consumer, and of members that use the rules of takeover.py on it.

One step of a run does one thing: the queue takes a message from the wire, a member takes a delivery, a process is
killed, a consumer disappears, and so on. A seed decides which. The checks know nothing of the rules."""

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

import msgspec

from onward.brokers.rabbitmq.ordered.takeover import Takeover, Tenure, TokenStep
from onward.brokers.rabbitmq.ordered.token import Awaited, Probe, Token, TokenArrival, wait_s

LEASE = 60.0
GRACE = 5.0
PREFETCH = 50


class Rules(NamedTuple):
    """Which rules the members follow. Without one of them, the checks must fail."""

    probe: bool = True
    back: bool = True  # a write counts when the token was delivered back; otherwise when it is confirmed
    wait: bool = True


class Violation(Exception):
    pass


class Queued(msgspec.Struct):
    message: Token | Probe
    deliveries: int = 0


class Consumer:
    """A consumer at the server, with the wires to and from its channel."""

    def __init__(self, member: "SimMember") -> None:
        self.member = member
        self.unacked: dict[int, Queued] = {}
        self.tags = 0
        self.to_client: deque[TokenArrival | int] = deque()  # a number is a confirm
        self.to_server: deque[tuple[str, object]] = deque()
        self.is_up = True


class SacQueue:
    """Delivers to the first consumer that is up. Returned messages come first."""

    def __init__(self, first: Token) -> None:
        self.ready: deque[Queued] = deque([Queued(first)])
        self.returned: deque[Queued] = deque()
        self.consumers: list[Consumer] = []
        self.wires: list[Consumer] = []  # also those of removed consumers: what they wrote may still arrive

    def add(self, consumer: Consumer) -> None:
        self.consumers.append(consumer)
        self.wires.append(consumer)
        self._deliver()

    def remove(self, consumer: Consumer) -> None:
        """Its channel ended. What it wrote is still on the wire."""
        if consumer in self.consumers:
            self.consumers.remove(consumer)
            self._return_all(consumer)

    def suspect(self, consumer: Consumer) -> None:
        """Its node does not answer: another consumer becomes active, and this one is not told."""
        consumer.is_up = False
        self._return_all(consumer)

    def trust(self, consumer: Consumer) -> None:
        """Its node answers again: it stands by behind the others."""
        if consumer in self.consumers and not consumer.is_up:
            consumer.is_up = True
            self.consumers.remove(consumer)
            self.consumers.append(consumer)
        self._deliver()

    def take(self, wire: Consumer) -> None:
        """The next thing from this wire arrives."""
        kind, value = wire.to_server.popleft()
        if kind == "publish":
            assert isinstance(value, Token | Probe)
            self.ready.append(Queued(value))
            if isinstance(value, Token) and wire.is_up:
                wire.to_client.append(value.number)
        elif kind == "ack":
            assert isinstance(value, int)
            wire.unacked.pop(value, None)
        else:
            assert isinstance(value, int)
            for tag in [tag for tag in wire.unacked if tag <= value]:
                del wire.unacked[tag]
        self._deliver()

    def _return_all(self, consumer: Consumer) -> None:
        self.returned.extend(consumer.unacked.values())
        consumer.unacked.clear()
        self._deliver()

    def _deliver(self) -> None:
        active = next((each for each in self.consumers if each.is_up), None)
        while active is not None and len(active.unacked) < PREFETCH and (self.returned or self.ready):
            queued = self.returned.popleft() if self.returned else self.ready.popleft()
            active.tags += 1
            active.unacked[active.tags] = queued
            active.to_client.append(TokenArrival(active.tags, queued.deliveries > 0, queued.message))
            queued.deliveries += 1


class SimMember:
    """One process. It stands by again whenever it has lost the token."""

    def __init__(self, world: "World", name: str, gone: frozenset[str]) -> None:
        self.world, self.name, self.gone = world, name, gone
        self.closed: set[str] = set()
        self.lives = 0
        self.stopped_until = 0.0
        self.stand_by()

    def stand_by(self) -> None:
        self.lives += 1
        self.consumer = Consumer(self)
        self.takeover = Takeover(Probe(f"{self.name}:{self.lives}"))
        self.tenure: Tenure | None = None
        self.ready_at: float | None = None
        self.owns = False
        self.started = 0.0
        self.releasing = False
        self.world.queue.add(self.consumer)

    @property
    def sure_until(self) -> float:
        return self.tenure.sure_since + LEASE if self.tenure is not None and self.owns else 0.0

    # -- what happens to it -----------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take the next thing from the wire."""
        arrival = self.consumer.to_client.popleft()
        if not isinstance(arrival, TokenArrival):
            return self._confirmed(arrival)
        if self.tenure is not None:
            reaction = self.tenure.delivered(arrival)
        else:
            if not self.takeover.is_active:
                self.started = self.world.now
            reaction = self.takeover.delivered(arrival)
        for tag in reaction.acks:
            self.consumer.to_server.append(("ack", tag))
        if reaction.ack_to:
            self.consumer.to_server.append(("ack_to", reaction.ack_to))
        self._step(reaction.step)

    def _step(self, step: TokenStep) -> None:
        if step is TokenStep.PROBE:
            if not self.world.rules.probe:
                return self._found()
            self.consumer.to_server.append(("publish", self.takeover.probe))
        elif step is TokenStep.FOUND:
            self._found()
        elif step is TokenStep.STORED:
            self._stored()
        elif step is TokenStep.LOST:
            self.lose()

    def _found(self) -> None:
        newest = self.takeover.newest
        if newest is None:
            self.world.fail("the token is gone")
        if newest.is_clean and self.world.random.random() < 0.1:
            return self.lose()  # it has enough partitions
        self.tenure = Tenure(f"{self.name}:{self.lives}", self.takeover.unacked)
        wait = wait_s(newest.awaits, gone=self.gone, closed=self.closed, grace_s=GRACE)
        self.ready_at = self.world.now + (wait if self.world.rules.wait else 0.0)
        self._write(newest.claimed(self.tenure.name))

    def _write(self, token: Token) -> None:
        assert self.tenure is not None
        self.tenure.send(token, self.world.now)
        self.consumer.to_server.append(("publish", token))

    def _confirmed(self, number: int) -> None:
        tenure = self.tenure
        if self.world.rules.back or tenure is None or tenure.sent is None or tenure.sent.number != number:
            return
        tenure.held, tenure.sure_since, tenure.sent = tenure.sent, tenure.sent_at, None
        self._stored()

    def _stored(self) -> None:
        assert self.tenure is not None
        held = self.tenure.held
        assert held is not None
        self.world.stored(held)
        if held.awaits is not None and held.awaits.tenure == self.tenure.name and not self.owns:
            self.owns = True
        if self.releasing:
            self.lose()

    # -- what it does -----------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Settle, renew, start or release, as it may do now."""
        tenure, now = self.tenure, self.world.now
        if tenure is None:
            if self.takeover.is_active and now > self.started + LEASE:
                self.lose()  # its probe went to another member
            return
        if tenure.is_overdue(now, LEASE):
            return self.lose()
        if tenure.sent is not None or tenure.held is None or self.releasing:
            return
        # Every write counts as a settle, so that the checks see each one that was lost.
        held = msgspec.structs.replace(tenure.held.next(), watermark=tenure.held.watermark + 1)
        if not self.owns:
            if self.ready_at is not None and now >= self.ready_at:
                self._write(msgspec.structs.replace(held, awaits=Awaited(tenure.name, self.name, LEASE)))
            elif now > tenure.sure_since + LEASE / 3:
                self._write(held)
        elif self.world.random.random() < 0.1:
            self.releasing = True
            self.owns = False
            assert held.awaits is not None
            drained = self.world.random.random() < 0.5
            self._write(msgspec.structs.replace(held, awaits=None if drained else held.awaits.ended()))
        elif now < self.sure_until:
            self._write(held)

    def lose(self) -> None:
        """Close the channel and stand by again."""
        if self.tenure is not None:
            self.closed.add(self.tenure.name)
        self.owns = False
        self.world.queue.remove(self.consumer)
        self.stand_by()


class World:
    def __init__(self, seed: int, rules: Rules = Rules(), *, members: int = 3) -> None:  # noqa: B008
        self.random = random.Random(seed)
        self.rules = rules
        self.now = 0.0
        self.queue = SacQueue(Token(0, 0, "seed", "t", "t", 0, is_seed=True))
        self.names = 0
        self.reports: list[Token] = []  # the last ones
        self.count = 0
        self.members: list[SimMember] = []
        for _ in range(members):
            self.members.append(self._member(frozenset()))

    def _member(self, gone: frozenset[str]) -> SimMember:
        self.names += 1
        return SimMember(self, f"m{self.names}", gone)

    # -- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now += self.random.choice((0.0, 0.1, 1.0))
        choices = list(self._choices())
        if choices:
            self.random.choice(choices)()
        self.check()

    def _choices(self) -> Iterator[Callable[[], None]]:
        for wire in self.queue.wires:
            if wire.to_server:
                yield from [functools.partial(self.queue.take, wire)] * 8
        for member in self.members:
            if self.now < member.stopped_until:
                continue
            if member.consumer.to_client:
                yield from [member.take] * 8
            yield from [member.work] * 4

    def trouble(self) -> None:
        """Something bad happens to a random member."""
        member = self.random.choice(self.members)
        kind = self.random.randrange(5)
        if kind == 0:
            self.kill(member, supervised=self.random.random() < 0.3)
        elif kind == 1:
            self.queue.remove(member.consumer)  # its connection has ended, and it does not know that yet
        elif kind == 2:
            self.queue.suspect(member.consumer)
        elif kind == 3:
            self.queue.trust(member.consumer)
        else:
            member.stopped_until = self.now + self.random.choice((3.0, LEASE / 2, 2 * LEASE))

    def notice(self) -> None:
        """A member whose consumer is gone finds out."""
        for member in self.members:
            if member.consumer not in self.queue.consumers:
                return member.lose()

    def kill(self, member: SimMember, *, supervised: bool) -> None:
        self.queue.remove(member.consumer)
        keep = self.random.randrange(len(member.consumer.to_server) + 1)
        while len(member.consumer.to_server) > keep:
            member.consumer.to_server.pop()
        self.members.remove(member)
        gone = member.gone | {member.name} if supervised else frozenset[str]()
        self.members.append(self._member(gone))

    def run(self, steps: int) -> "World":
        for _ in range(steps):
            chance = self.random.random()
            if chance < 0.01:
                self.trouble()
            elif chance < 0.03:
                self.notice()
            self.step()
        return self

    def settle_down(self, within: float = 20 * LEASE) -> None:
        """Without further trouble, a member owns the token again."""
        for member in self.members:
            member.stopped_until = 0.0
            if member.consumer not in self.queue.consumers:
                member.lose()
            self.queue.trust(member.consumer)
        end, enough = self.now + within, self.count + 30
        while self.count < enough:
            if self.now > end:
                self.fail("nobody owns the token any more")
            self.step()

    # -- the checks -------------------------------------------------------------------------------------------------

    def fail(self, why: str) -> NoReturn:
        raise Violation(why)

    def stored(self, token: Token) -> None:
        """A member relies on this token from now on. Its settles were reported as stored."""
        for each in self.reports:
            older, later = sorted((each, token), key=lambda one: one.order)
            if older.watermark > later.watermark:
                self.fail(f"an older token was taken: {later.order} is behind what {older.order} had stored")
        self.count += 1
        self.reports.append(token)
        del self.reports[:-50]

    def check(self) -> None:
        sure = [member.name for member in self.members if self.now < member.sure_until]
        if len(sure) > 1:
            self.fail(f"{sure} are sure at the same time")
