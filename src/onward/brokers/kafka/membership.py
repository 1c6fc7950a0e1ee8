"""The thread with the client that is in the group. It owns partitions, commits and hands over; it reads no events."""

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from confluent_kafka import KafkaException

from onward import clock
from onward.brokers.base import MemberInfo, Progress
from onward.brokers.core.session_clock import SessionClock
from onward.brokers.kafka.arrivals import Arrivals, Claims
from onward.brokers.kafka.aside_owner import AsideOwner
from onward.brokers.kafka.certainty import Certainty
from onward.brokers.kafka.commit_queue import WaitingSettle
from onward.brokers.kafka.commits import Commits
from onward.brokers.kafka.group_consumer import GroupConsumer, JoinSpec
from onward.brokers.kafka.hold import KafkaHold, KafkaHoldings
from onward.brokers.kafka.owner_marks import OwnerMarks
from onward.brokers.kafka.ownership import Ownership
from onward.brokers.kafka.recreated import LogIds, RecreatedTopics
from onward.brokers.kafka.start_points import StartPoints
from onward.brokers.kafka.topics import Cluster
from onward.errors import OnwardError
from onward.event import Partition

log = logging.getLogger("onward")


class Membership:
    """Ends when the holdings are closed."""

    def __init__(
        self, cluster: Cluster, spec: JoinSpec, holdings: KafkaHoldings, aside: AsideOwner, epochs: Iterator[int]
    ) -> None:
        settings = cluster.settings
        self.group = spec.group
        self._holdings = holdings
        self._consumer = GroupConsumer(cluster, spec, lambda *answer: self._commits.answered(*answer))
        gone = spec.supervised.gone if spec.supervised is not None else frozenset[str]()
        marks = OwnerMarks(MemberInfo.parse(spec.member).name, instance=self._consumer.instance, gone=gone)
        self._commits = Commits(self._consumer.client, holdings, settings.publish_timeout_s)
        session = SessionClock(self._consumer.session_s, clock.now(), reports_loss=not self._consumer.is_modern)
        self._certainty = Certainty(session, self._commits, holdings, max_poll_gap_s=settings.max_poll_gap_s)
        claims = Claims(StartPoints(self._consumer.client, cluster, spec.start), aside, marks, epochs)
        self._arrivals = Arrivals(
            claims,
            self._commits,
            holdings,
            takeover_grace_s=settings.takeover_grace_s,
            session_s=self._consumer.session_s,
        )
        self._ownership = Ownership(
            self._consumer,
            self._commits,
            self._arrivals,
            self._certainty,
            holdings,
            revoke_grace_s=settings.revoke_grace_s,
        )
        self._commands = self._ownership.commands
        log_ids = LogIds(cluster.admin.client, spec.topics)
        self._recreated = RecreatedTopics(log_ids, self._ownership, self._commits, holdings)
        self._thread = threading.Thread(target=self._run, name=f"onward-kafka-member-{self.group}", daemon=True)
        self._thread.start()

    # -- called by the subscription -------------------------------------------------------------------------------

    @property
    def sure_until(self) -> float:
        return self._certainty.sure_until

    @property
    def failure(self) -> OnwardError | None:
        return self._consumer.failure

    @property
    def troubles(self) -> Sequence[str]:
        return self._arrivals.troubles

    def polled(self) -> None:
        """Receive is being called, so this member stays in the group."""
        self._certainty.polled()

    def settle(self, progress: Sequence[Progress]) -> "Future[list[Partition]]":
        """Commit this progress. The result is the partitions that are no longer ours."""
        return self._commands.ask(lambda future: self._commits.settle(WaitingSettle(progress, future)))

    def release(self, holds: Sequence[KafkaHold], *, drained: bool) -> "Future[None]":
        return self._commands.ask(lambda future: self._ownership.release(holds, future, drained=drained))

    def displaced(self, hold: KafkaHold) -> None:
        """The position that would be read next is not in the log: hold the partition again, under another epoch."""
        self._commands.put(lambda: self._ownership.begin_again(hold))

    def close(self) -> None:
        """Wait until this member has left the group. The holdings must be closed before."""
        self._thread.join()

    # -- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._consumer.is_modern:
                self._certainty.set_session(self._consumer.group_session_s())
            while not self._holdings.closed:
                try:
                    self._turn()
                except KafkaException as error:
                    log.warning("Kafka: group member: %s", error.args[0].str())
        except Exception:
            log.exception("Kafka: the thread of a group member failed")
        finally:
            self._leave()

    def _turn(self) -> None:
        self._keep_subscription()
        self._consumer.poll()
        if self._consumer.is_dead:
            self._ownership.lose_all()
        self._certainty.look()
        self._commands.serve()
        self._recreated.look()
        self._arrivals.work()
        self._commits.work()

    def _keep_subscription(self) -> None:
        """Stay in the group while receive is called and this member has not begun to leave."""
        idle = self._certainty.is_idle
        if self._consumer.is_dead:
            return
        if not self._consumer.is_subscribed:
            if not idle and not self._ownership.is_retiring:
                self._consumer.join(self._ownership)
        elif idle:
            log.warning("Kafka: receive was not called for max_poll_gap_s: leaving group %s", self.group)
            self._ownership.drop_out()
        elif self._consumer.is_modern and self._holdings.held and self._certainty.session_ended:
            log.warning(
                "Kafka: the coordinator of group %s has not answered for %g s: joining again",
                *(self.group, self._certainty.sure_s),
            )
            self._ownership.drop_out()
        elif self._ownership.is_retiring and not self._holdings.held:
            self._ownership.drop_out()

    def _leave(self) -> None:
        try:
            self._ownership.leave()
        except (KafkaException, RuntimeError) as error:
            log.warning("Kafka: leaving group %s failed: %s", self.group, error)
        finally:
            self._commits.fail_all()
            self._holdings.drop(self._holdings.all(), fenced=False)
