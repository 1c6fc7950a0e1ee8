"""How a member keeps, gains and gives up partitions: a thread that takes turns.

A turn renews, looks, decides (`core.leasing`) and carries that out. Memory follows what the server has answered.
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from onward import clock
from onward.brokers.base import Moved, State
from onward.brokers.core import leasing
from onward.brokers.core.lease_requests import Requests, answer
from onward.brokers.core.leasing import Decisions, Situation
from onward.brokers.redis.foreign.reclaim import Reclaimer
from onward.brokers.redis.joined_topics import JoinedTopics
from onward.brokers.redis.lease_turn import Look, RedisTurn, TurnDone
from onward.brokers.redis.link import LinkDown
from onward.brokers.redis.member import RedisHold, RedisHoldings, RedisMember, RedisPlace
from onward.brokers.redis.trimmer import Trimmer
from onward.brokers.redis.turn_schedule import Step, TurnSchedule
from onward.errors import BrokerError, GroupDropped, OnwardError
from onward.event import Partition

log = logging.getLogger("onward")

_EXPIRY_SLACK_S = 0.02
_GLANCES = 20  # in the time of a lease
_LOOK_AGAIN_S = 0.3  # while a node does not answer
_notice = msgspec.msgpack.Decoder(tuple[str, State | None, float | None]).decode


class Chores(NamedTuple):
    """What an owner does for its partitions beside reading them."""

    trimmer: Trimmer
    reclaimer: Reclaimer


class LeaseKeeper:
    def __init__(
        self, turn: RedisTurn, member: RedisMember, joined: JoinedTopics, holdings: RedisHoldings, chores: Chores
    ) -> None:
        self.member = member
        self.failure: OnwardError | None = None
        self._turn = turn
        self._joined = joined
        self._holdings = holdings
        self._chores = chores
        self._schedule = TurnSchedule()
        self._requests: Requests[RedisPlace] = Requests()
        self._polled = clock.now()
        self._left = False

    # -- called by the subscription -------------------------------------------------------------------------------

    @property
    def group(self) -> str:
        return self.member.group

    @property
    def sure_until(self) -> float:
        """The earliest of all that is held."""
        return min([hold.own.sure_until for hold in self._holdings.all()], default=clock.now() + self._lease_s)

    @property
    def troubles(self) -> list[str]:
        if self.failure is not None:
            return [str(self.failure)]
        damaged = {hold.partition: hold.own.damage for hold in self._holdings.all() if hold.own.damage}
        broken = damaged | self._turn.unclaimed | dict(self._turn.broken)
        standing = [f"{partition} of group {self.group} stands still: {why}" for partition, why in broken.items()]
        standing += [
            f"no partition of topic {topic} changes its owner in group {self.group}: {why}"
            for topic, why in dict(self._turn.unlisted).items()
        ]
        standing += [f"members of group {self.group}: {why}" for why in dict(self._turn.damaged).values()]
        standing += [*self._chores.reclaimer.troubles, *filter(None, [self._turn.link.risk])]
        trouble = self._turn.link.trouble
        return [f"leases of group {self.group} cannot be renewed: {trouble}", *standing] if trouble else standing

    def polled(self) -> None:
        now = clock.now()
        if now - self._polled > self._turn.settings.max_poll_gap_s:
            self.look_at(now)
        self._polled = now

    def look_at(self, time: float) -> None:
        """Take a turn by then."""
        self._schedule.kick(time)

    def release(self, holds: Mapping[RedisHold, bool]) -> "asyncio.Future[None]":
        """Give these back, drained or not; done with the turn that did it."""
        with self._holdings.lock:
            self._requests.asked.update(holds)
        return self._next_turn()

    def leave(self) -> "asyncio.Future[None]":
        self._requests.leaving = True
        return self._next_turn()

    def join(self) -> None:
        """In a thread of the caller's, before `start`: become known, and free what gone members own."""
        link = self._turn.link
        link.connect()
        self._joined.join(link)
        if self.member.gone:
            self._turn.free_gone(self._turn.look(self._joined.partitions, ()))

    def start(self) -> None:
        self.look_at(0.0)
        self._chores.reclaimer.start(self.group, ring=lambda: self.look_at(0.0))
        threading.Thread(target=self._run, name=f"onward-redis-leases-{self.group}", daemon=True).start()

    def stop(self) -> None:
        self._schedule.close()
        self._chores.reclaimer.stop()

    def _next_turn(self) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        turned: asyncio.Future[None] = loop.create_future()
        with self._holdings.lock:
            self._requests.waiters.append((loop, turned))
        self.look_at(0.0)
        return turned

    # -- in its own thread ----------------------------------------------------------------------------------------

    @property
    def _lease_s(self) -> float:
        return self._turn.settings.lease_s

    def _run(self) -> None:
        while (step := self._schedule.wait()) is not Step.END:
            try:
                if step is Step.TURN:
                    self._take_turn()
                    self._schedule.succeeded()
                    self._turn.link.trouble = ""
                elif self.failure is None:
                    self._turn.glance()
                    self._schedule.kick(self._turn.watch.next_expiry + _EXPIRY_SLACK_S)
                self._schedule.glance(clock.now() + self._lease_s / _GLANCES)
            except LinkDown:
                self._holdings.restore()
                self._schedule.failed(by=max(self.sure_until, clock.now() + 0.1))
            except BrokerError as error:
                self._holdings.restore()
                self._turn.link.trouble = str(error)
                self._schedule.failed(by=max(self.sure_until, clock.now() + 0.1))
            except OnwardError as error:  # the topic is not as we expect any more: nothing of ours fits it
                self._fail(error)
            except Exception:
                log.exception("Redis: a turn of group %s failed; it is tried again", self.group)
                self._schedule.failed(by=max(self.sure_until, clock.now() + 0.1))
        self._turn.link.close()

    def _take_turn(self) -> None:
        with self._holdings.lock:
            requests, held = self._requests.taken(), dict(self._holdings.held)
        if self.failure is not None or self._left:
            return answer(requests.waiters)
        lapsed = self._lapse(held.values())
        self._turn.link.connect()  # which may take long
        lapsed += self._lapse([hold for hold in held.values() if hold not in lapsed])
        kept = {partition: hold for partition, hold in held.items() if hold not in lapsed}
        if requests.leaving:
            self._leave(requests, kept)
        elif clock.now() - self._polled > self._turn.settings.max_poll_gap_s:
            self._wind_down(requests, kept, lapsed)
        else:
            self._keep(requests, kept, lapsed)

    def _lapse(self, held: Iterable[RedisHold]) -> list[RedisHold]:
        """A lease that was not renewed in time is over for good, whatever the server would say: it may have lost the
        writes of the member that took over."""
        now = clock.now()
        lapsed = [hold for hold in held if hold.own.sure_until <= now]
        if lapsed:
            self._holdings.drop(lapsed, fenced=True)
        return lapsed

    def _keep(
        self, requests: Requests[RedisPlace], held: Mapping[Partition, RedisHold], lapsed: list[RedisHold]
    ) -> None:
        turn, partitions = self._turn, self._joined.partitions
        look = turn.look(partitions, list(held.values()))
        turn.broken, turn.unlisted, turn.damaged = look.broken, look.unlisted, look.damaged
        dropped, deleted = self._joined.vanished(look, turn.link)
        if dropped:
            return self._fail(GroupDropped(_dropped(self.group, dropped)))
        now = clock.now()
        again = look.moved_logs
        # What must go is given back, also if it could not be renewed.
        going = [hold for hold in held.values() if hold in requests.asked or hold.deadline <= now]
        mine = {hold.partition: hold for hold in (*look.renewed, *going) if hold not in (*again, *look.lost)}
        situation = Situation(self.member.owner, mine, requests.asked, requests.retiring)
        decisions = leasing.decide(situation, turn.seats(look, partitions, now), now)
        decisions.lost += look.lost
        decisions.revoked += self._chores.reclaimer.returns(set(decisions.renewed) - set(decisions.revoked))
        self._withhold(decisions)
        certain = [hold for hold in lapsed if turn.is_certain(hold)]
        done = turn.act(look, decisions, [*again, *certain])
        decisions.lost += again
        self._follow(requests, decisions, done, look)
        self._schedule.kick(min(look.sent + self._lease_s / 3, self.sure_until))
        if look.is_partial:
            self._schedule.kick(clock.now() + _LOOK_AGAIN_S)
        if deleted:
            log.error("Redis: %s", _deleted(self.group, deleted, [*again, *look.lost]))
            self._joined.rejoin(turn.link, deleted)
        if deleted or done.missed or again:
            self._schedule.kick(clock.now() + _EXPIRY_SLACK_S)
        self._chores.trimmer.work(turn.link, [hold.partition for hold in look.renewed])
        turn.link.refresh()  # the incarnation may change under a connection: the next turn uses it

    def _wind_down(
        self, requests: Requests[RedisPlace], held: Mapping[Partition, RedisHold], lapsed: Sequence[RedisHold]
    ) -> None:
        """Receive is not called: renew nothing, so that the leases end."""
        situation = Situation(self.member.owner, held, requests.asked, requests.retiring)
        decisions = leasing.released(situation, clock.now())
        turn = self._turn
        turn.link.connect()
        certain = [hold for hold in lapsed if turn.is_certain(hold)]
        look = Look(clock.now())
        self._follow(requests, decisions, turn.act(look, decisions, certain), look)
        if self._holdings.held:
            self._schedule.kick(self.sure_until)

    def _leave(self, requests: Requests[RedisPlace], held: Mapping[Partition, RedisHold]) -> None:
        releases = {}
        for hold in held.values():
            clean = requests.asked.get(hold, False) if hold.announced else not hold.assigned.unclean
            releases[hold] = (clean, not hold.announced and hold.own.is_gone)
        self._turn.leave(releases)
        self._joined.forget(self._turn.link)
        self._left = True  # the news of it wakes us up again
        self._holdings.drop(list(releases), fenced=False)
        answer(requests.waiters)

    def _withhold(self, decisions: Decisions[RedisPlace]) -> None:
        for hold in tuple(decisions.unannounced):
            if not self._holdings.withhold(hold):  # it was announced since we looked
                decisions.unannounced.remove(hold)
                decisions.revoked.append(hold)

    def _follow(
        self, requests: Requests[RedisPlace], decisions: Decisions[RedisPlace], done: TurnDone, look: Look
    ) -> None:
        """The server has answered: memory follows."""
        holdings, settings, now = self._holdings, self._turn.settings, clock.now()
        with holdings.lock:
            holdings.drop([*decisions.lost, *decisions.overdue], fenced=True)
            holdings.drop([*decisions.released, *decisions.unannounced], fenced=False)
            holdings.revoke(decisions.revoked, grace_s=settings.revoke_grace_s)
            for hold in (*look.renewed, *done.claimed):
                hold.own.sure_until = look.sent + self._lease_s
            for hold in done.claimed:
                waits = hold.assigned.unclean and not hold.own.is_gone
                hold.ready_at = now + (settings.takeover_grace_s if waits else 0.0)
                holdings.add(hold)
            self._chores.reclaimer.claimed(done.claimed)  # its threads look at once, and forget what is not held
            for message in _moved(look):
                holdings.report(message)
                if (holder := holdings.held.get(message.partition)) and holder.own.shard:
                    holder.own.shard.moved(message)
            self._requests.done(requests)
            self._requests.retiring = decisions.retires
        holdings.bell.ring()
        answer(requests.waiters)
        self._schedule.kick(min(self._turn.watch.next_expiry + _EXPIRY_SLACK_S, holdings.deadline))

    def _fail(self, error: OnwardError) -> None:
        """Nothing can be settled any more: what is held is fenced, and no release or leave waits for a turn."""
        with self._holdings.lock:
            self.failure = error
            self._holdings.drop(list(self._holdings.held.values()), fenced=True)
            waiters, self._requests.waiters = self._requests.waiters, []
        self._holdings.bell.ring()
        answer(waiters)


def _dropped(group: str, topic: str) -> str:
    return (
        f"group {group} of topic {topic} was dropped while this member was away; what it had not settled is void. "
        "Start it again to create the group: it begins where `start` says"
    )


def _deleted(group: str, topics: Sequence[str], lost: Iterable[RedisHold]) -> str:
    partitions = ", ".join(sorted(str(hold.partition) for hold in lost if hold.partition.topic in topics))
    held = f" (this member held {partitions})" if partitions else ""
    return (
        f"keys of topic {', '.join(topics)} are gone{held}: they were deleted or flushed, or a restart lost them. "
        f"Group {group} begins again. Where the log itself is gone, its events are lost and a new log begins"
    )


def _moved(look: Look) -> list[Moved]:
    """One message for neighbouring notices of one partition and one kind."""
    messages = []
    for hold, notices in look.notices.items():
        found = [_notice(notice) for notice in notices]
        for (state, due), same in itertools.groupby(found, key=lambda notice: notice[1:]):
            messages.append(Moved(hold.partition, hold.epoch, [id_ for id_, _, _ in same], state, due))
    return messages
