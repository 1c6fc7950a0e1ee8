"""One worker process: `python -m onward.demo.worker FOLDER SLOT WORK`. It ends when the demo ends."""

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from onward.demo.effects import Effects
from onward.demo.shop import Work, billing, open_app

_PR_SET_PDEATHSIG = 1


def main(folder: str, slot: str, work: str) -> None:
    die_with_parent()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app = open_app(Path(folder))
    billing(app, Path(folder), Effects(Path(folder), int(slot)), msgspec.json.decode(work, type=Work))
    asyncio.run(app.run())


def die_with_parent() -> None:
    """End this process when the demo ends, even if the demo was killed. On Linux the kernel sends SIGKILL. Elsewhere
    stdin closes: it is a pipe that only the demo holds open."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_stdin, name="watch-parent", daemon=True).start()


def _watch_stdin() -> None:
    # os.read, not sys.stdin: a thread that blocks in a buffered reader would hold its lock at interpreter exit.
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
