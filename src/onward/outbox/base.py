"""The contract of an outbox store: the tables of one outbox in one database, as the relay sees them.

A store is used by one thread at a time, and every method is one short transaction. The tests in
tests/outbox/test_stores.py prove the promises below on every store. Some terms:

- A **shard** is a fixed part of the keys. One relay owns a shard at a time. Events without a key are spread by their
  event id.
- A **fence** is the number of an ownership of a shard. It grows with every claim.
- **Order**: of two rows with one topic and key, the one that was committed first has the lower id. Writers ensure this:
  they insert a row after they have locked what the event is about. Ids of different keys have no such order, so a row
  with a low id may appear after rows with higher ids.
- A **parked** row was taken out of the flow, because the broker did not accept it or an earlier row of its key. It
  stays parked until it is published.

A method that cannot reach the database raises OutboxUnreachable; the relay calls `close`, then `open` again. A method
raises BadOutbox if the tables are missing, of an unknown version or not accessible.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from onward.event import Event

Lane = tuple[str, str]  # a topic and a key


class OutboxRow(NamedTuple):
    """A committed row. Its `event` is as the writer built it.

    `fault`: why this row cannot be published, if another program has written it wrongly; "" if it can."""

    id: int
    shard: int
    event: Event
    fault: str = ""

    @property
    def lane(self) -> Lane | None:
        """The topic and key within which order counts. None: the event has no key."""
        return None if self.event.key is None else (self.event.topic, self.event.key)


class ParkedRow(NamedTuple):
    """A row to park. `why`: the broker's reason.

    `refused`: this event can never be accepted as it is, so the relay does not try again until an operator releases it.
    Only the first parked row of a key may be `refused`. Later rows of the key wait behind it."""

    row: OutboxRow
    why: str
    refused: bool


class RelayState(NamedTuple):
    """A relay as the other relays see it. Its `beat` changes with every turn that it takes."""

    name: str
    beat: int
    lease_s: float


class ShardState(NamedTuple):
    number: int
    owner: str | None  # the name of a relay
    fence: int


class RelaysView(NamedTuple):
    """All relays and all shards, read in the transaction of a turn. Our own relay has its new beat."""

    relays: Sequence[RelayState]
    shards: Sequence[ShardState]


class LeasePlan(NamedTuple):
    """What a relay does in a turn."""

    claim: Sequence[int] = ()  # take these shards, with a higher fence
    release: Sequence[int] = ()  # give back these shards of ours
    strike: Sequence[str] = ()  # remove these relays, whose leases have ended; their shards become free
    leave: bool = False  # remove our own relay


class OutboxIdentity(NamedTuple):
    """`outbox_id` names this outbox: no other database has the same one, not even a copy of this database."""

    outbox_id: str
    shards: int
    version: int
    rebaselined: bool  # this turn found that the database was restored or copied, and gave the outbox a new id


class Turn(NamedTuple):
    """The result of a turn: the shards that this relay owns now, with their fences."""

    identity: OutboxIdentity
    held: Mapping[int, int]


class OutboxBatch(NamedTuple):
    """Rows to publish, in this order. `more`: there may be further rows, so read again at once.

    `mark` belongs to the store. It says how far the shards of this batch are after `advance`."""

    rows: Sequence[OutboxRow]
    more: bool
    mark: object


class OutboxStore(Protocol):
    def open(self) -> None:
        """Connect, and check that the tables and the rights are there and that the database accepts writes."""

    def turn(self, name: str, lease_s: float, decide: Callable[[RelaysView], LeasePlan]) -> Turn:
        """Renew the lease of relay `name`, and change owners as `decide` says. All in one transaction, and only one
        relay at a time takes a turn. A relay that is not listed, or was struck, is listed first; it then owns nothing.

        If the tables were restored from a dump or copied, it first gives the outbox a new id, frees all shards, and
        makes sure that no committed row counts as published unless it was.
        """

    def read(self, held: Mapping[int, int], *, limit: int, max_bytes: int) -> OutboxBatch:
        """The next rows of these shards that are neither published nor parked: at most `limit`, and at most `max_bytes`
        of payload but always one. A row is read again and again until `advance` has passed it.

        Every committed row is read at some time. If a row is in a batch, all earlier rows of its key are in the same
        batch before it, or are parked, or were passed by `advance`. A transaction that is open for long delays only its
        own rows.
        """

    def advance(self, batch: OutboxBatch, held: Mapping[int, int], parked: Sequence[ParkedRow] = ()) -> Sequence[int]:
        """All rows of the batch are published, except the `parked` ones, which are stored as parked in the same
        transaction. Returns the shards that this relay has lost; in those the call had no effect."""

    def parked_lanes(self, held: Mapping[int, int]) -> Mapping[int, Sequence[Lane]]:
        """The lanes with parked rows, by shard."""

    def parked(
        self, held: Mapping[int, int], *, limit: int, max_bytes: int, without: Collection[str] = ()
    ) -> Sequence[OutboxRow]:
        """Parked rows to try again, ascending by id: those without a `refused` row in their lane. Bounded as `read`.
        Rows of the topics in `without` are left out."""

    def unpark(
        self, held: Mapping[int, int], published: Sequence[OutboxRow], refused: Sequence[ParkedRow] = ()
    ) -> Sequence[int]:
        """Remove parked rows that are published now, and mark others as refused. Returns the lost shards."""

    def count_parked(self) -> int:
        """All parked rows of the outbox."""

    def raise_fence(self, shard: int, fence: int, to: int) -> bool:
        """Set the fence of a shard that we own with `fence` to `to`. False if we do not own it."""

    def clean(self, *, keep_s: float, limit: int) -> int:
        """Delete up to `limit` rows that were published, and whose events are older than `keep_s`. Returns how many. A
        store that deletes rows as they are published returns 0."""

    def wait(self, timeout_s: float) -> None:
        """Return when a writer has rung the bell, or after `timeout_s`. Called by another thread than the other
        methods. A store without a bell of its own sleeps."""

    def close(self) -> None:
        """Disconnect. Idempotent. `open` connects again."""
