"""Finding files that changed."""

import os
from pathlib import Path

import pytest

from onward.cli.watch import Watch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("shop.py", "deep/er/price.py", ".venv/lib.py", "node_modules/x.py", "deep/__pycache__/y.py", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


def touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("name", ["shop.py", "deep/er/price.py"])
def test_a_change_is_reported_once(folder: Path, name: str) -> None:
    watch = Watch(folder)
    touch(folder / name)
    assert watch.changed() == Path(name)
    assert watch.changed() is None


def test_new_and_removed_files_are_changes(folder: Path) -> None:
    watch = Watch(folder)
    (folder / "new.py").write_text("")
    assert watch.changed() == Path("new.py")
    (folder / "new.py").unlink()
    assert watch.changed() == Path("new.py")


@pytest.mark.parametrize("name", [".venv/lib.py", "node_modules/x.py", "deep/__pycache__/y.py", "a.txt"])
def test_files_of_other_kinds_and_in_skipped_folders_are_ignored(folder: Path, name: str) -> None:
    watch = Watch(folder)
    touch(folder / name)
    assert watch.changed() is None
