"""The base class of the real servers."""

import os
import shutil
import signal
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import SystemRandom
from typing import ClassVar, TypeVar

from tests.servers.guard import Guard
from tests.servers.needs import Missing, missing
from tests.servers.proxy import HOST, Proxy

READY_S = 60.0
SETUP_S = 60.0
STOP_S = 20.0
PROBE_S = 2.0
LOG_TAIL_LINES = 30

# Below the ports that the kernel gives to clients: a client that retries a dead server must not connect to itself, and
# no client may take the port of a server between its kill and its restart. From 30,000 on are those of `rabbitmqctl`.
_ports = iter(SystemRandom().sample(range(20_000, 30_000), 10_000))
_claims: list[socket.socket] = []


class ServerFailed(Exception):
    """A server did not start, or did not stop, in time. The text contains the end of its log."""


class Server(ABC):
    """One real server on loopback, in a temporary folder. A guard ends it with the test run.

    Signals reach all its processes. Port and data stay the same after kill, stop and restart; close() removes all.
    The calls block: in async code use `await asyncio.to_thread(server.restart)`.
    """

    name: ClassVar[str]
    address: ClassVar[str]
    account: ClassVar[str | None] = None  # the user to run as if we are root
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    farewell: ClassVar[signal.Signals] = signal.SIGKILL  # the signal that its main process gets first at the end

    def __init__(self) -> None:
        if lacking := missing(self.name):
            raise Missing(f"{self.name} needs {'; '.join(str(need) for need in lacking)}")
        self.host, self.port, self.pid, self.paused = HOST, free_port(), 0, False
        self.folder = Path(tempfile.mkdtemp(prefix=f"onward-{self.name.lower()}-"))
        self.log = self.folder / "log"
        self.user = self.account if os.geteuid() == 0 else None
        if self.user:
            shutil.chown(self.folder, self.user)
        self._guard = Guard(self.folder, farewell=self.farewell)

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The command line that runs the server in the foreground, the same at each start."""

    @abstractmethod
    def probe(self) -> None:
        """Raise unless the server answers, within PROBE_S. Called once its port is open."""

    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.folder), "TMPDIR": str(self.folder)}

    def prepare(self) -> None:  # noqa: B027 - Redis and Chromium need nothing
        """Create the files that the first start needs."""

    @property
    def url(self) -> str:
        return self.address.format(port=self.port)

    @property
    def running(self) -> bool:
        return self.pid > 0 and self._guard.exit_code(self.pid) is None

    def start(self) -> None:
        """Start the server and return when it answers."""
        if not self.pid:
            self.prepare()
        if not is_free(self.port):
            raise ServerFailed(f"{self.name} cannot start: another process has taken {self.host}:{self.port}")
        self.pid = self._spawn(self.command())
        until(self._answers, READY_S, f"{self.name} does not answer on {self.host}:{self.port}", self.log)

    def kill(self) -> None:
        """Kill -9 every process of the server."""
        self._guard.kill_all()
        self.paused = False

    def stop(self) -> None:
        """Ask the server to shut down cleanly, and return when it has ended."""
        self.resume()
        if self.running:
            os.kill(self.pid, self.stop_signal)
            until(lambda: not self.running, STOP_S, f"{self.name} does not stop", self.log)
        self.kill()

    def restart(self) -> None:
        """Start the server again, after kill -9 if it still runs."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP every process: connections stay open and nothing answers."""
        self._guard.stop_all()
        self.paused = True

    def resume(self) -> None:
        self._guard.signal_all(signal.SIGCONT)
        self.paused = False

    def heal(self) -> None:
        """Bring the server back if a test left it paused or dead."""
        if self.paused:
            self.resume()
        if not self.running:
            self.restart()

    def proxy(self) -> Proxy:
        """A proxy in front of this server, on a port of its own."""
        port = free_port()
        return Proxy(port=port, target_port=self.port, url=self.address.format(port=port))

    def close(self) -> None:
        """End the server and remove its folder. It cannot be used afterwards."""
        self._guard.close()

    def run(self, *command: str) -> None:
        """Run a setup command to its end, as the server's user."""
        pid = self._spawn(command)
        until(lambda: self._guard.exit_code(pid) is not None, SETUP_S, f"{command[0]} does not end", self.log)
        if code := self._guard.exit_code(pid):
            raise ServerFailed(f"{' '.join(command)} ended with {code}{log_tail(self.log)}")

    def _spawn(self, command: Sequence[str]) -> int:
        return self._guard.start(command, env=self.environment(), user=self.user, log=self.log)

    def _answers(self) -> bool:
        if not self.running:
            raise ServerFailed(f"{self.name} ended with {self._guard.exit_code(self.pid)}{log_tail(self.log)}")
        with socket.create_connection((self.host, self.port), PROBE_S):
            pass
        self.probe()
        return True


S = TypeVar("S", bound=Server)


def together(servers: Iterable[S], work: Callable[[S], object]) -> None:
    """Do the work with all servers at once."""
    servers = list(servers)
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(work, servers))


def free_port() -> int:
    """A loopback port that nothing listens on and that no other test run uses, never the same twice in one run."""
    return next(port for port in _ports if is_free(port) and _claimed(port))


def _claimed(port: int) -> bool:
    """Keep the port from other test processes until this one ends, also while its server is down."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0onward-test-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do, to ignore old connections
        try:
            attempt.bind((HOST, port))
        except OSError:
            return False
        return True


def until(done: Callable[[], bool], timeout_s: float, complaint: str, log: Path) -> None:
    """Return when `done()` is true. If it raises an error other than ServerFailed, try again."""
    deadline = time.monotonic() + timeout_s
    while True:
        reason: Exception | None = None
        try:
            if done():
                return
        except ServerFailed:
            raise
        except Exception as error:
            reason = error
        if time.monotonic() > deadline:
            raise ServerFailed(f"{complaint} within {timeout_s:.0f} s{log_tail(log)}") from reason
        time.sleep(0.02)


def log_tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:] if log.exists() else []
    return "\n".join(["; its log ends:", *lines]) if lines else "; its log is empty"
