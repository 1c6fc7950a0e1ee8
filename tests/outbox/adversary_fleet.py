"""Relays as processes that are killed, and suspended for longer than their lease, at random."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

RELAYS = 3
LEASE_S = 1.0
LONGEST_STOP_S = 2.5
PROGRESS = 100  # events
PATIENCE_S = 5.0
ROOT = Path(__file__).parent.parent.parent


class RelayFleet:
    """`command`: starts one relay, as arguments of Python. It runs in `folder`."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = [sys.executable, *command]
        self._folder = folder
        self._log = folder.joinpath("relays.log").open("ab")
        self._relays: list[subprocess.Popen[bytes]] = []
        self._asleep: dict[int, float] = {}  # until when
        self.kills = self.stops = 0

    def __enter__(self) -> Self:
        self._relays = [self._start() for _ in range(RELAYS)]
        return self

    def torment_until(self, over: Callable[[], bool], published: Callable[[], Sequence[object]]) -> None:
        """Kill and suspend relays until then. Afterwards all of them run. Between two blows they publish something, so
        that they are at work when the next one comes."""
        while not over():
            before, now = len(published()), time.monotonic()
            while len(published()) < before + PROGRESS and time.monotonic() < now + PATIENCE_S and not over():
                time.sleep(0.05)
                self._resume(time.monotonic())
            time.sleep(random.uniform(0, 0.3))
            if random.random() < 0.4:
                self._replace(random.randrange(RELAYS))
            else:
                self._suspend(random.randrange(RELAYS))
        self._resume(float("inf"))

    def output(self) -> str:
        """The end of what all relays wrote."""
        return self._folder.joinpath("relays.log").read_text()[-3_000:]

    def failed(self) -> list[int]:
        """The exit codes of relays that have ended by themselves."""
        return [code for relay in self._relays if (code := relay.poll()) is not None]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for relay in self._relays:
            relay.kill()
            relay.wait()
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        return subprocess.Popen(self._command, cwd=self._folder, stdout=self._log, stderr=self._log, env=environment)

    def _replace(self, number: int) -> None:
        assert not self.failed(), f"a relay has ended by itself: {self.output()}"
        self._asleep.pop(number, None)
        self._relays[number].kill()
        self._relays[number].wait()
        self._relays[number] = self._start()
        self.kills += 1

    def _suspend(self, number: int) -> None:
        if number not in self._asleep:
            self._relays[number].send_signal(signal.SIGSTOP)
            self._asleep[number] = time.monotonic() + random.uniform(LEASE_S / 2, LONGEST_STOP_S)
            self.stops += 1

    def _resume(self, now: float) -> None:
        for number, at in list(self._asleep.items()):
            if at <= now:
                self._relays[number].send_signal(signal.SIGCONT)
                del self._asleep[number]
