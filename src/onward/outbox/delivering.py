"""A batch on its way to the broker: which of its rows are still to be published, and which will be parked. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from onward.outbox.base import Lane, OutboxRow, ParkedRow
from onward.outbox.sending import BEHIND, RowFailure


class BatchDelivery:
    """`held`: the shards, with their fences, in which the batch can still be published as a whole."""

    def __init__(self, rows: Sequence[OutboxRow], held: Mapping[int, int], lanes: Iterable[Lane]) -> None:
        """`lanes`: the lanes with parked rows. Their rows are parked at once, behind the others."""
        self.held = dict(held)
        self.left = [row for row in rows if row.shard in held]
        self.parked: list[ParkedRow] = []
        self._stopped: set[Lane | None] = set(lanes)
        self._park(())

    def keep(self, held: Mapping[int, int]) -> None:
        """Continue with these shards only. The others are no longer ours, so their rows are read again by the owner."""
        self.held = {shard: fence for shard, fence in self.held.items() if held.get(shard) == fence}
        self.left = [row for row in self.left if row.shard in self.held]
        self.parked = [each for each in self.parked if each.row.shard in self.held]

    def settle(self, failed: Sequence[RowFailure]) -> None:
        """After a round: `failed` are left, everything else is published. Refused rows are parked, and the rows behind
        them too."""
        again = {failure.row.id: failure for failure in failed}
        self.left = [row for row in self.left if row.id in again]
        self._park(failure for failure in failed if failure.refused)

    def give_up(self, failed: Sequence[RowFailure]) -> None:
        """Park all rows that are left, so that the rest of the outbox does not wait for them."""
        self._park(failed)

    def _park(self, failed: Iterable[RowFailure]) -> None:
        """Park these rows, and the rows behind them in their lanes. A refused row is parked only as the first row of
        its lane. Otherwise it stays left, until the rows before it are published or parked."""
        first: dict[Lane | None, int] = {}
        for row in self.left:
            first.setdefault(row.lane, row.id)
        chosen = {
            each.row.id: each
            for each in failed
            if not each.refused or each.row.lane is None or first[each.row.lane] == each.row.id
        }
        rows, self.left = self.left, []
        for row in rows:
            if row.lane in self._stopped:
                self.parked.append(ParkedRow(row, BEHIND, refused=False))
            elif row.id in chosen:
                self.parked.append(ParkedRow(row, chosen[row.id].why, chosen[row.id].refused))
                self._stopped.update([] if row.lane is None else [row.lane])
            else:
                self.left.append(row)
