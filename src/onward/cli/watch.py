"""Finds Python files below a folder that changed, by their modification times."""

import os
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = {"node_modules", "__pycache__", "venv"}


class Watch:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps = dict(_stamps(folder))

    def changed(self) -> Path | None:
        """A file that was written, added or removed since the last call, relative to the folder, or None."""
        before, self._stamps = self._stamps, dict(_stamps(self._folder))
        # The pairs that only one side has. A written file has two: its old and its new stamp.
        names = sorted(name for name, _ in before.items() ^ self._stamps.items())
        return Path(names[0]).relative_to(self._folder) if names else None


def _stamps(folder: Path) -> Iterator[tuple[str, int]]:
    for name in _python_files(str(folder)):
        try:
            yield name, os.stat(name).st_mtime_ns
        except OSError:
            continue  # removed since it was listed


def _python_files(folder: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
        yield from (os.path.join(parent, name) for name in files if name.endswith(".py"))
