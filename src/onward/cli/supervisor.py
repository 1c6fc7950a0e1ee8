"""Keeps a number of child processes running, replaces those that end, and lets all of them drain when it stops."""

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from enum import IntEnum
from uuid import uuid4

import msgspec

from onward import brokers, clock
from onward.cli import find, leash, policy
from onward.cli.leash import MARKER, Hello, Joined, Message, Place
from onward.cli.predecessors import Predecessors
from onward.cli.watch import Watch
from onward.observe.workers import Report, Workers
from onward.settings import Settings, redacted
from onward.signals import ECHO_S, STOP_SIGNALS

log = logging.getLogger("onward")

LOCK_LIMIT_S = 5.0
GRACE_S = 12.0  # beyond drain_timeout_s: a consumer needs some seconds for its last settle and release
START_LIMIT = 3
_TICK_S = 0.25
_LEAVING_TICK_S = 0.02  # while a replacement waits for processes that its predecessor left
_LOOK_S = 0.5  # between two looks at the files and at the lock
_CHUNK_BYTES = 65_536
_CHUNKS = 4  # read from one child before the next one's turn
_MESSAGE_LIMIT_BYTES = 16 << 20  # a report on 1,000 partitions has less than 1 MiB


class ChildProcess:
    """A child process and the messages that it has sent."""

    def __init__(self, place: Place, command: Sequence[str]) -> None:
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        self._received = bytearray()  # the start of a message
        self.talks = True  # its end of the link is open
        self.unreadable = 0  # messages that could not be decoded
        self.started = clock.now()
        self.hello: Hello | None = None
        self.joined_at = math.inf  # when its handlers joined their groups
        self.kill_at: float | None = None  # set when it was asked to end
        try:
            # Its own session, so that Ctrl-C reaches only the supervisor. Otherwise the child would get it twice.
            marker = msgspec.json.encode(place).decode()
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), start_new_session=True, env={**os.environ, MARKER: marker}
            )
        except OSError:
            self._link.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def link(self) -> socket.socket:
        return self._link

    @property
    def floods(self) -> bool:
        """Has it sent more than the limit without completing a message?"""
        return len(self._received) > _MESSAGE_LIMIT_BYTES

    def listen(self) -> list[Report]:
        """Read the messages that have arrived, and return the reports. Drops messages that cannot be decoded."""
        reports = []
        for line in self._lines():
            if self.hello is None:
                self.hello = self._read(line, Hello)
            elif self.joined_at == math.inf and leash.read(line, Joined) is not None:
                self.joined_at = clock.now()
            elif (report := self._read(line, Report)) is not None:
                reports.append(report)
        return reports

    def hang_up(self) -> None:
        """Close the link, which ends the child unless it hangs."""
        self._link.close()
        self._received.clear()
        self.talks = False

    def _lines(self) -> list[bytearray]:
        if not self.talks:
            return []
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            for _ in range(_CHUNKS):
                got = self._link.recv(_CHUNK_BYTES)
                self._received += got
                self.talks = bool(got)
        *lines, self._received = self._received.split(b"\n")
        return lines

    def _read(self, line: bytearray, kind: type[Message]) -> Message | None:
        message = leash.read(line, kind)
        self.unreadable += message is None
        return message

    def ask_to_end(self, now: float) -> None:
        if self.kill_at is None:
            self.kill_at = now + GRACE_S + (self.hello.drain_timeout_s if self.hello else 0.0)
            self.process.send_signal(signal.SIGTERM)

    def ended(self, now: float) -> policy.End | None:
        """How it ended, or None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        self.listen()  # it may have greeted since the last look
        self._link.close()
        return policy.End(code, now - self.started, greeted=self.hello is not None)


class Slot:
    """A place for one child at a time."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.predecessors = Predecessors(name)
        self.child: ChildProcess | None = None
        self.record = policy.Record()
        self.start_at: float | None = 0.0  # None: when a file changes

    def works(self, now: float) -> bool:
        """Have the child's handlers joined their groups, and has it lived for a while since?"""
        child = self.child
        return child is not None and now - child.joined_at > policy.WORKS_S

    def is_due(self, now: float) -> bool:
        """May a child start in this slot now?"""
        if self.child is not None or self.start_at is None or self.start_at > now:
            return False
        return not self.predecessors.are_leaving(now)

    def place(self) -> Place:
        """What the next child gets at its start."""
        return Place(self.number, self.predecessors.slot, self.predecessors.gone())

    def __str__(self) -> str:
        return f"worker {self.number}" + ("" if self.child is None else f" (pid {self.child.pid})")


class Proved(IntEnum):
    """What the children have proved about the current code."""

    NOTHING = 0
    STARTS = 1
    WORKS = 2  # the handlers of one have joined their groups, and it has lived for a while since


