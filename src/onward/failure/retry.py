"""The retry policy: a pure decision from an attempt and its error."""

from collections.abc import Callable

import msgspec

from onward.errors import Expired, GiveUp, RemoteError, RetryLater, Undecodable


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how soon a failed event is retried before it becomes a dead letter.

    `attempts` counts all calls, the first included. The first `immediate` retries happen at once. The wait before the
    others grows by `factor` from `first_delay_s` to `max_delay_s`, and `jitter` makes it longer, by up to that share.
    Only errors in `on` and not in `give_up_on` are retried. A handler that raises RetryLater sets the wait itself;
    `attempts` still counts. A handler that raises GiveUp ends the retries.
    """

    attempts: int = 5
    immediate: int = 0
    first_delay_s: float = 1.0
    factor: float = 2.0
    max_delay_s: float = 60.0
    jitter: float = 0.1
    on: tuple[type[BaseException], ...] = (BaseException,)
    give_up_on: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        for name, low in _LOWEST:
            if not getattr(self, name) >= low:  # also refuses NaN
                raise ValueError(f"Retry({name}={getattr(self, name)}): must be at least {low}")
        for name in ("on", "give_up_on"):
            kinds = getattr(self, name)
            if not isinstance(kinds, tuple) or not all(
                isinstance(k, type) and issubclass(k, BaseException) for k in kinds
            ):
                raise ValueError(f"Retry({name}={kinds!r}): must be a tuple of exception classes")

    @property
    def longest_s(self) -> float:
        """The longest wait of this policy, apart from RetryLater. 0: no retry waits."""
        waits = self.attempts - 1 - self.immediate
        return self._wait_s(waits) * (1 + self.jitter) if waits > 0 else 0.0

    def delay_s(self, attempt: int, error: BaseException, random: Callable[[], float]) -> float | None:
        """Seconds to wait after this failed attempt, or None to give up."""
        if attempt >= self.attempts or not self.may_help(error):
            return None
        if isinstance(error, RetryLater):
            return error.after_s
        if attempt <= self.immediate:
            return 0.0
        return self._wait_s(attempt - self.immediate) * (1 + self.jitter * random())

    def _wait_s(self, number: int) -> float:
        """The wait with this number, counted from 1, without jitter."""
        return float(min(self.first_delay_s * self.factor ** min(number - 1, 64), self.max_delay_s))

    def may_help(self, error: BaseException) -> bool:
        """Does the policy retry this error?"""
        if isinstance(error, RetryLater):
            return True
        if isinstance(error, RemoteError):
            return error.is_a(self.on) and not error.is_a(self.give_up_on)
        return isinstance(error, self.on) and not isinstance(error, (*_FINAL, *self.give_up_on))


_FINAL = (Undecodable, GiveUp, Expired)
_LOWEST = (("attempts", 1), ("immediate", 0), ("first_delay_s", 0), ("factor", 1), ("max_delay_s", 0), ("jitter", 0))
