"""The benchmarks run, and their correctness checks can fail."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from bench.__main__ import main
from bench.kit import Bench, child
from bench.witness import Verdict, Witness
from bench.workload import TOPIC, VALUE_BYTES, Item, application, items, value

EVENTS = 200


def seen(*numbers: int, expected: int = 4) -> Verdict:
    witness = Witness(expected)
    for number in numbers:
        witness.saw("key", number)
    return witness.verdict()


@pytest.mark.parametrize(
    ("numbers", "lost", "inverted", "duplicates"),
    [
        ((0, 1, 2, 3), 0, 0, 0),
        ((0, 1, 2), 1, 0, 0),
        ((0, 2, 1, 3), 0, 1, 0),
        ((0, 1, 1, 2, 3), 0, 0, 1),
        ((0, 2, 2, 3), 1, 2, 1),
        ((3, 2, 1, 0), 0, 3, 0),
    ],
)
def test_the_witness_counts_lost_inverted_and_repeated_events(
    numbers: tuple[int, ...], lost: int, inverted: int, duplicates: int
) -> None:
    verdict = seen(*numbers)
    assert (verdict.lost, verdict.inverted, verdict.duplicates) == (lost, inverted, duplicates)


def test_values_have_the_promised_size() -> None:
    assert {len(data) for _, data in items(EVENTS)} == {VALUE_BYTES}


def published(path: Path, events: list[Item]) -> None:
    async def publish() -> None:
        async with application(path) as opened:
            await opened.publish_many(TOPIC, events)

    asyncio.run(publish())


def consumed(folder: Path, events: list[Item]) -> Bench:
    """A bench that has checked a consuming process: these events are published, and EVENTS are expected."""
    path = folder / "events.db"
    published(path, events)
    bench = Bench(quick=True, folder=folder, say=lambda _: None)
    ran = child("bench.contestants.app", folder, path=str(path), events=EVENTS, group="test", stuck_s=0.5)
    bench.judge("consumed", ran.verdict)
    return bench


def faults() -> Iterator[tuple[str, list[Item]]]:
    whole = list(items(EVENTS - 2))
    pair = [("pair", value("pair", 0)), ("pair", value("pair", 1))]
    yield "none", whole + pair
    yield "lost", whole + pair[:1]
    yield "inverted=1", whole + pair[::-1]


@pytest.mark.parametrize(("fault", "events"), list(faults()), ids=lambda found: found if isinstance(found, str) else "")
def test_a_missing_or_early_event_fails_the_check(tmp_path: Path, fault: str, events: list[Item]) -> None:
    (check,) = consumed(tmp_path, events).checks
    assert check.ok == (fault == "none")
    assert "lost=1" in check.detail if fault == "lost" else "lost=0" in check.detail
    assert fault != "inverted=1" or fault in check.detail


def test_a_failed_check_ends_the_run_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.micro.run", lambda bench: bench.judge("made up", seen(0, 1)))
    assert main(["micro", "--json", str(tmp_path / "out.json")]) == 1


def test_a_benchmark_that_raises_ends_the_run_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.micro.run", lambda bench: 1 / 0)
    assert main(["micro", "--json", str(tmp_path / "out.json")]) == 1


@pytest.mark.slow
def test_quick_mode_measures_and_writes_its_results(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert main(["micro", "wakeup", "--quick", "--json", str(path)]) == 0
    found = msgspec.json.decode(path.read_bytes())
    assert found["quick"]
    assert {"building an Event", "wake-up in another process, p99"} <= {figure["what"] for figure in found["figures"]}
    assert all(check["ok"] for check in found["checks"])


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.timeout(900)  # it takes a minute and a half on two idle cores
def test_quick_mode_runs_all_benchmarks(tmp_path: Path) -> None:
    assert main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
