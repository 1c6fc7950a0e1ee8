"""Decides which handler of a process may run an event alone."""


class Quarantine:
    """Pure. Shared by the planes of one process, so that an event which may kill the process runs alone in it.

    The plane that asked first gets the quarantine once all others run nothing. While a plane asks, no other plane
    starts anything. A plane gives it back after each event. Planes that were turned away meanwhile get their turn
    before the next event runs alone.
    """

    def __init__(self) -> None:
        self._running: dict[object, int] = {}
        self._askers: dict[object, None] = {}  # in order of asking
        self._turned_away: dict[object, None] = {}  # planes with events to start

    def is_quiet(self) -> bool:
        """Whether no plane has it, asks for it, or was turned away."""
        return not self._askers and not self._turned_away

    def report(self, member: object, running: int) -> None:
        """Up to `running` calls of this member may run until it reports again."""
        self._running[member] = running

    def ask(self, member: object) -> None:
        """Ask for the quarantine. A member repeats this until it is granted."""
        if not self._turned_away or self._askers:
            self._askers.setdefault(member)

    def turn_away(self, member: object) -> None:
        """This member has events to start, and must not start them now."""
        self._turned_away.setdefault(member)

    def serve(self, member: object) -> None:
        """This member may start its events, or has none."""
        self._turned_away.pop(member, None)

    def give_back(self, member: object) -> None:
        """This member no longer needs the quarantine. Does nothing if it did not ask."""
        self._askers.pop(member, None)

    def leave(self, member: object) -> None:
        """This member runs nothing, and never will again."""
        self._askers.pop(member, None)
        self._turned_away.pop(member, None)
        self._running.pop(member, None)

    def barred(self, member: object) -> bool:
        """Whether another member has it or gets it before this one: then start nothing."""
        return bool(self._askers) and next(iter(self._askers)) is not member

    def granted(self, member: object) -> bool:
        """Whether it is this member's turn and no other member runs anything."""
        if not self._askers or next(iter(self._askers)) is not member:
            return False
        return not any(running for other, running in self._running.items() if other is not member)

    def contested(self, member: object) -> bool:
        """Whether this member waits for others. They cannot wake it, so it must check again."""
        return bool(self._askers or self._turned_away) and not self.granted(member)
