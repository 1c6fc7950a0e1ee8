"""What a relay counts, and why it is not ready."""

import logging
import time
from collections import Counter
from collections.abc import Sequence

from onward import clock
from onward.error_report import storable
from onward.outbox.base import OutboxRow

log = logging.getLogger("onward")

_PATIENCE_S = 5.0  # a shorter outage of the database is not reported


class RelayFigures:
    """The figures of the relay of one outbox, which is named by its table."""

    def __init__(self, table: str, max_age_s: float) -> None:
        self.published: Counter[str] = Counter()  # by topic
        self.parked = 0  # rows; counted by the owner of one shard
        self.shards = 0
        self._table = table
        self._max_age_s = max_age_s
        self._since: list[float] = []  # Unix times of the oldest events that are not published
        self._failure = ""  # why the broker did not accept them
        self._outage = ""
        self._outage_began: float | None = None

    def reading(self, rows: Sequence[OutboxRow], parked: float | None) -> None:
        """The relay has these rows to publish. `parked`: the Unix time of the oldest parked event to try again."""
        times = [min((row.event.time for row in rows), default=None), parked]
        self._since = [each for each in times if each is not None]

    def refused(self, why: str) -> None:
        """The broker did not accept rows. They stay in the outbox."""
        if not self._failure:
            log.warning(
                "outbox %s: its events wait, because the broker did not accept them: %s", self._table, storable(why)
            )
        self._failure = why

    def done(self, rows: Sequence[OutboxRow]) -> None:
        """These rows are published."""
        if rows and self._failure:
            log.info("outbox %s: its events are published again", self._table)
            self._failure = ""
        self.published.update(row.event.topic for row in rows)

    def lost(self, why: str) -> None:
        """The database cannot be used."""
        self._outage = why
        if self._outage_began is None:
            self._outage_began = clock.now()
            log.warning("outbox %s cannot be used, the relay tries again: %s", self._table, storable(why))

    def began(self, where: str) -> None:
        log.info("outbox %s of %s: its relay publishes its events", self._table, where)

    def ended(self) -> None:
        count = self.published.total()
        log.info("outbox %s: stopped, %s event%s published", self._table, f"{count:,}", "" if count == 1 else "s")

    def found(self) -> None:
        """The database can be used."""
        if self._outage_began is not None:
            log.info("outbox %s can be used again", self._table)
        self._outage_began = None

    @property
    def oldest_s(self) -> float:
        """The age of the oldest event that the relay has read and not published."""
        return max((time.time() - since for since in self._since), default=0.0)

    def troubles(self) -> Sequence[str]:
        found = []
        if self._outage_began is not None and clock.now() - self._outage_began > _PATIENCE_S:
            found.append(f"outbox {self._table}: {self._outage}")
        if self.oldest_s > self._max_age_s:
            why = f" ({self._failure})" if self._failure else ""
            found.append(
                f"outbox {self._table}: an event has waited for more than outbox_max_age_s={self._max_age_s:g}{why}; "
                "see `onward outbox status`"
            )
        return found
