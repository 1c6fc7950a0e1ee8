"""The membership: a thread with the consumer that is in the group. It owns, commits and hands over; it reads nothing.

All calls of its consumer are made in this thread: between polls, or, while partitions are asked back, within the
callback that asks. The callback waits for the release, so that the group waits too; the reader reads on meanwhile.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from onward import clock
from onward.brokers.base import Progress, Start
from onward.brokers.kafka.client import explained
from onward.brokers.kafka.commits import Commit, Commits
from onward.brokers.kafka.contact import BEATS, Contact
from onward.brokers.kafka.holdings import Hold, Holdings
from onward.brokers.kafka.origins import Found, Origins
from onward.brokers.kafka.session import session_s
from onward.brokers.kafka.topics import Cluster, Incarnations
from onward.brokers.kafka.warden import Warden
from onward.errors import BadSetting, OnwardError
from onward.event import Partition

log = logging.getLogger("onward")

_POLL_S = 0.02
_MEMBER_LOOK_S = 0.1
_RETRY_S = 0.5
_HEARD_S = 0.5
_NOTICE_S = 1.0  # a client that is cut off looks once a second whether its session is over, and is sure until then
_PROVE_S = 0.25  # between two commits that are to prove that we are in the group
_TURN_S = 10.0

_FORBIDDEN = frozenset(
    {
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.GROUP_MAX_SIZE_REACHED,
        KafkaError.UNSUPPORTED_VERSION,
        KafkaError.UNSUPPORTED_ASSIGNOR,
        KafkaError._FATAL,
        KafkaError._AUTHENTICATION,
    }
)

Command = Callable[[], None]


class Enrolment(NamedTuple):
    """What a member joins, and as whom."""

    group: str
    member: str
    topics: Sequence[str]
    start: Start


class Membership:
    def __init__(
        self, cluster: Cluster, enrolment: Enrolment, holdings: Holdings, warden: Warden, epochs: Iterator[int]
    ) -> None:
        settings = cluster.settings
        group = enrolment.group
        self._settings = settings
        self._admin, self._group = cluster.catalogue.admin, group
        self._holdings = holdings
        self._warden = warden
        self._topics = list(enrolment.topics)
        self._epochs = epochs
        self._modern = settings.client.get("group.protocol") == "consumer"
        self._cooperative = self._modern or "cooperative" in str(
            settings.client.get("partition.assignment.strategy", "cooperative-sticky")
        )
        self._consumer: Consumer = cluster.client.consumer(**self._conf(group, enrolment.member))
        self._origins = Origins(self._consumer, cluster.catalogue, enrolment.start, settings.on_partition_growth)
        self._incarnations = Incarnations(cluster.catalogue.admin, self._topics)
        self._outdated: set[Hold] = set()  # of a former log, and soon to begin anew
        self._commits = Commits(self._consumer, holdings, settings.publish_timeout_s)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.failure: OnwardError | None = None  # why we cannot be in the group
        self.troubles: list[str] = []  # why some of what the group has is not read
        self._arrivals: dict[Partition, None] = {}  # given to us by the group, to be fenced
        self._fencing: dict[Partition, Hold] = {}  # whose fence is being stored, or was when we began to leave
        self._retry_at = 0.0
        self._subscribed = False
        self._retiring = False  # it released unasked: it keeps what it has and takes no more
        self._closing = False
        self._calling = False  # within a callback, where consumers answer nothing that was begun before
        self._polled = clock.now()
        self._contact = Contact(self._session_s, self._polled, told=not self._modern)
        self._prove_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"onward-kafka-member-{group}", daemon=True)
        self._thread.start()

    def _conf(self, group: str, member: str) -> dict[str, Any]:
        settings = self._settings
        session_ms = int(settings.client.get("session.timeout.ms", settings.lease_s * 1000))
        self._session_s = session_ms / 1000
        longest_s = max(settings.max_poll_gap_s, settings.revoke_grace_s + 10, self._session_s)
        conf: dict[str, Any] = {
            "group.id": group,
            "client.id": member,
            "max.poll.interval.ms": int(longest_s * 1000),
            "on_commit": lambda error, places: self._commits.answered(error, places),
        }
        if not self._modern:
            conf |= {
                "session.timeout.ms": session_ms,
                "heartbeat.interval.ms": max(1, session_ms // BEATS),
                "partition.assignment.strategy": "cooperative-sticky",
            }
        return conf | {name: value for name, value in settings.client.items() if name in conf}

    # Called by the subscription

    def polled(self) -> None:
        """Receive is being called, so the membership is worth keeping."""
        self._polled = clock.now()

    def sure_until(self) -> float:
        now = clock.now()
        holds = bool(self._holdings.held)  # before the next look, so that no loss falls between the two
        if self._holdings.closed or self._holdings.has_untold_loss:
            return 0.0  # whoever has not heard of a loss is sure of nothing
        if not holds:
            return now + self._contact.sure_s
        return min(self._contact.sure_until, self._polled + self._settings.max_poll_gap_s)

    def commit(self, progress: Sequence[Progress]) -> "Future[list[Partition]]":
        """Commit these; answers the partitions that are not ours any more."""
        return self._ask(lambda future: self._commits.enter(Commit(progress, future, clock.now())))

    def release(self, holds: Sequence[Hold], *, drained: bool) -> "Future[None]":
        return self._ask(lambda future: self._release(holds, drained, future))

    def displaced(self, hold: Hold) -> None:
        """The log does not have what the hold would read next: it begins anew, under another epoch."""
        self._commands.put(lambda: self._begin_anew(hold))

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _ask(self, work: Callable[["Future[Any]"], None]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._commands.put(lambda: work(future))
        return future

    # In the thread

    def _run(self) -> None:
        try:
            if self._modern:
                self._contact.session_s = session_s(self._admin, self._group, self._settings.lease_s)
            while not self._closing:
                try:
                    self._turn()
                except KafkaException as error:
                    log.warning("Kafka: group member: %s", error.args[0].str())
        except Exception:
            log.exception("Kafka: the membership ended")
        finally:
            self._leave()

    def _turn(self) -> None:
        self._keep_subscription()
        message = self._consumer.poll(_POLL_S)
        if message is not None and message.error() is not None:
            self._complain(message.error())
        self._keep_contact()
        self._serve()
        self._welcome()
        self._commits.work()

    def _keep_contact(self) -> None:
        now = clock.now()
        self._contact.look(now, self._commits)
        if self._contact.wants_proof(now) and now >= self._prove_at:
            self._prove_at = now + _PROVE_S
            self._commits.prove()

    def _complain(self, error: KafkaError) -> None:
        log.warning("Kafka: group member: %s", error.str())
        if error.code() == KafkaError.INVALID_SESSION_TIMEOUT:
            asked_ms = self._settings.client.get("session.timeout.ms")
            said = f"lease_s={self._settings.lease_s:g}" if asked_ms is None else f"session.timeout.ms={asked_ms}"
            self.failure = BadSetting(
                f"{said}: the cluster does not allow such a session; its limits are "
                "group.min.session.timeout.ms (6 s by default) and group.max.session.timeout.ms"
            )
        elif error.code() in _FORBIDDEN:
            self.failure = explained(error, f"joining the group for {', '.join(self._topics)}")

    def _serve(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _keep_subscription(self) -> None:
        """Be in the group while somebody receives, and while we have not left."""
        idle = clock.now() - self._polled > self._settings.max_poll_gap_s
        wanted = not idle and not self._retiring
        if wanted and not self._subscribed:
            self._consumer.subscribe(
                self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
            self._subscribed = True
        elif self._subscribed and idle:
            log.warning("Kafka: nothing was received for %g s: leaving the group", self._settings.max_poll_gap_s)
            self._drop_out()
        elif self._subscribed and self._modern and self._holdings.held and clock.now() > self._contact.sure_until:
            log.warning("Kafka: the group's coordinator has not answered for %g s: joining anew", self._contact.sure_s)
            self._drop_out()
        elif self._subscribed and self._retiring and not self._holdings.held:
            self._drop_out()

    def _drop_out(self) -> None:
        self._unfenced(list(self._fencing))
        self._lose(self._holdings.all())
        self._arrivals.clear()
        self._subscribed = False
        self._consumer.unsubscribe()

    def _leave(self) -> None:
        """Go, without a word on what was not released: its next owner is told that it was left so."""
        self._calling = True
        untold = [hold for hold in self._holdings.all() if not hold.announced]
        try:
            self._put_back([*untold, *self._unfenced(list(self._fencing))])
            self._serve()
            self._depart()
            self._consumer.close()
        except (KafkaException, RuntimeError) as error:
            log.warning("Kafka: leaving the group: %s", error)
        finally:
            self._commits.fail_all()
            self._holdings.drop(self._holdings.all(), fenced=False)

    def _depart(self) -> None:
        """Say that we leave, and see that it is heard: while the group forms anew the coordinator reads nothing that we
        send, and a member that goes unheard is waited for, a session long, by all the others. It answers in turn, so
        what it says to a later question tells that it has read what we sent before."""
        end = clock.now() + min(self._settings.lease_s, _TURN_S)
        if self._subscribed and self._heard(end):
            self._consumer.unsubscribe()
            self._heard(end)

    def _heard(self, end: float) -> bool:
        while clock.now() < end:
            self._consumer.poll(_POLL_S)
            with contextlib.suppress(KafkaException):
                self._consumer.committed([TopicPartition(self._topics[0], 0)], _HEARD_S)
                return True
        return False

    # Ownership

    def _on_assign(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        at_rest = [TopicPartition(place.topic, place.partition, 0) for place in places]
        if self._cooperative:
            consumer.incremental_assign(at_rest)
        else:
            consumer.assign(at_rest)
        if at_rest:
            consumer.pause(at_rest)
        if not self._retiring and self._subscribed:
            self._arrivals.update(dict.fromkeys(Partition(place.topic, place.partition) for place in places))
            self._retry_at = 0.0

    def _on_lost(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self._unfenced(_partitions(places))
        self._lose(self._named(places))

    def _on_revoke(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        """Ask for these back and wait for their release: the group goes on when this returns."""
        holds = self._named(places)
        untold = [hold for hold in holds if not hold.announced]
        told = [hold for hold in holds if hold.announced]
        self._calling = True
        try:
            self._holdings.drop(untold, fenced=False)
            self._put_back([*untold, *self._unfenced(_partitions(places))])
            if told and not self._closing:
                self._hand_over(told)
        finally:
            self._calling = False
            self._lose(self._named(places))

    def _lose(self, holds: Sequence[Hold]) -> None:
        self._commits.withdraw(holds)
        self._holdings.drop(holds, fenced=True)

    def _named(self, places: list[TopicPartition]) -> list[Hold]:
        partitions = _partitions(places)
        for partition in partitions:
            self._arrivals.pop(partition, None)
        return [hold for hold in self._holdings.all() if hold.partition in partitions]

    def _unfenced(self, partitions: Iterable[Partition]) -> list[Hold]:
        """Those that were on their way to be ours; from here on nothing of them is stored."""
        holds = [self._fencing.pop(partition) for partition in partitions if partition in self._fencing]
        self._commits.withdraw(holds)
        return holds

    def _put_back(self, holds: Sequence[Hold]) -> None:
        """Nobody was told of these, so nothing of them can have run: they go back as they came."""
        if holds:
            self._commits.put_back(holds)

    def _hand_over(self, holds: Sequence[Hold]) -> None:
        deadline = clock.now() + self._settings.revoke_grace_s
        member, looked = self._consumer.memberid(), clock.now()
        self._holdings.revoke(holds, deadline)
        while clock.now() < deadline and not self._closing:
            now = clock.now()
            if now - self._polled > self._settings.max_poll_gap_s:
                return
            if now > looked + _MEMBER_LOOK_S:
                looked = now
                if self._consumer.memberid() != member:
                    return  # the group has not waited for us
                self._keep_contact()
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=_POLL_S)()
            self._commits.work_at_once(deadline)
            if not any(self._holdings.held.get(hold.partition) is hold for hold in holds):
                return

    def _welcome(self) -> None:
        """Make arrivals ours: see where they stand, store a new fence, and only then tell of them."""
        if self._holdings.held:
            self._see_logs()
        if not self._arrivals or clock.now() < self._retry_at:
            return
        try:
            found = self._claimed(self._origins.find(list(self._arrivals)))
            marked = self._warden.mark({partition: source.fence for partition, (source, *_) in found.items()})
            self._warden.bury(
                {each: (log_id, source.fence) for each, (source, log_id, _) in found.items() if source.blank}
            )
        except Exception as error:
            log.warning("Kafka: %s: progress cannot be read, trying again: %s", ", ".join(self._topics), error)
            self._retry_at = clock.now() + _RETRY_S
            return
        self._retry_at = clock.now() + _RETRY_S  # for what was not found
        self._tell(self._origins.troubles)
        for partition, (source, log_id, suffix) in found.items():
            if source.note:
                log.warning("Kafka: %s", source.note)
            self._arrivals.pop(partition, None)
            hold = Hold(partition, source, log_id=log_id, suffix=suffix, epoch=next(self._epochs))
            hold.marked_at = marked.get(partition, 0)
            self._fencing[partition] = hold
            self._commits.fence(hold, self._fenced)

    def _claimed(self, found: dict[Partition, Found]) -> dict[Partition, Found]:
        """With fences above all that came before. What a commit tells is; else the asides are asked, which takes time
        where they are long."""
        claims = self._warden.claims({each: source.fence for each, (source, *_) in found.items() if source.blank})
        return found | {
            each: (found[each][0]._replace(fence=fence), *found[each][1:]) for each, fence in claims.items()
        }

    def _tell(self, troubles: Mapping[str, str]) -> None:
        for trouble in troubles.values():
            if trouble not in self.troubles:
                log.error("Kafka: %s", trouble)
        self.troubles = list(troubles.values())

    def _fenced(self, hold: Hold, error: KafkaError | None) -> None:
        """The fence of an arrival is stored, or could not be."""
        if self._fencing.get(hold.partition) is not hold or self._retiring or not self._subscribed:
            return  # it was asked back, or will be
        del self._fencing[hold.partition]
        if error is not None:
            self._arrivals[hold.partition] = None
            self._retry_at = clock.now() + _RETRY_S
            return
        now = clock.now()
        self._contact.look(now, self._commits)
        hold.ready_at = now + (self._settings.takeover_grace_s + _NOTICE_S if hold.source.unclean else 0.0)
        self._holdings.add(hold)

    def _see_logs(self) -> None:
        """A topic that was deleted and made anew may be long enough for the reader to go on, past events that nobody
        has handled. Kafka forgot the group's progress with the topic: it must be there again before we begin anew,
        so that we do not begin as a new group does."""
        logs = self._incarnations.answered()
        holds = [hold for hold in self._holdings.all() if logs.get(hold.partition.topic, hold.log_id) != hold.log_id]
        for hold in holds:
            if hold in self._outdated:
                self._begin_anew(hold)  # settles went before it, which say as much
            elif not hold.revoking and not self._retiring:
                self._outdated.add(hold)
                self._commits.fence(hold, self._recommitted)

    def _recommitted(self, hold: Hold, error: KafkaError | None) -> None:
        self._outdated.discard(hold)
        if error is None:
            self._begin_anew(hold)

    def _begin_anew(self, hold: Hold) -> None:
        if self._holdings.held.get(hold.partition) is hold:
            self._lose([hold])
            self._arrivals[hold.partition] = None

    def _release(self, holds: Sequence[Hold], drained: bool, future: "Future[None]") -> None:
        ours = [hold for hold in holds if self._holdings.held.get(hold.partition) is hold]
        self._retiring |= any(not hold.revoking for hold in ours)
        self._commits.release(ours, drained=drained, then=lambda: self._let_go(ours, future))

    def _let_go(self, holds: Sequence[Hold], future: "Future[None]") -> None:
        self._holdings.drop(holds, fenced=False)
        if not future.done():
            future.set_result(None)


def _partitions(places: Iterable[TopicPartition]) -> set[Partition]:
    return {Partition(place.topic, place.partition) for place in places}
