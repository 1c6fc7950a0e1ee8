"""The parked rows of a relay's shards: which lanes have some, and when to try them again."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from onward import clock
from onward.outbox.base import Lane, OutboxRow, ParkedRow
from onward.outbox.sending import BEHIND
from onward.outbox.store_thread import StoreThread

_FIRST_S, _LONGEST_S = 1.0, 30.0  # between tries
_LOOK_S = 5.0  # how often to look for rows that an operator has released
_PAGE_ROWS, _PAGE_BYTES = 500, 4 << 20
_FAILING_LANES = 20  # if so many keys of a topic fail, and none succeeds, the topic fails as a whole


class ParkedLanes:
    def __init__(self, thread: StoreThread) -> None:
        self.oldest: float | None = None  # Unix time of the oldest event that is tried again
        self._thread = thread
        self._lanes: dict[int, set[Lane]] = {}  # by shard
        self._fences: dict[int, int] = {}  # of the ownerships for which they were loaded
        self._failing: set[str] = set()  # topics whose rows all failed
        self._pause_s = _FIRST_S
        self._due = 0.0

    def lanes_of(self, rows: Sequence[OutboxRow]) -> set[Lane]:
        """The lanes of these rows that have parked rows, or whose topic fails as a whole. A try of each new key would
        hold up the other topics."""
        lanes = [(row.shard, row.lane) for row in rows if row.lane is not None]
        return {lane for shard, lane in lanes if lane[0] in self._failing or lane in self._lanes.get(shard, ())}

    async def learn(self, held: Mapping[int, int]) -> None:
        """Load the lanes, if an ownership is new to us: another relay may have parked rows since the last one."""
        if held.items() - self._fences.items():
            await self._load(held)

    async def _load(self, held: Mapping[int, int]) -> None:
        found = await self._thread.run(self._thread.store.parked_lanes, held)
        self._lanes = {shard: set(found.get(shard, ())) for shard in held}
        self._fences = dict(held)

    def add(self, parked: Sequence[ParkedRow]) -> None:
        """These rows were parked."""
        for row, _, _ in parked:
            if row.lane is not None:
                self._lanes.setdefault(row.shard, set()).add(row.lane)
        waiting = [row.event.time for row, why, refused in parked if not refused and why != BEHIND]
        self.oldest = min([*waiting, *([] if self.oldest is None else [self.oldest])], default=None)

    def forget(self) -> None:
        self._lanes, self._fences, self._due, self.oldest = {}, {}, 0.0, None

    @property
    def is_due(self) -> bool:
        """Whether to try again now."""
        return clock.now() >= self._due

    async def page(self, held: Mapping[int, int], without: Collection[str]) -> Sequence[OutboxRow]:
        """The first rows to try again, except those of the topics in `without`."""
        return await self._thread.run(
            self._thread.store.parked, held, limit=_PAGE_ROWS, max_bytes=_PAGE_BYTES, without=without
        )

    async def tried(self, held: Mapping[int, int], published: Sequence[OutboxRow], failed: Sequence[OutboxRow]) -> None:
        """After a try: the next one comes soon if some rows were published, and after growing pauses if none was."""
        self.oldest = min((row.event.time for row in failed), default=None)
        lanes = Counter(topic for topic, _ in {row.lane for row in failed if row.lane is not None})
        failing = {topic for topic, count in lanes.items() if count >= _FAILING_LANES}
        self._failing = failing - {row.event.topic for row in published}
        if published:
            await self._load(held)
        if not published and not failed:
            self._pause_s, self._due = _FIRST_S, clock.now() + _LOOK_S
        else:
            self._pause_s = _FIRST_S if published else min(self._pause_s * 2, _LONGEST_S)
            self._due = clock.now() + (0.0 if published else self._pause_s)