class LockWatch:
    """Kills a child that holds the store's write lock for too long, for example because it was stopped while it wrote.

    Every process that writes to the store waits for it. Its death releases the lock.
    """

    def __init__(self, limit_s: float) -> None:
        self._stall = policy.Stall(limit_s)
        self._url: str | None = None  # of the broker, from the children's hello

    def look(self, slots: Sequence[Slot], now: float) -> None:
        """Kill the child that has held the lock for too long."""
        for slot in slots:
            if slot.child is not None and slot.child.hello is not None:
                self._url = slot.child.hello.url
        holder = None if self._url is None else _lock_holder(self._url)
        if holder is None or not self._stall.look(holder, now):
            return
        for slot in slots:
            if slot.child is not None and slot.child.pid == holder.pid:
                where = redacted(self._url or "")
                log.error("%s has held the lock of %s for %.1f s: killed", slot, where, now - holder.since)
                slot.child.process.kill()


class Supervisor:
    """`run` blocks. A program with a loop of its own calls `tend` a few times a second, then `stop`, until `done`.

    The command is a program that calls `leash.take` at its start, sends its hello when it has started, and calls
    `Leash.join` when it works; see leash.py.
    With `watch`, a changed file restarts the children, and a child that cannot start waits for the next change.
    `board` gets the children's reports.
    """

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        *,
        watch: Watch | None = None,
        board: Workers | None = None,
        lock_limit_s: float = LOCK_LIMIT_S,
        start_limit: int = START_LIMIT,
    ) -> None:
        fleet = f"{socket.gethostname()}-{uuid4().hex[:8]}"
        self.slots = [Slot(number, f"{fleet}-{number}") for number in range(1, size + 1)]
        self.code: int | None = None  # the exit code; set when the supervisor begins to stop
        self._command = command
        self._watch = watch
        self._board = board or Workers(size)
        self._lock = LockWatch(lock_limit_s)
        self._start_limit = start_limit
        self._proved = Proved.NOTHING
        self._next_look = 0.0
        self._asked_at = 0.0

    @property
    def done(self) -> bool:
        return self.code is not None and not self._children()

    def run(self) -> int:
        """Supervise until a stop signal arrives, or until another start is pointless. Returns the exit code."""
        with _caught_signals() as (caught, bell):
            while not self.done:
                self._stop_on(caught)
                self.tend()
                links = [child.link for child in self._children() if child.talks and child.kill_at is None]
                leaving = any(slot.predecessors.are_leaving(clock.now()) for slot in self.slots if slot.child is None)
                _wait(bell, links, _LEAVING_TICK_S if leaving else _TICK_S)
        assert self.code is not None
        log.info("all workers have stopped")
        return self.code

    def tend(self) -> None:
        """Read the children's messages, notice those that ended, start those that are due, kill stuck and late ones."""
        now = clock.now()
        for slot in self.slots:
            self._attend(slot, now)
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._lock.look(self.slots, now)
            self._look_at_files(now)
            for line in self._board.news():
                log.warning("%s", line)
        self._board.tended()
        self._kill_overdue(now)
        if self.code is None:
            self._start_due(now)

    def stop(self, code: int = 0) -> None:
        """Ask every child to drain and end. `tend` kills those that take too long."""
        if self.code is None:
            self.code = code
        for child in self._children():
            child.ask_to_end(clock.now())

    def kill(self, code: int) -> None:
        """End every child at once."""
        self.code = code
        for child in self._children():
            child.process.kill()

    def _stop_on(self, caught: list[signal.Signals]) -> None:
        while caught:
            number = caught.pop(0)
            if self.code is None:
                log.info("%s: stopping; a second signal ends all processes at once", number.name)
                self._asked_at = clock.now()
                self.stop()
            elif clock.now() - self._asked_at > ECHO_S:
                log.warning("%s: ending at once; events that were not settled will be handled again", number.name)
                self.kill(128 + number)

    # -- starting and replacing children ------------------------------------------------------------------------

    def _children(self) -> list[ChildProcess]:
        return [slot.child for slot in self.slots if slot.child is not None]

    def _start_due(self, now: float) -> None:
        idle = [slot for slot in self.slots if slot.child is None]
        if not self._proved:
            # The first child starts alone, so that an error in the application is reported once.
            idle = [] if any(child.hello is None for child in self._children()) else idle[:1]
        for slot in idle:
            if slot.is_due(now):
                self._start(slot, now)

    def _start(self, slot: Slot, now: float) -> None:
        if left := slot.predecessors.left():
            log.warning(
                "the last %s has left processes that still run: %s; its partitions wait until its lease and the "
                "takeover grace have passed",
                *(slot, ", ".join(left)),
            )
        try:
            slot.child = ChildProcess(slot.place(), self._command)
        except OSError as error:
            log.error("worker %d cannot be started: %s", slot.number, error)
            self._replace(slot, policy.End(1, 0.0, greeted=False), now)
        else:
            self._board.started(slot.number)
            log.info("%s started", slot)

    def _attend(self, slot: Slot, now: float) -> None:
        child = slot.child
        if child is None:
            return
        self._listen(slot, child)
        if child.hello is not None and child.kill_at is None:
            if not self._proved and child.hello.url is not None:
                find.log_broker(child.hello.url)
            self._proved = max(self._proved, Proved.WORKS if slot.works(now) else Proved.STARTS)
        end = child.ended(now)
        if end is None:
            return
        self._board.ended(slot.number)
        slot.predecessors.ended(child.pid, now)
        if child.kill_at is None and self.code is None:
            self._replace(slot, end, now)
        else:
            self._ended_as_asked(slot, end)
        slot.child = None

    def _ended_as_asked(self, slot: Slot, end: policy.End) -> None:
        """If a child was killed, or failed while it stopped, the exit code of the supervisor is 1."""
        well = end.code in (policy.OK, -signal.SIGTERM)
        log.log(logging.INFO if well else logging.WARNING, "%s %s", slot, end)
        if self.code == policy.OK and not well:
            self.code = policy.NO

    def _listen(self, slot: Slot, child: ChildProcess) -> None:
        unreadable = child.unreadable
        for report in child.listen():
            self._board.reported(slot.number, report)
        if child.unreadable and not unreadable:
            log.error("%s sent a message that cannot be read; such messages are dropped", slot)
        if child.floods:
            log.error("%s sent %d MiB without a complete message: killed", slot, _MESSAGE_LIMIT_BYTES >> 20)
            child.process.kill()
            child.hang_up()

    def _replace(self, slot: Slot, end: policy.End, now: float) -> None:
        """Decide what to do about a child that ended without being asked to."""
        slot.record = policy.after(slot.record, end)
        others_work = any(other.works(now) for other in self.slots if other is not slot)
        if self._watch is not None and (end.at_start or end.code == policy.USAGE):
            log.error("%s %s; waiting for a file to change", slot, end)
            self._wait_for_change()
        elif policy.is_hopeless(
            slot.record,
            end,
            limit=self._start_limit,
            ever_worked=self._proved is Proved.WORKS,
            others_work=others_work,
        ):
            failed = slot.record.failed_starts
            log.error("%s %s; giving up%s", slot, end, f", failed starts: {failed}" if failed else "")
            self.stop(end.code if end.code in (policy.USAGE, policy.UNREACHABLE) else policy.NO)
        else:
            delay_s = policy.delay_s(slot.record)
            log.warning("%s %s; starting another%s", slot, end, f" in {delay_s:g} s" if delay_s else "")
            slot.start_at = now + delay_s

    def _wait_for_change(self) -> None:
        for slot in self.slots:
            slot.start_at = None

    # -- late children and changed files ------------------------------------------------------------------------

    def _kill_overdue(self, now: float) -> None:
        for slot in self.slots:
            child = slot.child
            if child is not None and child.kill_at is not None and now > child.kill_at:
                log.error("%s did not end in time: killed; events that it had not settled will be handled again", slot)
                child.process.kill()
                child.kill_at = math.inf

    def _look_at_files(self, now: float) -> None:
        changed = None if self._watch is None or self.code is not None else self._watch.changed()
        if changed is None:
            return
        log.info("%s changed: restarting", changed)
        self._proved = Proved.NOTHING
        for slot in self.slots:
            slot.record = policy.Record()
            slot.start_at = now
            if slot.child is not None:
                slot.child.ask_to_end(now)


