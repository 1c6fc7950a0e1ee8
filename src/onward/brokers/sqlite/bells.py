"""Bells: each member has an empty file in a folder beside the database.

A publish wakes the owners of the partitions that got events, and no other member. The file name follows from the name
of the owner, so the store needs no list of bells. Some members have no bell: they run an older release, belong to
another user, or the system had no free inotify watch. Ringing the lock file wakes them, together with every process.
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from onward.brokers.sqlite.doorbell import Doorbell, MemberBell

_BELL = re.compile("[0-9a-f]{32}")


class Bells:
    """The folder of bells. `hang`, `take_down` and `sweep` run inside the writer's transactions, so the bells change
    together with the list of members."""

    def __init__(self, folder: Path, doorbell: Doorbell) -> None:
        self._folder = folder
        self._doorbell = doorbell

    def of(self, owner: str) -> MemberBell:
        """The bell that a member of this process waits for. It works even if its file cannot be created."""
        return self._doorbell.bell(self._path(owner))

    def ring(self, owners: Iterable[str]) -> bool:
        """Wake these owners. False if we could not ring the bell of one of them."""
        all_rang = True
        for owner in owners:
            try:
                os.utime(f"{self._folder}/{_name(owner)}")  # publishers wait for this, and a Path takes twice as long
            except OSError:
                all_rang = False
        return all_rang

    def hang(self, owner: str) -> None:
        """Give a member of this process its bell, if it has none."""
        path = self._path(owner)
        if path.exists():
            return
        with contextlib.suppress(OSError):  # a full disk, a folder of another user
            self._folder.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if not self._doorbell.watch(path):
                path.unlink()  # without a watch it would not wake its member; publishers then use the lock file

    def take_down(self, owner: str) -> None:
        """Remove the bell of a member that leaves."""
        self._doorbell.unwatch(self._path(owner))
        self._remove(_name(owner))

    def sweep(self, owners: Collection[str]) -> None:
        """Remove all bells except those of these owners: their members were killed and are off the list. Files that are
        not bells stay."""
        with contextlib.suppress(OSError):
            for name in {*os.listdir(self._folder)} - {_name(owner) for owner in owners}:
                if _BELL.fullmatch(name):
                    self._remove(name)

    def close(self) -> None:
        """Stop watching, and end all waits."""
        self._doorbell.close()

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()
        with contextlib.suppress(OSError):  # it still has other bells
            self._folder.rmdir()

    def _path(self, owner: str) -> Path:
        return self._folder / _name(owner)


def _name(owner: str) -> str:
    """The suffix of the owner's name, which is unique for each subscription."""
    return owner.rpartition(":")[2]


def bells_path(database: Path) -> Path:
    return database.with_name(database.name + "-bells")
