"""The earlier processes of a worker's slot, and which of them have ended together with everything they started.

Each leads a process group, to which its engine workers and the programs of its handlers belong. The partitions of a
dead process can be taken over at once only when its whole group has ended.
"""

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from onward.cli.leash import member_of

LEAVE_S = 1.5  # an engine worker takes a moment to notice that its parent is dead
_MOST = 16  # members to remember; the leases of earlier ones ended long ago
_PROC = Path("/proc")


class Predecessors:
    """The earlier processes of one slot."""

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self._gone: deque[str] = deque(maxlen=_MOST)
        self._left: dict[str, int] = {}  # the process group of each member that may have left a process running
        self._last = 0  # the process group of the last member
        self._wait_until = 0.0

    def ended(self, pid: int, now: float) -> None:
        """Record that this process has ended. The caller has waited for it (`wait`)."""
        self._last = self._left[member_of(self.slot, pid)] = pid
        self._wait_until = now + LEAVE_S
        while len(self._left) > _MOST:
            del self._left[next(iter(self._left))]

    def gone(self) -> tuple[str, ...]:
        """The members that have no process left."""
        for member, group in list(self._left.items()):
            if not is_running(group):
                del self._left[member]
                self._gone.append(member)
        return tuple(self._gone)

    def are_leaving(self, now: float) -> bool:
        """A process of the last member's group still runs, and may end soon."""
        return now < self._wait_until and is_running(self._last)

    def left(self) -> list[str]:
        """The processes that the last member left running, as text for the log."""
        return list(running(self._last)) if self._last and is_running(self._last) else []


def is_running(group: int) -> bool:
    """Does a process of this group run? A zombie does not count."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass  # if we are the first process of a container, we must wait for orphans
    if any(True for _ in running(group)):
        return True
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not (_PROC / "self/stat").exists()


def running(group: int) -> Iterator[str]:
    """Process id and name of each process that runs in the group, or in another group of its session, as Linux lists
    them. The leader of the group also leads the session."""
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            before, _, after = (folder / "stat").read_text(errors="replace").rpartition(")")
            state, _, found, session, *rest = after.split()
            threads = int(rest[13])  # of a zombie: 1, or more while some of its threads still run
            if group in (int(found), int(session)) and (state not in "ZX" or threads > 1):
                yield f"{folder.name} ({before.partition('(')[2]})"
