"""Single publishes while member processes of one group wait on the same SQLite file."""

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.contestants.member import GROUP
from bench.kit import CHILD_TIMEOUT_S, Bench, Figure, child_command, child_environment, median, ratios, spread
from bench.workload import PARTITIONS, TOPIC, application, items, settled, value
from onward import Onward

SIZES = (0, 3, 25)  # members
TARGET = 0.7


def run(bench: Bench) -> None:
    round_s, rounds = bench.sized((2.0, 5), (0.5, 3))
    paths = {size: bench.path(f"members-{size}.db") for size in SIZES}
    paces: dict[int, list[float]] = {size: [] for size in SIZES}
    published = dict.fromkeys(SIZES, 0)
    with ExitStack() as stack:
        for size, path in paths.items():
            asyncio.run(_declared(path))
            stack.enter_context(_members(bench, path, size))
            asyncio.run(_balanced(path, size))
        for number in range(rounds):
            for size, path in paths.items():  # the members on the other files are idle meanwhile
                bench.say(f"members: one event a call beside {size} members, round {number + 1} of {rounds}")
                count, pace = asyncio.run(_published(path, round_s))
                published[size] += count
                paces[size].append(pace)
        for size in SIZES[1:]:
            done = asyncio.run(_settled(paths[size], published[size]))
            bench.check(f"published beside {size} members", done == published[size], f"{done} settled")
    for size in SIZES[1:]:
        _report(bench, size, paces)


@contextmanager
def _members(bench: Bench, path: Path, count: int) -> Iterator[None]:
    command = child_command("bench.contestants.member", {"path": str(path)})
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += [
            subprocess.Popen(command, cwd=bench.folder, env=child_environment(), stdout=subprocess.DEVNULL)
            for _ in range(count)
        ]
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


async def _declared(path: Path) -> None:
    async with application(path) as app:
        await app.publish(TOPIC, value("first", 0), key="first")


async def _balanced(path: Path, members: int) -> None:
    """Wait until every member is in the group and every partition has its final owner."""
    if not members:
        return
    async with application(path) as app, asyncio.timeout(CHILD_TIMEOUT_S):
        while not await _is_balanced(app, members):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def _is_balanced(app: Onward, members: int) -> bool:
    for info in await app.broker.groups(TOPIC):
        owners = [each.owner for each in info.partitions.values()]
        if info.group == GROUP and len(info.members) == members and None not in owners:
            return len(set(owners)) == min(members, PARTITIONS)
    return False


async def _published(path: Path, round_s: float) -> tuple[int, float]:
    """Publish one event after the other. Returns how many, and how many per second."""
    async with application(path) as app:
        count, start = 0, time.perf_counter()
        for key, data in items(1 << 30):
            await app.publish(TOPIC, data, key=key)
            count += 1
            took_s = time.perf_counter() - start
            if took_s >= round_s:
                break
        return count, count / took_s


async def _settled(path: Path, published: int) -> int:
    async with asyncio.timeout(CHILD_TIMEOUT_S):
        while (done := await settled(path, GROUP) - 1) < published:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return done


def _report(bench: Bench, size: int, paces: dict[int, list[float]]) -> None:
    ratio = ratios(paces[size], paces[0])
    bench.add(
        Figure(
            what=f"publish, one event a call, beside {size} member processes",
            measured=f"{spread(paces[size])} /s",
            value=median(paces[size]),
            beside=f"without a member: {spread(paces[0])} /s",
            ratio=ratio,
            target=f"≥ {TARGET}x",
            met=ratio >= TARGET,
            samples={f"beside_{members}_per_s": pace for members, pace in paces.items()},
        )
    )
