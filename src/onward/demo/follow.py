"""Orders that the page follows one by one: poison orders, replayed orders and bursts.

Everything here comes from the shop and from the effects, as with the judge. Onward's own counters are not used.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onward.demo.judge import Effect, Judge, News, Published
from onward.demo.shop import ATTEMPTS, OrderPlaced
from onward.demo.view import Log

LINGER_S = 8.0  # how long the page shows a customer after its last held order has run
MOST_SHOWN = 4  # waiting customers in a snapshot
MOST_HELD_SHOWN = 8  # orders of each; the page shows how many more there are


class PoisonedCustomer:
    """A customer with a poison order, until the orders behind it have run."""

    def __init__(self, order: OrderPlaced, wait_after_s: Callable[[int], float]) -> None:
        self.order = order
        self._wait_after_s = wait_after_s
        self._attempt = 0  # failed so far
        self._failed_at = 0.0
        self._dead = self._handled = False
        self.held: dict[int, int] = {}  # order number -> n, of the orders behind it that have not run
        self._ran: list[int] = []
        self._over_at: float | None = None

    @property
    def ran(self) -> int:
        """How many of the held orders have run."""
        return len(self._ran)

    @property
    def waiting(self) -> bool:
        """Whether the poison order holds back later orders of its customer."""
        return not (self._dead or self._handled)

    def follow(self, published: Published) -> None:
        if self.waiting and published.customer == self.order.customer and published.number > self.order.number:
            self.held[published.number] = published.n

    def fail(self, effect: Effect) -> None:
        self._attempt, self._failed_at = effect.attempt, effect.time

    def complete(self, number: int, *, handled: bool) -> bool:
        """An order was handled, or is a dead letter now. Returns whether all held orders have run by this."""
        if number == self.order.number:
            self._dead, self._handled = not handled, handled
        elif number in self.held:
            self._ran.append(self.held.pop(number))
        if self.waiting or self.held or self._over_at is not None:
            return False
        self._over_at = time.monotonic()
        return True

    @property
    def over(self) -> bool:
        return self._over_at is not None and time.monotonic() - self._over_at > LINGER_S

    def snapshot(self, partition: int) -> Mapping[str, Any]:
        wait_s = self._wait_after_s(self._attempt) if 0 < self._attempt < ATTEMPTS else 0.0
        state = "waiting" if self.waiting else "over" if self._over_at is not None else "running"
        orders = [(n, True) for n in self._ran] + [(n, False) for n in self.held.values()]
        return {
            "number": self.order.number,
            "customer": self.order.customer,
            "partition": partition,
            "state": state,
            "handled": self._handled,
            "failed": self._attempt,
            "wait_s": round(wait_s, 2),
            "next_in_s": round(max(0.0, self._failed_at + wait_s - time.time()), 2),
            "held": len(self.held),
            "ran": self.ran,
            "orders": orders[:MOST_HELD_SHOWN],
        }


class FollowedOrders:
    """Poison orders, replayed orders and bursts that are not finished. The log reports what happens to them."""

    def __init__(self, log: Log, wait_after_s: Callable[[int], float]) -> None:
        self._log = log
        self._wait_after_s = wait_after_s
        self._poison: dict[int, PoisonedCustomer] = {}
        # The last failure of each unfinished order. An effect may be read before its order.
        self._failures: dict[int, Effect] = {}
        self._replayed: dict[int, float | None] = {}  # order number -> when it was handled
        self._customers: dict[int, str] = {}  # of the replayed orders
        self._bursts: list[tuple[float, int, int]] = []  # when, first and last number

    @property
    def poisoned(self) -> bool:
        """Whether some poison order is not a dead letter yet."""
        return any(each.waiting for each in self._poison.values())

    @property
    def customers(self) -> Sequence[str]:
        """The customers that the page highlights."""
        return sorted({each.order.customer for each in self._poison.values()} | set(self._customers.values()))

    def add_poison(self, order: OrderPlaced, behind: int) -> None:
        self._poison[order.number] = poisoned = PoisonedCustomer(order, self._wait_after_s)
        self._log.add(
            "shop", f"poison order {order.number} of {order.customer} placed; {behind} more of its orders follow"
        )
        if failure := self._failures.get(order.number):
            self._fail(poisoned, failure)

    def add_replayed(self, customers: Mapping[int, str], left: int) -> None:
        self._replayed.update(dict.fromkeys(customers))
        self._customers.update(customers)
        many = (
            f"{len(customers)} dead letters replayed; each runs before the orders of its customer that have not run yet"
        )
        one = f"order {next(iter(customers))} replayed; it runs before the orders of its customer that have not run yet"
        self._log.add("shop", f"{one if len(customers) == 1 else many}; {left} left")

    def add_burst(self, started: float, first: int, last: int) -> None:
        count, spent_s = last + 1 - first, time.monotonic() - started
        self._log.add("shop", f"burst: {count:,} orders published in {spent_s:.1f} s")
        self._bursts.append((started, first, last))

    def take(self, news: News, judge: Judge) -> None:
        for published in news.published:
            for poisoned in self._poison.values():
                poisoned.follow(published)
        for effect in news.effects:
            if effect.done:
                self._failures.pop(effect.number, None)
                self._complete(effect.number, handled=True)
                self._report_replay(effect)
            else:
                self._failures[effect.number] = effect
                if effect.number in self._poison:
                    self._fail(self._poison[effect.number], effect)
        for burst in [*self._bursts]:
            started, first, last = burst
            if all(judge.is_done(number) for number in range(first, last + 1)):
                self._bursts.remove(burst)
                spent_s = time.monotonic() - started
                self._log.add("good", f"burst: all orders handled {spent_s:.1f} s after the click")
        self._forget()

    def bury(self, number: int) -> None:
        """This order is a dead letter now."""
        self._failures.pop(number, None)
        self._log.add("bad", f"order {number} failed {ATTEMPTS} times and is a dead letter now")
        self._complete(number, handled=False)

    def snapshot(self, partition_of: Callable[[str], int]) -> Sequence[Mapping[str, Any]]:
        """The poisoned customers, the oldest first."""
        shown = [*self._poison.values()][:MOST_SHOWN]
        return [each.snapshot(partition_of(each.order.customer)) for each in shown]

    def _fail(self, poisoned: PoisonedCustomer, effect: Effect) -> None:
        poisoned.fail(effect)
        again = f", next attempt in {self._wait_after_s(effect.attempt):g} s" if effect.attempt < ATTEMPTS else ""
        who = f"order {effect.number} of {effect.customer}"
        self._log.add("bad", f"{who} failed: attempt {effect.attempt} of {ATTEMPTS}{again}")

    def _complete(self, number: int, *, handled: bool) -> None:
        for poisoned in self._poison.values():
            if poisoned.complete(number, handled=handled) and poisoned.ran:
                held = "the held order" if poisoned.ran == 1 else f"all {poisoned.ran} held orders"
                self._log.add("good", f"{held} of {poisoned.order.customer} ran")

    def _report_replay(self, effect: Effect) -> None:
        if effect.number in self._replayed and self._replayed[effect.number] is None:
            self._replayed[effect.number] = time.monotonic()
            self._log.add("good", f"order {effect.number} of {effect.customer} was replayed and handled")

    def _forget(self) -> None:
        self._poison = {number: each for number, each in self._poison.items() if not each.over}
        long_ago = time.monotonic() - LINGER_S
        past = [number for number, done in self._replayed.items() if done is not None and done < long_ago]
        for number in past:
            del self._replayed[number], self._customers[number]
