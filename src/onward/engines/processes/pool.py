"""The worker processes of an engine: starts, ends and replaces them."""

import asyncio
import logging
import time
from collections.abc import Callable

from onward.clock import now
from onward.engines.processes import wire
from onward.engines.processes.worker import WorkerHandle
from onward.errors import BadHandler

log = logging.getLogger("onward")

_START_S = 60.0  # how long a worker may take to import the handler
_LEAVE_S = 5.0  # a worker that was asked to end is killed after this time
_CLOSE_S = 1.0
_REAP_S = 0.02  # how long a worker that closed its socket may take to end
_TRIES = 4  # the pool gives up after this many workers in a row died before they ran anything
_BACKOFF_S = 0.2
_YOUNG_S = 30.0  # a worker that lived longer has not died because of its start


class WorkerPool:
    """Keeps `size` workers running. It calls `readable` when a worker has sent something, and `gave_up`, once, when no
    worker can start."""

    def __init__(
        self,
        setup: wire.Setup,
        *,
        size: int,
        max_events: int,
        readable: Callable[[WorkerHandle], None],
        gave_up: Callable[[BadHandler], None],
    ) -> None:
        self.workers: list[WorkerHandle] = []
        self.restarted = 0
        self._setup = setup
        self._size = size
        self._max_events = max_events
        self._readable = readable
        self._gave_up = gave_up
        self._open = True  # the pool may start workers
        self._failures = 0  # workers in a row that died before they ran anything
        self._gone: list[WorkerHandle] = []  # removed workers that may not have ended yet

    def start(self) -> None:
        for _ in range(self._size):
            self.hire()

    def hire(self) -> None:
        if not self._open:
            return
        try:
            worker = WorkerHandle(self._setup, self._max_events, self._readable)
        except OSError as error:
            self._retry(f"a worker process cannot be started: {error}")
            return
        self.workers.append(worker)
        asyncio.get_running_loop().call_later(_START_S, self._check_start, worker)

    def retire(self, worker: WorkerHandle) -> None:
        """Ask a worker to end by itself. It is killed if that takes too long."""
        worker.retire()
        asyncio.get_running_loop().call_later(_LEAVE_S, worker.kill)

    def remove(self, worker: WorkerHandle) -> None:
        """A worker is dead or must end: wait until its process has ended. The caller then reads it one last time."""
        self.workers.remove(worker)
        worker.mute()
        if not worker.retired:
            _wait(worker)

    def replace(self, worker: WorkerHandle, fate: str, *, ran: bool) -> None:
        """Close a removed worker, and start another if this one has no successor yet. `ran`: it began some run."""
        worker.close()
        self._reap(worker)
        if worker.retired:
            return
        self.restarted += 1
        if not ran and now() - worker.born <= _YOUNG_S:
            self._retry(worker.unfit or f"worker process {worker.pid} {fate} before it ran anything")
            return
        log.warning("%s: worker process %d %s; a new one replaces it", self._setup.target, worker.pid, fate)
        self._failures = 0
        if worker.left:  # otherwise its successor was started when it got its last work
            self.hire()

    def close(self) -> list[WorkerHandle]:
        """Start no more workers. Returns those that run; the caller asks each to end, then waits in `wait_ended`."""
        self._open = False
        workers, self.workers = self.workers, []
        self._gone += workers
        return workers

    async def wait_ended(self) -> None:
        """Wait for the processes to end. Kill those that do not."""
        workers = self._gone
        try:
            for patience_s in (_CLOSE_S, _LEAVE_S):
                deadline = now() + patience_s
                while now() < deadline and not all(worker.ended() for worker in workers):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                for worker in workers:
                    worker.kill()
        finally:
            for worker in workers:
                worker.kill()
                worker.close()

    def _check_start(self, worker: WorkerHandle) -> None:
        if not worker.ready and worker in self.workers:
            worker.unfit = f"importing {self._setup.target} took more than {_START_S:g} s"
            self._readable(worker)

    def _retry(self, why: str) -> None:
        """A worker could not run anything: try another one after a while, or give up."""
        self._failures += 1
        if self._failures < _TRIES:
            log.error("%s: %s", self._setup.target, why)
            asyncio.get_running_loop().call_later(_BACKOFF_S * 2**self._failures, self.hire)
        elif self._open:
            self._open = False
            self._gave_up(BadHandler(f"worker processes of {self._setup.target} do not start: {why}"))

    def _reap(self, worker: WorkerHandle) -> None:
        """Leave no zombie: check a removed worker until its process has ended."""
        self._gone = [each for each in self._gone if each is not worker and not each.ended()]
        if not worker.ended():
            self._gone.append(worker)
            asyncio.get_running_loop().call_later(_LEAVE_S, self._reap, worker)


def _wait(worker: WorkerHandle) -> None:
    """Wait for a process that closed its socket or was killed. It ends within microseconds."""
    deadline = time.monotonic() + _REAP_S
    while not worker.ended() and time.monotonic() < deadline:
        time.sleep(0.0005)
    worker.kill()
