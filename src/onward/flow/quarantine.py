"""Which handler of a process may run an event with nothing beside it."""


class Quarantine:
    """Pure. Shared by the planes of one process: what may kill the process runs with nothing else in all of it.

    The plane that asked first has it, once all others have come to rest. While any plane asks, no other starts
    anything. It is given back after each event: planes that were turned away meanwhile have their turn before the next.
    """

    def __init__(self) -> None:
        self._running: dict[object, int] = {}
        self._askers: dict[object, None] = {}  # in turn
        self._turned_away: dict[object, None] = {}  # they had something to start

    def is_quiet(self) -> bool:
        """No plane has it, asks for it, or was turned away."""
        return not self._askers and not self._turned_away

    def report(self, member: object, running: int) -> None:
        """So many calls of this member may be running until it reports again."""
        self._running[member] = running

    def ask(self, member: object) -> None:
        """To be asked again and again until it is granted."""
        if not self._turned_away or self._askers:
            self._askers.setdefault(member)

    def turn_away(self, member: object) -> None:
        """It has something to start, and must not now."""
        self._turned_away.setdefault(member)

    def serve(self, member: object) -> None:
        """It may start what it has, or has nothing."""
        self._turned_away.pop(member, None)

    def give_back(self, member: object) -> None:
        """It neither has nor wants it. Harmless when it did not ask."""
        self._askers.pop(member, None)

    def leave(self, member: object) -> None:
        """It runs nothing, and never will again."""
        self._askers.pop(member, None)
        self._turned_away.pop(member, None)
        self._running.pop(member, None)

    def barred(self, member: object) -> bool:
        """Another member has it, or is to have it before this one: start nothing."""
        return bool(self._askers) and next(iter(self._askers)) is not member

    def granted(self, member: object) -> bool:
        """It is this one's turn, and no other runs anything."""
        if not self._askers or next(iter(self._askers)) is not member:
            return False
        return not any(running for other, running in self._running.items() if other is not member)

    def contested(self, member: object) -> bool:
        """This member waits for others, which cannot report to it when they are done."""
        return bool(self._askers or self._turned_away) and not self.granted(member)
