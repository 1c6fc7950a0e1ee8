"""The bells of members: an empty file each, in a folder beside the database.

A publish wakes the owners of the partitions that got events, and no other member. The name of an owner leads to its
bell, so the store needs no list of bells. Some members have none: those of an older release, of another user, or of a
system that has no watch left. For them the lock file is rung, which wakes every process.
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from onward.brokers.sqlite.doorbell import Doorbell, MemberBell

_BELL = re.compile("[0-9a-f]{32}")


class Bells:
    """Hung, taken down and swept inside the writer's transactions, as the list of members is."""

    def __init__(self, folder: Path, doorbell: Doorbell) -> None:
        self._folder = folder
        self._doorbell = doorbell

    def of(self, owner: str) -> MemberBell:
        """What a member of this process waits for, whether its file can be made or not."""
        return self._doorbell.bell(self._path(owner))

    def ring(self, owners: Iterable[str]) -> bool:
        """Wake these owners. False: one of them has no bell that we can ring."""
        heard = True
        for owner in owners:
            try:
                os.utime(f"{self._folder}/{_name(owner)}")  # in a publisher's way: a Path takes twice as long
            except OSError:
                heard = False
        return heard

    def hang(self, owner: str) -> None:
        """Give a member of this process its bell, if it has none."""
        path = self._path(owner)
        if path.exists():
            return
        with contextlib.suppress(OSError):  # a full disk, a folder of another user
            self._folder.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if not self._doorbell.watch(path):
                path.unlink()  # a bell that its member cannot hear would be rung in vain

    def take_down(self, owner: str) -> None:
        """The member leaves."""
        self._doorbell.unwatch(self._path(owner))
        self._remove(_name(owner))

    def sweep(self, owners: Collection[str]) -> None:
        """Remove the bells of all others: they were killed, and are struck off. What is no bell stays."""
        with contextlib.suppress(OSError):
            for name in {*os.listdir(self._folder)} - {_name(owner) for owner in owners}:
                if _BELL.fullmatch(name):
                    self._remove(name)

    def close(self) -> None:
        """Hear nothing more, and end all waits."""
        self._doorbell.close()

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()
        with contextlib.suppress(OSError):  # others are in it
            self._folder.rmdir()

    def _path(self, owner: str) -> Path:
        return self._folder / _name(owner)


def _name(owner: str) -> str:
    """The suffix that makes each subscription's owner unique."""
    return owner.rpartition(":")[2]


def bells_path(database: Path) -> Path:
    return database.with_name(database.name + "-bells")
