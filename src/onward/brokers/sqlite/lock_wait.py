"""How long the writer has waited for SQLite's write lock, which a transaction of another connection holds."""

from pathlib import Path

from onward import clock
from onward.brokers.sqlite import lock_holders


class LockWait:
    """Changed by the writer's thread, read by any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since: float | None = None
        self.why = ""  # SQLite's last error

    def begin(self) -> None:
        """The writer asks for the lock, for the first time or again."""
        if self._since is None:
            self._since = clock.now()

    def end(self) -> None:
        self._since, self.why = None, ""

    def trouble(self, limit_s: float) -> str:
        """Whose transaction takes too long, and what to do. "" if the wait is not longer than `limit_s`, which is a
        third of lease_s."""
        since = self._since
        waited_s = 0.0 if since is None else clock.now() - since
        if waited_s <= limit_s:
            return ""
        who = lock_holders.transaction_holder(self._path)
        return (
            f"a transaction of {who} has locked {self._path} for {waited_s:.1f} s, longer than lease_s / 3 = "
            f"{limit_s:.2g} s; make such transactions shorter, and do not wait for anything between their first write "
            "and the commit"
        )
