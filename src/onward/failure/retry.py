"""The retry policy: a pure decision from an attempt and its error."""

from collections.abc import Callable

import msgspec

from onward.errors import RemoteError


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how soon a failed event is tried again before it is given up as dead.

    `attempts` counts all tries, the first included. The wait grows by `factor` up to `max_delay_s`; `jitter` only
    lengthens it, by up to that share. Only errors in `on` and not in `give_up_on` are tried again.
    """

    attempts: int = 5
    first_delay_s: float = 1.0
    factor: float = 2.0
    max_delay_s: float = 60.0
    jitter: float = 0.1
    on: tuple[type[BaseException], ...] = (BaseException,)
    give_up_on: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        for name, low in (("attempts", 1), ("first_delay_s", 0), ("factor", 1), ("max_delay_s", 0), ("jitter", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"Retry({name}={getattr(self, name)}): must be at least {low}")
        for name in ("on", "give_up_on"):
            kinds = getattr(self, name)
            if not isinstance(kinds, tuple) or not all(
                isinstance(k, type) and issubclass(k, BaseException) for k in kinds
            ):
                raise ValueError(f"Retry({name}={kinds!r}): must be a tuple of exception classes")

    def delay_s(self, attempt: int, error: BaseException, random: Callable[[], float]) -> float | None:
        """Seconds to wait after this failed attempt, or None: give it up."""
        if attempt >= self.attempts or not self._takes(error):
            return None
        wait_s: float = min(self.first_delay_s * self.factor ** min(attempt - 1, 64), self.max_delay_s)
        return wait_s * (1 + self.jitter * random())

    def _takes(self, error: BaseException) -> bool:
        if isinstance(error, RemoteError):
            return error.is_a(self.on) and not error.is_a(self.give_up_on)
        return isinstance(error, self.on) and not isinstance(error, self.give_up_on)
