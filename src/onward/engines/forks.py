"""A child process that a handler forks must not handle events as a clone of its parent."""

import contextlib
import os
import sys

count = 0  # how many forks led to this process; an engine belongs to the process that started it


def _forked() -> None:
    global count
    count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def end(error: BaseException | None) -> None:
    """End this process. The handler forked, and this is the child: it would go on to handle events as a clone."""
    code = error.code if isinstance(error, SystemExit) else (error is not None)
    with contextlib.suppress(Exception):
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)
