"""The contestants on Redis handle every event and acknowledge it, and a contestant that does not is found."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from bench.__main__ import main
from bench.kit import Bench, Ran
from bench.redis import Contestant, Track, contestants
from bench.redis_server import fill, fill_plain, redis
from bench.witness import Verdict

EVENTS = 400

pytestmark = [pytest.mark.slow, pytest.mark.servers]


@pytest.fixture
def track(redis_server: object, tmp_path: Path) -> Iterator[Track]:
    with redis() as server:
        yield Track(Bench(quick=True, folder=tmp_path, say=lambda _: None), server)


def test_every_contestant_handles_and_acknowledges_all_events(track: Track) -> None:
    runs = track.race(1, contestants(track, EVENTS, EVENTS))
    assert [check for check in track.bench.checks if not check.ok] == []
    assert len(track.bench.checks) == 2 * len(runs)
    assert {ran.verdict.handled for (ran,) in runs.values()} == {EVENTS}
    assert all(ran.server_s > 0 for (ran,) in runs.values())


def test_an_event_that_was_read_and_not_acknowledged_fails_the_check(track: Track) -> None:
    streams = fill_plain(track.server, "plain", EVENTS)
    reader = Contestant("reader", lambda group: read(track, streams, group), track.peer("", "", streams, 0).unfinished)
    track.turn(reader, "group")
    handled, acknowledged = track.bench.checks
    assert handled.ok
    assert not acknowledged.ok
    assert acknowledged.detail == f"not acknowledged: {EVENTS}"


def read(track: Track, streams: list[str], group: str) -> Ran:
    """Read all events, and acknowledge none."""
    with track.server.client() as client:
        for stream in streams:
            client.xgroup_create(stream, group, id="0")
            client.xreadgroup(group, "reader", {stream: ">"})
    return Ran(wall_s=1.0, cpu_s=1.0, peak_kb=1, verdict=Verdict(EVENTS, EVENTS, inverted=0, duplicates=0))


def test_an_event_that_onward_has_not_settled_fails_the_check(track: Track) -> None:
    onward = track.onward(fill(track.server, "orders", EVENTS), EVENTS)
    onward.run("group")
    assert not onward.unfinished("group")
    fill(track.server, "orders", 1)
    assert onward.unfinished("group")


@pytest.mark.more
@pytest.mark.timeout(600)  # it takes a minute on two idle cores
def test_quick_mode_measures_redis(redis_server: object, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert main(["redis", "--quick", "--json", str(path)]) == 0
    found = msgspec.json.decode(path.read_bytes())
    assert all(check["ok"] for check in found["checks"])
    assert any(figure["what"] == "Redis, typed no-op, key order" for figure in found["figures"])
