"""The simulated handler. Every event has a fate, which decides how its runs end."""

from enum import Enum
from random import Random

from onward.brokers.base import Failure
from onward.event import Delivery
from onward.flow.entry import DONE, RELEASED, SPLIT, Again, Dead, Instant, Outcome
from onward.testing.simulator.ledger import HandlerRun, Story
from onward.testing.simulator.profile import FATES, Profile


class HandlerVerdict(Enum):
    DONE = "done"
    FAILED = "failed"
    WORKER_DIED = "worker died"
    SPLIT = "split"
    RELEASED = "released"


class SimulatedHandler:
    def __init__(self, profile: Profile, rng: Random) -> None:
        self._profile = profile
        self._rng = rng
        self.slowness = 1.0

    def draw_fate(self, story: Story) -> None:
        story.fate = self._rng.choices(FATES, self._profile.fates)[0]
        story.stubborn = {"flaky": self._rng.randint(1, 3), "timeout": 1}.get(story.fate, 0)

    def cure(self, story: Story) -> None:
        """Perhaps fix the bug that made the event fail, as an operator may before a replay."""
        if story.fate == "killer" or self._rng.random() < 0.7:
            story.fate, story.stubborn = "ok", 0

    def duration_s(self, run: HandlerRun) -> float:
        longest = 0.0
        for story in run.stories:
            if story.fate == "slow":
                span = self._rng.uniform(0.5, 4.0)
            elif story.fate == "timeout" and self._fails(story):
                span = self._profile.timeout_s
            else:
                span = self._rng.uniform(0.0, 0.1)
            longest = max(longest, span)
        return longest * self.slowness

    def killer(self, run: HandlerRun) -> Story | None:
        return next((story for story in run.stories if story.fate == "killer"), None)

    def ends(self, run: HandlerRun) -> tuple[list[Story], HandlerVerdict]:
        """How a call ends: the events that had their effect, and the verdict on the call."""
        bad = next((index for index, story in enumerate(run.stories) if self._fails(story)), None)
        if bad is None:
            return run.stories, HandlerVerdict.DONE
        culprit = run.stories[bad]
        if len(run.stories) > 1:
            done = run.stories[: self._rng.randint(0, bad)]
            for story in done:
                story.halved = True
            return done, HandlerVerdict.SPLIT
        culprit.failures += 1
        culprit.fresh_failures += 1
        return [], HandlerVerdict.WORKER_DIED if culprit.fate == "killer" else HandlerVerdict.FAILED

    def outcome(self, delivery: Delivery, verdict: HandlerVerdict, at: Instant) -> Outcome:
        """The outcome that the consumer would decide by its retry policy."""
        if verdict is HandlerVerdict.DONE:
            return DONE
        if verdict is HandlerVerdict.SPLIT:
            return SPLIT
        if verdict is HandlerVerdict.RELEASED:
            return RELEASED
        if delivery.attempt >= self._profile.attempts:
            return Dead(Failure("exhausted", "Error", "it fails", "", "h", delivery.attempt, at.wall, at.wall))
        failure = Failure("failed", "Error", "it fails", "", "h", delivery.attempt, at.wall, at.wall)
        return Again(at.now + self._rng.choice(self._profile.delays_s), failure, verdict is HandlerVerdict.WORKER_DIED)

    def _fails(self, story: Story) -> bool:
        return story.fate in ("poison", "killer") or story.failures < story.stubborn
