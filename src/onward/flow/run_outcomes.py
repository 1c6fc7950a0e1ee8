"""Turns the ends of runs into outcomes for their events, and logs each run that did not succeed."""

import logging
import random
import time
from collections.abc import Callable, Sequence

from onward.clock import now
from onward.engines.base import Ended, Work
from onward.errors import Expired, Skip, Unfinished, Unreachable
from onward.event import Delivery
from onward.failure.expiry import is_expired
from onward.failure.judge import ErrorJudge
from onward.flow.actions import Accused
from onward.flow.entry import DONE, RELEASED, SPLIT, Instant, Outcome, Released
from onward.flow.outage import Outage
from onward.handler import Handler

log = logging.getLogger("onward")


class RunOutcomes:
    """The outcomes of one handler's runs."""

    def __init__(self, handler: Handler, took: Callable[[Sequence[float]], None] | None) -> None:
        self._name = handler.name
        self._took = took  # called with the durations of runs, in seconds
        self._judge = ErrorJudge(handler.name, handler.retry, random.random)
        self._outage = Outage()  # of the inbox
        self.declined = 0  # events that the handler skipped

    @property
    def trouble(self) -> str:
        """Why events wait although they could run; empty: none does."""
        return self._outage.why

    def of(self, results: Sequence[Ended]) -> list[tuple[Delivery, Outcome]]:
        if self._took is not None:
            self._took([ended.took_s for ended in results if ended.took_s is not None])
        outcomes: list[tuple[Delivery, Outcome]] = []
        for ended in results:
            work = ended.work
            well = ended.error is None and not ended.cancelled
            if isinstance(work, Delivery):
                outcomes.append((work, DONE if well else self._rule(work, ended.error)))
            elif well or ended.error is None or len(work) == 1 or isinstance(ended.error, Unfinished):
                outcomes.extend((each, DONE if well else self._rule(each, ended.error)) for each in work)
            else:
                log.warning("%s: a batch of %d events failed; it runs again in smaller batches", self._name, len(work))
                outcomes.extend((each, SPLIT) for each in work)
        if self._outage.why and not all(each.cancelled or isinstance(each.error, Unreachable) for each in results):
            log.info("%s: the inbox can be reached again", self._name)
            self._outage.over()
        return outcomes

    def accuse(self, accused: Accused, crash_limit: int) -> None:
        """Log the event that may have killed its process."""
        delivery, crashes = accused.delivery, accused.crashes
        name = f"event {delivery.event.id} of {delivery.partition} position {delivery.position}"
        what = f"{self._name}: {name} key {delivery.event.key!r}"
        if accused.dead:
            log.error("%s is dead: it killed its process (crash %d of crash_limit=%d)", what, crashes, crash_limit)
        elif crashes:
            log.warning(
                "%s killed its process (crash %d of crash_limit=%d); it runs alone again", what, crashes, crash_limit
            )
        else:
            log.warning(
                "%s may have been running when its process died; it runs alone now, to find out if it was the cause",
                what,
            )

    def _rule(self, delivery: Delivery, error: BaseException | None) -> Outcome:
        if error is None:
            return RELEASED
        if isinstance(error, Unreachable):
            return self._wait_out(error)
        ruling = self._judge.rule(delivery, error, instant())
        log.log(ruling.level, "\n".join(filter(None, (ruling.text, ruling.trace))))
        self.declined += isinstance(error, Skip)
        return ruling.outcome

    def _wait_out(self, error: Unreachable) -> Outcome:
        at, why = now(), f"{self._name}: {error}"
        if not self._outage.why:
            log.warning("%s; its events wait until the inbox is back, no attempt is charged", why)
        return Released(at + self._outage.met(why, at))


def without_expired(work: Sequence[Work]) -> tuple[Sequence[Work], list[Ended]]:
    """The work that may still run, and the ends of the rest, whose events expired before their turn. A batch with an
    expired event is split until that event is alone in its call, because the others must complete in order."""
    if all([isinstance(each, Delivery) and not each.event.headers for each in work]):  # noqa: C419  # twice as fast
        return work, []  # the time of expiry is a header
    wall = time.time()
    late: list[Ended] = []
    fresh: list[Work] = []
    for each in work:
        if _is_late(each, wall):
            late.append(Ended(each, Expired("the event expired before its turn came")))
        else:
            fresh.append(each)
    return fresh, late


def _is_late(work: Work, wall: float) -> bool:
    return is_expired(work.event, wall) if isinstance(work, Delivery) else any(_is_late(each, wall) for each in work)


def instant() -> Instant:
    return Instant(now(), time.time())
