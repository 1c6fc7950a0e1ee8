import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demo.running import Running


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def demo(tmp_path: Path, free_port: int) -> Iterator[Running]:
    running = Running(tmp_path, free_port)
    yield running
    if running.process.poll() is None:
        running.end(signal.SIGKILL)
