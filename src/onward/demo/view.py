"""What the page shows, five times a second: a complete snapshot, so that a page can join late or skip some."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onward.brokers.base import AsideRecord
from onward.demo.fleet import DemoWorker
from onward.demo.judge import Balance, Effect, News

TICK_S = 0.2
RECENT = 120  # handled orders in a snapshot
PLACED = 40  # new orders in a snapshot
LINES = 60  # of the log
LETTERS = 20  # the newest dead letters
HISTORY_S = 90
_RATE_OVER = 5  # ticks


class Log:
    """What happened, in sentences. Only the newest lines are stored."""

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
    """How many orders per second, now and over the last 90 seconds."""

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


class PartitionView:
    """The partitions of the log: how many orders of each are unfinished, and which worker handled the last one."""

    def __init__(self, count: int, partition_index: Callable[[str], int]) -> None:
        self.of = partition_index
        self._open = [0] * count
        self._owner: list[int | None] = [None] * count

    def take(self, news: News) -> Mapping[int, Sequence[int]]:
        """Returns which partitions each worker has taken over."""
        taken: dict[int, list[int]] = {}
        for published in news.published:
            self._open[self.of(published.customer)] += 1
        for effect in news.effects:
            partition = self.of(effect.customer)
            self._open[partition] -= effect.first
            if self._owner[partition] not in (None, effect.worker):
                taken.setdefault(effect.worker, []).append(partition)
            self._owner[partition] = effect.worker
        return taken

    def bury(self, customer: str) -> None:
        self._open[self.of(customer)] -= 1

    def revive(self, customer: str) -> None:
        """A dead letter of this customer was replayed, so it is unfinished again."""
        self._open[self.of(customer)] += 1

    def snapshot(self) -> Sequence[Mapping[str, Any]]:
        # Below 0 for a moment: an effect may be read before its order.
        return [{"open": max(0, n), "worker": w} for n, w in zip(self._open, self._owner, strict=True)]


class RepeatCount:
    """Counts the orders that ran again after a takeover, and reports them together when no more arrive."""

    def __init__(self) -> None:
        self._seen = self._reported = 0
        self._since = time.monotonic()

    def take(self, duplicates: int) -> int:
        """Returns how many ran again, one second after the last of them; 0 at all other times."""
        now = time.monotonic()
        if duplicates != self._seen:
            self._seen, self._since = duplicates, now
        if duplicates == self._reported or now - self._since < 1:
            return 0
        fresh, self._reported = duplicates - self._reported, duplicates
        return fresh


class View:
    """Turns the judge's news into snapshots for the page."""

    def __init__(self, partitions: PartitionView, facts: Mapping[str, Any]) -> None:
        self.log = Log()
        self.partitions = partitions
        self._facts = facts
        self._rates = Rates()
        self._repeats = RepeatCount()
        self._by_worker: Counter[int] = Counter()
        self._by_pid: Counter[int] = Counter()
        self._recent: deque[Effect] = deque(maxlen=RECENT)

    def rate_of(self, slot: int) -> float:
        return self._rates.of(f"worker {slot}")

    def take(self, news: News, balance: Balance) -> None:
        for worker, partitions in self.partitions.take(news).items():
            names = ", ".join(str(partition) for partition in sorted(set(partitions)))
            self.log.add("worker", f"worker {worker} took over partition{'s' if ',' in names else ''} {names}")
        if repeated := self._repeats.take(balance.duplicates):
            count = f"{repeated:,} orders" if repeated != 1 else "1 order"
            self.log.add("worker", f"{count} ran again after the takeover and counted as duplicates; none was lost")
        done = [effect for effect in news.effects if effect.done]
        self._by_worker.update(effect.worker for effect in done)
        self._by_pid.update(effect.pid for effect in done)
        self._recent.extend(done[-RECENT:])
        by_worker = {f"worker {slot}": count for slot, count in self._by_worker.items()}
        self._rates.sample({"published": balance.published, "handled": balance.handled, **by_worker})

    def snapshot(
        self, balance: Balance, news: News, workers: Sequence[DemoWorker], dead: Mapping[int, AsideRecord]
    ) -> Mapping[str, Any]:
        newest = sorted(dead, reverse=True)
        placed = news.published[-PLACED:]
        return {
            **self._facts,
            "balance": balance._asdict(),
            "rate": {"published": self._rates.of("published"), "handled": self._rates.of("handled")},
            "history": self._rates.history(),
            "partitions": self.partitions.snapshot(),
            "workers": [self._worker(worker) for worker in workers],
            "placed": [(each.number, self.partitions.of(each.customer), each.customer) for each in placed],
            "handled": [self._event(effect) for effect in self._recent],
            "dead": [_letter(number, dead[number]) for number in newest[:LETTERS]],
            "dead_count": len(dead),
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
        partition = self.partitions.of(effect.customer)
        wait_ms = round(effect.waited_s * 1000)
        return (effect.seq, effect.customer, effect.n, effect.worker, partition, wait_ms, effect.attempt, effect.first)


def _letter(number: int, record: AsideRecord) -> Mapping[str, Any]:
    failure = record.failure
    return {
        "number": number,
        "customer": record.event.key,
        "error": f"{failure.error}: {failure.message}" if failure else "",
        "attempts": failure.attempts if failure else 0,
        "died": failure.last if failure else 0.0,
    }
