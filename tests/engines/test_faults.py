"""Worker processes under a complete application: killed workers, Ctrl-C, a killed parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import onward.event
from onward import Onward
from onward.errors import BadHandler
from tests.engines import programs
from tests.engines.programs import Line, Order, lines

pytestmark = pytest.mark.slow  # real processes, seconds each

ROOT = Path(__file__).parent.parent.parent
SOURCE = Path(onward.event.__file__).parent.parent


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROGRAM_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PROGRAM_DB", str(tmp_path / "shop.db"))
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}{os.pathsep}{ROOT}")
    return tmp_path / "log"


@pytest.fixture
def app(log: Path) -> Onward:
    """The program's application, in this process and on this test's database."""
    app = Onward(f"sqlite:///{log.parent}/shop.db", lease_s=2.0, takeover_grace_s=0.1)
    app.handlers.extend(programs.app.handlers)
    return app


@pytest.fixture
def program(app: Onward) -> Iterator[subprocess.Popen[bytes]]:
    """The same application as a process, in its own process group, as if it was started at a prompt."""
    command = [sys.executable, "-m", "onward", "run", "tests.engines.programs:app"]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        yield process
        process.kill()


def publish(app: Onward, orders: list[Order], keys: int = 20) -> None:
    async def main() -> None:
        async with app:
            await app.publish_many("orders", [(f"c-{order.n % keys}", order) for order in orders])

    asyncio.run(main())


def run_until(app: Onward, condition: Callable[[], bool], within_s: float = 90.0) -> None:
    async def main() -> None:
        running = asyncio.create_task(app.run())
        deadline = time.monotonic() + within_s
        while not condition() and time.monotonic() < deadline and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        app.stop()
        await running
        assert condition()

    asyncio.run(main())


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_key_order(done: list[Line], keys: int = 20) -> None:
    order: dict[int, list[int]] = defaultdict(list)
    for line in done:
        if line.n not in order[line.n % keys]:
            order[line.n % keys].append(line.n)
    assert all(numbers == sorted(numbers) for numbers in order.values())


@pytest.mark.slow
def test_an_event_that_kills_its_worker_is_the_only_one_charged(app: Onward, log: Path) -> None:
    publish(app, [Order(n, deadly=n % 50 == 0) for n in range(1000)])
    run_until(app, lambda: len({line.n for line in lines(log, "end")}) == 1000)
    attempts: dict[int, list[int]] = defaultdict(list)
    for line in lines(log, "begin"):
        attempts[line.n].append(line.attempt)
    assert {n: tries for n, tries in attempts.items() if n % 50 == 0} == {n: [1, 2] for n in range(0, 1000, 50)}
    assert {max(tries) for n, tries in attempts.items() if n % 50} == {1}, "another event was charged with an attempt"
    assert_key_order(lines(log, "end"))


def test_only_events_that_kill_their_workers_run_twice(app: Onward, log: Path) -> None:
    publish(app, [Order(n, deadly=n % 50 == 0) for n in range(100)])
    run_until(app, lambda: len({line.n for line in lines(log, "end")}) == 100)
    tries = Counter(line.n for line in lines(log, "begin"))
    assert {n for n, count in tries.items() if count > 1} == {0, 50}
    assert_key_order(lines(log, "end"))


def test_ctrl_c_drains_and_repeats_nothing(
    app: Onward, log: Path, program: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(app, [Order(n, seconds=0.06) for n in range(120)])
    wait_for(lambda: len(lines(log, "end")) >= 20)
    os.killpg(program.pid, signal.SIGINT)
    assert program.wait(timeout=30) == 0
    before = lines(log, "end")
    assert len(before) < 120
    assert len(lines(log, "begin")) == len(before), "the drain did not let a running event end"
    run_until(app, lambda: len(lines(log, "end")) >= 120)
    assert Counter(line.n for line in lines(log, "end")) == Counter(range(120)), "an event ran again after a clean stop"
    assert {line.attempt for line in lines(log, "end")} == {1}
    assert_key_order(lines(log, "end"))


@pytest.mark.slow
def test_ctrl_c_without_time_to_drain_charges_no_attempt(
    app: Onward, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROGRAM_DRAIN_S", "0.2")
    publish(app, [Order(n, seconds=2.0 if n < 4 else 0.01) for n in range(60)])
    command = [sys.executable, "-m", "onward", "run", "tests.engines.programs:app"]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as program:
        wait_for(lambda: len(lines(log, "begin")) >= 2)
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(timeout=30) == 0
    run_until(app, lambda: len({line.n for line in lines(log, "end")}) == 60)
    assert {line.attempt for line in lines(log, "begin")} == {1}, "shutdown was charged as a failure"
    assert_key_order(lines(log, "end"))


def test_workers_end_with_their_parent(app: Onward, log: Path, program: subprocess.Popen[bytes]) -> None:
    publish(app, [Order(n, seconds=60.0) for n in range(2)], keys=2)
    wait_for(lambda: len(lines(log, "begin")) == 2)
    workers = {line.pid for line in lines(log, "begin")}
    assert len(workers) == 2
    program.kill()
    program.wait()
    wait_for(lambda: not any(alive(pid) for pid in workers))


def test_an_application_whose_handler_cannot_be_imported_ends_with_that_error(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Onward(f"sqlite:///{log.parent}/shop.db", lease_s=2.0)
    app.handler("orders", group="g", engine="processes", workers=2)(programs.never_there)
    publish(app, [Order(n) for n in range(3)])
    monkeypatch.setattr("onward.crew.target_of", lambda function: "tests.engines.broken:handle")
    monkeypatch.setattr("onward.crew.check", lambda target, function: None)
    with pytest.raises(BadHandler, match="no database, no module"):
        asyncio.run(app.run())


# -- handlers in a script ------------------------------------------------------------------------------------------

_SCRIPT = """
import asyncio, os
from onward import Onward
app = Onward("sqlite:///shop.db")

@app.handler("orders", group="g", engine="processes", workers=1)
def handle(order: dict) -> None:
    with open("seen", "a") as file:
        file.write(f"{order['n']} {__name__} {os.getpid()}\\n")

async def main():
    async with app:
        await app.publish("orders", {"n": 1}, key="k")
        running = asyncio.create_task(app.run())
        while not os.path.exists("seen") and not running.done():
            await asyncio.sleep(0.05)
        app.stop()
        await running
"""


def script(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "shop.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, *(arguments or ("shop.py",))]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("how", [("shop.py",), pytest.param(("-m", "shop"), marks=pytest.mark.slow)])
def test_workers_find_a_handler_of_the_main_script(tmp_path: Path, how: tuple[str, ...]) -> None:
    ran = script(tmp_path, _SCRIPT + "if __name__ == '__main__': asyncio.run(main())", *how)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "seen").read_text().split()[:2] == ["1", "__mp_main__"]


def test_the_error_of_a_script_without_a_guard_names_the_guard(tmp_path: Path) -> None:
    ran = script(tmp_path, _SCRIPT.replace("workers=1", "workers=4") + "asyncio.run(app.run())")
    assert ran.returncode == 1
    assert "if __name__ == '__main__'" in ran.stderr.splitlines()[-1]


def test_a_handler_in_a_program_without_a_file_is_refused(tmp_path: Path) -> None:
    ran = script(tmp_path, "", "-c", _SCRIPT)
    assert ran.returncode == 1
    assert "BadHandler: handler handle is defined in a program that has no file" in ran.stderr
