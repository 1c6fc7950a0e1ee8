"""The work that waits in the process engine. Pure."""

import math
from collections import deque
from collections.abc import Sequence

from onward.engines.base import MayStartUntil, Work, always
from onward.engines.processes.worker import size_of


class WorkQueue:
    """Work that no worker has yet, in order."""

    def __init__(self) -> None:
        self.may_start_until: MayStartUntil = always
        self._works: deque[Work] = deque()

    def __len__(self) -> int:
        return len(self._works)

    def add(self, works: Sequence[Work]) -> None:
        self._works.extend(works)

    def put_back(self, works: Sequence[Work]) -> None:
        """Workers had this work and did not begin it. It goes before the waiting work."""
        self._works.extendleft(reversed(works))

    def is_late(self, work: Work, at: float) -> bool:
        """Whether work may not start any more."""
        return at >= self.may_start_until(work)

    def take(self, count: int, max_bytes: int, at: float) -> tuple[list[Work], float, list[Work]]:
        """Take the first works that may start. Returns them, until when they may start, and the late ones found on the
        way.

        At most `count` works and `max_bytes` of them, but always one.
        """
        works: list[Work] = []
        late: list[Work] = []
        size, until = 0, math.inf
        while self._works and len(works) < count:
            size += size_of(self._works[0])
            if works and size > max_bytes:
                break
            work = self._works.popleft()
            limit = self.may_start_until(work)
            if at < limit:
                works.append(work)
                until = min(until, limit)
            else:
                late.append(work)
        return works, until, late

    def take_late(self, at: float) -> list[Work]:
        late = [work for work in self._works if self.is_late(work, at)]
        if late:
            known = set(map(id, late))
            self._works = deque(work for work in self._works if id(work) not in known)
        return late

    def take_all(self) -> list[Work]:
        works, self._works = list(self._works), deque()
        return works
