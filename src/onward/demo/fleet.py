"""The worker processes: starts them, replaces those that die, and ends them with the demo."""

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

# Longer than the lease, so that you can see the other workers take over before the replacement starts.
REPLACE_AFTER_S = 4.0
STOP_AFTER_S = 8.0


class DemoWorker:
    """A numbered place in the fleet and its current process."""

    def __init__(self, slot: int, process: subprocess.Popen[bytes]) -> None:
        self.slot = slot
        self.process = process
        self.kills = 0
        self.ended: float | None = None  # when the fleet noticed that the process had ended

    def replace_by(self, process: subprocess.Popen[bytes]) -> None:
        self.release()
        self.process = process
        self.ended = None

    def release(self) -> None:
        """Close our end of the pipe to a process that has ended."""
        assert self.process.returncode is not None, "only an ended process can be released"
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
        """Send SIGKILL to this worker and wait for its end. Returns its pid, or None if it was not running."""
        worker = self.workers[slot - 1]
        if not worker.alive:
            return None
        worker.process.kill()
        worker.process.wait()
        worker.kills += 1
        worker.ended = time.monotonic()
        return worker.pid

    def tend(self) -> None:
        """Report workers that have died, and replace each one REPLACE_AFTER_S later."""
        for worker in self.workers:
            if worker.alive and worker.process.poll() is not None:
                worker.ended = time.monotonic()
                why = last_line(self.log(worker.slot)) or f"exit code {worker.process.returncode}"
                self._say("bad", f"worker {worker.slot} (pid {worker.pid}) ended by itself: {why}")
            elif worker.replaced_in_s() == 0.0:
                worker.replace_by(self._start(worker.slot))

    async def stop(self) -> None:
        """Ask all workers to end, wait STOP_AFTER_S, and kill those that are still running."""
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
        # -P keeps the current folder out of sys.path: a file such as queue.py there would hide a standard module.
        # But if the demo itself was imported from the current folder, the worker must find it there too.
        isolate = [] if os.getcwd() in sys.path else ["-P"]
        command = [sys.executable, *isolate, "-m", "onward.demo.worker", str(self._folder), str(slot), self._work]
        with self.log(slot).open("ab") as log:
            # In its own session a worker does not receive Ctrl-C. The demo receives it, and then stops the workers.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        self._say("worker", f"worker {slot} (pid {process.pid}) started")
        return process


def last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
