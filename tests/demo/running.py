"""A demo with a page, in its own process."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ONWARD = [sys.executable, "-m", "onward"]


class Running:
    def __init__(self, folder: Path, port: int, *, burst: int = 500) -> None:
        self.process = subprocess.Popen(
            [*ONWARD, "demo", "--port", str(port), "--events", str(burst)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
        )
        self.printed: list[str] = []
        self.port = self._port()

    def _port(self) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                return int(found[1])
        raise AssertionError(f"no page: {self.printed} {self.process.communicate()}")

    def post(self, path: str) -> int:
        return self.status("POST", path)

    def status(self, method: str, path: str) -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path)
            return connection.getresponse().status

    def letter(self, order: int) -> dict[str, Any]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", f"/letter?order={order}")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            letter: dict[str, Any] = json.loads(answer.read())
            return letter

    def until(self, wanted: Callable[[dict[str, Any]], bool], within_s: float = 60.0) -> dict[str, Any]:
        """The first snapshot of the stream for which `wanted` returns True."""
        deadline = time.monotonic() + within_s
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request("GET", "/events")
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    snapshot: dict[str, Any] = json.loads(line[6:])
                    if wanted(snapshot):
                        return snapshot
                    assert time.monotonic() < deadline, snapshot
        raise AssertionError("the stream ended")

    def workers(self) -> list[int]:
        return [worker["pid"] for worker in self.until(lambda _: True)["workers"]]

    def end(self, number: int) -> tuple[str, str]:
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)
