"""The named limits of one handler's plane."""

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from onward.brokers.base import Ordering


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    handler: str = ""
    ordering: Ordering = "key"
    on_dead: Literal["pass", "hold"] = "pass"
    concurrency: int = 100  # calls of the handler at once
    batch_size: int = 1  # events per call
    batch_wait_s: float = 0.0  # how long a batch waits to fill
    max_in_flight: int = 1_000  # delivered and not done, per partition
    max_in_flight_bytes: int = 32 << 20
    max_delayed: int = 100  # of those, waiting in memory for a retry
    max_parked: int = 100_000  # records of the aside, per partition
    max_gap: int = 1_000_000  # done above an event that is still open, per partition
    park_after_s: float = 30.0
    max_wait_s: float = math.inf  # the longest wait of any retry
    crash_limit: int = 3
    settle_interval_s: float = 0.05
    wants: Callable[[str], bool] | None = None  # called with an event's type; other events are done at intake

    @property
    def share(self) -> int:
        """How many events of one key stay in memory. With more, one key could stall its whole partition."""
        return max(1, self.max_in_flight // 4) if self.ordering == "key" else 1 << 62