def _lock_holder(url: str) -> policy.Held | None:
    try:
        return brokers.holder(Settings(url=url))
    except OSError as error:  # no reason to end the children
        log.warning("the lock of %s cannot be read: %s", redacted(url), error)
        return None


@contextlib.contextmanager
def _caught_signals() -> Iterator[tuple[list[signal.Signals], socket.socket]]:
    """A list of the stop signals that arrive, and a socket that becomes readable on each and when a child ends."""
    caught: list[signal.Signals] = []
    bell, ringer = socket.socketpair()
    bell.setblocking(False)
    ringer.setblocking(False)
    before = {
        number: signal.signal(number, lambda got, _: caught.append(signal.Signals(got))) for number in STOP_SIGNALS
    }
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    ring = signal.set_wakeup_fd(ringer.fileno(), warn_on_full_buffer=False)
    try:
        yield caught, bell
    finally:
        signal.set_wakeup_fd(ring)
        for number, handling in before.items():
            signal.signal(number, handling)
        bell.close()
        ringer.close()


def _wait(bell: socket.socket, others: Sequence[socket.socket], wait_s: float) -> None:
    ready, _, _ = select.select([bell, *others], [], [], wait_s)
    if bell in ready:
        with contextlib.suppress(BlockingIOError):
            bell.recv(4096)
