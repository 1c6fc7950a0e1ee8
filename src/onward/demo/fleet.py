"""The worker processes: started, replaced when they die, ended together with the demo."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from onward.demo.shop import Work

# Longer than the lease, so that the survivors are seen to take over before the replacement comes.
REPLACE_AFTER_S = 4.0
STOP_AFTER_S = 8.0


class DemoWorker:
    """A place in the fleet and the process that fills it just now."""

    def __init__(self, slot: int, process: subprocess.Popen[bytes]) -> None:
        self.slot = slot
        self.process = process
        self.kills = 0
        self.ended: float | None = None  # when it was seen dead

    def filled_by(self, process: subprocess.Popen[bytes]) -> None:
        self.release()
        self.process = process
        self.ended = None

    def release(self) -> None:
        """Let go of a process that has ended."""
        assert self.process.returncode is not None, "only an ended process is let go"
        if self.process.stdin is not None:
            self.process.stdin.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.ended is None

    def replaced_in_s(self) -> float | None:
        return None if self.ended is None else max(0.0, self.ended + REPLACE_AFTER_S - time.monotonic())


class Fleet:
    def __init__(self, folder: Path, size: int, work: Work, say: Callable[[str, str], None]) -> None:
        self._folder = folder
        self._work = msgspec.json.encode(work).decode()
        self._say = say
        self.workers = [DemoWorker(slot, self._start(slot)) for slot in range(1, size + 1)]

    def kill(self, slot: int) -> int | None:
        """SIGKILL. Returns the pid, or None if no worker is alive there."""
        worker = self.workers[slot - 1]
        if not worker.alive:
            return None
        worker.process.kill()
        worker.process.wait()
        worker.kills += 1
        worker.ended = time.monotonic()
        return worker.pid

    def tend(self) -> None:
        """Notice workers that died, and replace those that have been dead for a while."""
        for worker in self.workers:
            if worker.alive and worker.process.poll() is not None:
                worker.ended = time.monotonic()
                why = last_line(self.log(worker.slot)) or f"exit code {worker.process.returncode}"
                self._say("bad", f"worker {worker.slot} (pid {worker.pid}) ended by itself: {why}")
            elif worker.replaced_in_s() == 0.0:
                worker.filled_by(self._start(worker.slot))

    async def stop(self) -> None:
        """Ask all to end, wait, and make sure."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._wait)
        for worker in self.workers:
            if worker.process.poll() is None:
                text = f"worker {worker.slot} (pid {worker.pid}) did not end within {STOP_AFTER_S:.0f} s and was killed"
                self._say("bad", text)
        self.end_now()

    def _wait(self) -> None:
        deadline = time.monotonic() + STOP_AFTER_S
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))

    def end_now(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()
            worker.release()

    def log(self, slot: int) -> Path:
        return self._folder / f"worker-{slot}.log"

    def _start(self, slot: int) -> subprocess.Popen[bytes]:
        # -P unless we ourselves were found in the current folder: a newcomer's own queue.py must not be imported.
        isolate = [] if os.getcwd() in sys.path else ["-P"]
        command = [sys.executable, *isolate, "-m", "onward.demo.worker", str(self._folder), str(slot), self._work]
        with self.log(slot).open("ab") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which then ends the workers in good order.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        self._say("worker", f"worker {slot} (pid {process.pid}) started")
        return process


def last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
