"""What the page shows, five times a second: one complete snapshot, so that a reader may join or skip at any time."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onward.brokers.base import AsideRecord
from onward.demo.fleet import DemoWorker
from onward.demo.judge import Balance, Effect, News

TICK_S = 0.2
RECENT = 40  # events in a snapshot
LINES = 60  # of the log
LETTERS = 20  # dead ones, the newest
HISTORY_S = 90
_RATE_OVER = 5  # ticks


class Log:
    """What happened, for people. The newest lines only."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, float, str, str]] = deque(maxlen=LINES)
        self._count = 0

    def add(self, kind: str, text: str) -> None:
        """`kind` colours the line: worker, shop, good or bad."""
        self._count += 1
        self._lines.append((self._count, time.time(), kind, text))

    def lines(self) -> Sequence[tuple[int, float, str, str]]:
        return list(self._lines)


class Rates:
    """How many per second, now and over the last minute and a half."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Counter[str]]] = deque(maxlen=_RATE_OVER + 1)
        self._history: deque[tuple[float, float]] = deque(maxlen=HISTORY_S)
        self._next = time.monotonic() + 1

    def sample(self, totals: Mapping[str, int]) -> None:
        now = time.monotonic()
        self._samples.append((now, Counter(totals)))
        if now >= self._next:
            self._next = max(self._next + 1, now)
            self._history.append((self.of("published"), self.of("handled")))

    def of(self, name: str) -> float:
        if not self._samples:
            return 0.0
        (then, before), (now, after) = self._samples[0], self._samples[-1]
        return 0.0 if now == then else round((after[name] - before[name]) / (now - then), 1)

    def history(self) -> Sequence[tuple[float, float]]:
        return list(self._history)


class LaneView:
    """The partitions of the log: what waits in each, and which worker was last seen at work on it."""

    def __init__(self, count: int, lane_of: Callable[[str], int]) -> None:
        self.of = lane_of
        self._open = [0] * count
        self._owner: list[int | None] = [None] * count

    def take(self, news: News) -> Mapping[int, Sequence[int]]:
        """Returns which lanes passed to which worker."""
        passed: dict[int, list[int]] = {}
        for _, customer in news.published:
            self._open[self.of(customer)] += 1
        for effect in news.effects:
            lane = self.of(effect.customer)
            self._open[lane] -= effect.first
            if self._owner[lane] not in (None, effect.worker):
                passed.setdefault(effect.worker, []).append(lane)
            self._owner[lane] = effect.worker
        return passed

    def bury(self, customer: str) -> None:
        self._open[self.of(customer)] -= 1

    def revive(self, customer: str) -> None:
        """A dead order of this customer is to be handled after all."""
        self._open[self.of(customer)] += 1

    def snapshot(self) -> Sequence[Mapping[str, Any]]:
        # An order can be handled a moment before its publish returned.
        return [{"open": max(0, n), "worker": w} for n, w in zip(self._open, self._owner, strict=True)]


class RepeatCount:
    """Notices that a takeover has repeated some orders, and says so once it is over."""

    def __init__(self) -> None:
        self._seen = self._told = 0
        self._since = time.monotonic()

    def take(self, duplicates: int) -> int:
        """How many there were, a second after the last of them; else 0."""
        now = time.monotonic()
        if duplicates != self._seen:
            self._seen, self._since = duplicates, now
        if duplicates == self._told or now - self._since < 1:
            return 0
        fresh, self._told = duplicates - self._told, duplicates
        return fresh


class View:
    """Turns the judge's news into what the page shows."""

    def __init__(self, lanes: LaneView, facts: Mapping[str, Any]) -> None:
        self.log = Log()
        self.lanes = lanes
        self._facts = facts
        self._rates = Rates()
        self._repeats = RepeatCount()
        self._by_worker: Counter[int] = Counter()
        self._by_pid: Counter[int] = Counter()
        self._recent: deque[Effect] = deque(maxlen=RECENT)

    def rate_of(self, slot: int) -> float:
        return self._rates.of(f"worker {slot}")

    def take(self, news: News, balance: Balance) -> None:
        for worker, lanes in self.lanes.take(news).items():
            names = ", ".join(str(lane) for lane in sorted(set(lanes)))
            self.log.add("worker", f"worker {worker} took over lane{'s' if ',' in names else ''} {names}")
        if repeated := self._repeats.take(balance.duplicates):
            self.log.add(
                "worker", f"{repeated:,} orders done again after the takeover: duplicates, counted, never lost"
            )
        done = [effect for effect in news.effects if effect.done]
        self._by_worker.update(effect.worker for effect in done)
        self._by_pid.update(effect.pid for effect in done)
        self._recent.extend(done[-RECENT:])
        by_worker = {f"worker {slot}": count for slot, count in self._by_worker.items()}
        self._rates.sample({"published": balance.published, "handled": balance.handled, **by_worker})

    def snapshot(
        self, balance: Balance, news: News, workers: Sequence[DemoWorker], dead: Mapping[int, AsideRecord]
    ) -> Mapping[str, Any]:
        return {
            **self._facts,
            "balance": balance._asdict(),
            "rate": {"published": self._rates.of("published"), "handled": self._rates.of("handled")},
            "history": self._rates.history(),
            "lanes": self.lanes.snapshot(),
            "workers": [self._worker(worker) for worker in workers],
            "placed": [(number, self.lanes.of(customer), customer) for number, customer in news.published[-RECENT:]],
            "handled": [self._event(effect) for effect in self._recent],
            "dead": [_letter(number, dead[number]) for number in sorted(dead, reverse=True)[:LETTERS]],
            "log": self.log.lines(),
        }

    def _worker(self, worker: DemoWorker) -> Mapping[str, Any]:
        wait_s = worker.replaced_in_s()
        return {
            "slot": worker.slot,
            "pid": worker.pid,
            "alive": worker.alive,
            "started": self._by_pid[worker.pid] > 0,
            "handled": self._by_worker[worker.slot],
            "rate": self.rate_of(worker.slot),
            "kills": worker.kills,
            "replaced_in_s": None if wait_s is None else round(wait_s, 1),
        }

    def _event(self, effect: Effect) -> Sequence[Any]:
        lane = self.lanes.of(effect.customer)
        wait_ms = round(effect.waited_s * 1000)
        return (effect.seq, effect.customer, effect.n, effect.worker, lane, wait_ms, effect.attempt, effect.first)


def _letter(number: int, record: AsideRecord) -> Mapping[str, Any]:
    story = record.failure
    return {
        "number": number,
        "customer": record.event.key,
        "error": f"{story.error}: {story.message}" if story else "",
        "attempts": story.attempts if story else 0,
        "died": story.last if story else 0.0,
    }
