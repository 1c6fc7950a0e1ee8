"""The contestants on RabbitMQ handle every event and acknowledge it, and a contestant that does not is found."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from bench.__main__ import main
from bench.amqp_frames import Outgoing, Refused, Wire, _counted, publish
from bench.kit import Bench, Ran
from bench.rabbitmq import PEERS, WORK, Contestant, Track, ordered_contestants
from bench.rabbitmq_server import QUORUM, Target, fill, fill_plain, left_in, properties
from bench.witness import Verdict

from tests.servers.rabbitmq import RabbitMQServer

EVENTS = 400

pytestmark = [pytest.mark.slow, pytest.mark.servers]


@pytest.fixture
def track(rabbitmq_server: RabbitMQServer, tmp_path: Path) -> Iterator[Track]:
    with rabbitmq_server.vhost() as vhost:
        target = Target(rabbitmq_server.url_of(vhost), rabbitmq_server.pid)
        yield Track(Bench(quick=True, folder=tmp_path, say=lambda _: None), target)


def test_every_peer_handles_and_acknowledges_all_events(track: Track) -> None:
    runs = track.race(1, [track.bare(EVENTS), *[track.peer(name, EVENTS) for name in PEERS]])
    assert [check for check in track.bench.checks if not check.ok] == []
    assert len(track.bench.checks) == 2 * len(runs)
    assert {ran.verdict.handled for (ran,) in runs.values()} == {EVENTS}
    assert all(ran.server_s > 0 for (ran,) in runs.values())


def test_an_event_that_was_read_and_not_acknowledged_fails_the_check(track: Track) -> None:
    usual = track.bare(EVENTS)
    track.turn(Contestant("reader", usual.prepare, read, usual.unfinished, usual.clean), "turn")
    handled, acknowledged = track.bench.checks
    assert handled.ok
    assert not acknowledged.ok
    assert acknowledged.detail == f"not acknowledged: {EVENTS}"


def read(turn: str) -> Ran:
    """Report all events as handled, and acknowledge none."""
    return Ran(wall_s=1.0, cpu_s=1.0, peak_kb=1, verdict=Verdict(EVENTS, EVENTS, inverted=0, duplicates=0))


def test_onward_handles_and_acknowledges_all_events_of_a_work_queue(track: Track) -> None:
    (onward,) = track.race(1, [track.work(EVENTS)]).values()
    assert [check for check in track.bench.checks if not check.ok] == []
    assert onward[0].verdict.handled == EVENTS


def test_onward_and_the_bare_loop_read_the_same_streams(track: Track) -> None:
    runs = track.race(1, ordered_contestants(track, EVENTS))
    assert [check for check in track.bench.checks if not check.ok] == []
    assert {ran.verdict.handled for (ran,) in runs.values()} == {EVENTS}


def test_an_event_that_onward_has_not_settled_fails_the_check(track: Track) -> None:
    onward = track.in_order(fill(track.server, "orders", EVENTS), EVENTS)
    onward.run("group")
    assert not onward.unfinished("group")
    fill(track.server, "orders", 1)
    assert onward.unfinished("group")


def test_a_message_that_no_queue_gets_is_refused(track: Track) -> None:
    with pytest.raises(Refused, match="312 NO_ROUTE"), Wire(track.server.url) as wire:
        publish(wire, [Outgoing("", "nowhere", properties("c-1"), b"{}")])


def test_a_message_that_the_server_does_not_store_is_refused(track: Track) -> None:
    with Wire(track.server.url) as wire:
        wire.open()
        wire.declare("small", {**QUORUM, "x-max-length": 1, "x-overflow": "reject-publish"})
    with pytest.raises(Refused, match="did not store"), Wire(track.server.url) as wire:
        publish(wire, [Outgoing("", "small", properties("c-1"), b"{}")] * 5_000)


def test_more_messages_than_the_window_are_all_stored(track: Track) -> None:
    fill_plain(track.server, "many", 5_100)
    assert left_in(track.server, "many") == 5_100


def test_confirms_are_counted_in_any_order() -> None:
    single: set[int] = set()
    assert [_counted(0, single, 2, False), _counted(0, single, 1, False), single] == [0, 2, set()]
    assert [_counted(2, single, 5, False), _counted(2, single, 4, True), single] == [2, 5, set()]
    assert _counted(5, single, 3, True) == 5


@pytest.mark.more
@pytest.mark.timeout(900)  # it takes two minutes on two idle cores
def test_quick_mode_measures_rabbitmq(rabbitmq_server: RabbitMQServer, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert main(["rabbitmq", "--quick", "--json", str(path)]) == 0
    found = msgspec.json.decode(path.read_bytes())
    assert all(check["ok"] for check in found["checks"])
    assert any(figure["what"] == WORK for figure in found["figures"])
