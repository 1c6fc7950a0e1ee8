"""The shards that a relay owns now, and until when that is certain."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from onward import clock
from onward.outbox.base import LeasePlan, OutboxIdentity, RelaysView
from onward.outbox.leases import RelayLeases
from onward.outbox.store_thread import StoreThread

log = logging.getLogger("onward")


class ShardHolder:
    def __init__(self, thread: StoreThread, leases: RelayLeases) -> None:
        self.held: dict[int, int] = {}  # shard to fence
        self.identity: OutboxIdentity | None = None
        self._busy: frozenset[int] = frozenset()  # shards whose rows are being published
        self._thread = thread
        self._leases = leases
        self._sure_until = 0.0
        self._news = asyncio.Event()  # after a turn

    async def turn(self) -> None:
        """Renew the lease, and learn which shards are ours."""
        sent_at = clock.now()
        store = self._thread.store
        turn = await self._thread.run(store.turn, self._leases.name, self._leases.lease_s, self._decide)
        self.held, self.identity = dict(turn.held), turn.identity
        self._sure_until = self._leases.sure_until(sent_at)
        self._news.set()
        if turn.identity.rebaselined:
            log.warning(
                "the database of the outbox was restored or copied; the relay has compared its rows and continues as "
                "outbox %s. Events that were published after the backup may be published again",
                turn.identity.outbox_id,
            )

    async def keep(self) -> None:
        """Take a turn whenever one is due, until cancelled."""
        while True:
            await asyncio.sleep(max(0.0, self._leases.next_turn(clock.now()) - clock.now()))
            await self.turn()

    async def leave(self) -> None:
        """Give everything back."""
        self._leases.retiring = True
        await self.turn()

    def ours(self, shards: Collection[int] | None = None) -> dict[int, int]:
        """Those of the shards that are surely ours now, with their fences. Without `shards`: those to read from."""
        if clock.now() >= self._sure_until:
            return {}
        wanted = self.held.keys() - self._leases.yielding if shards is None else self.held.keys() & shards
        return {shard: self.held[shard] for shard in wanted}

    async def still(self, batch: Mapping[int, int]) -> dict[int, int]:
        """Those shards of a batch that are still ours, under the same fences. While the lease is unsure, this waits for
        the next turn."""
        while clock.now() >= self._sure_until and any(self.held.get(shard) == batch[shard] for shard in batch):
            await self.news()
        return {shard: fence for shard, fence in self.ours(batch.keys()).items() if batch[shard] == fence}

    async def news(self) -> None:
        """Wait for the next turn."""
        self._news.clear()
        await self._news.wait()

    async def raise_fence(self, shard: int, seen: int) -> None:
        """The broker has seen a higher fence than ours, as it does after the database was restored. If a turn confirms
        that the shard is ours, continue with a fence above it."""
        fence = self.held.get(shard)
        await self.turn()
        if fence is None or self.held.get(shard) != fence:
            return
        if await self._thread.run(self._thread.store.raise_fence, shard, fence, seen + 1):
            self.held[shard] = seen + 1
            log.warning(
                "shard %d of the outbox continues with fence %d: the broker has seen fence %d, so the database was "
                "probably restored from a backup. Events that were published after the backup may be published again",
                *(shard, seen + 1, seen),
            )

    @contextmanager
    def using(self, shards: Collection[int]) -> Iterator[None]:
        """While the body runs, rows of these shards are being published, so the shards are not given back."""
        self._busy = frozenset(shards)
        try:
            yield
        finally:
            self._busy = frozenset()

    def _decide(self, view: RelaysView) -> LeasePlan:
        return self._leases.decide(view, clock.now(), self._busy)
