"""The page's server, by plain HTTP."""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path

import pytest

from onward.demo import page as page_
from onward.demo.page import DemoPage, bind


class Desk:
    """A page whose buttons call `act`, which records the calls."""

    def __init__(self) -> None:
        self.server = bind(0)
        self.port = self.server.server_port
        self.acted: list[tuple[str, Mapping[str, str]]] = []
        self.page = DemoPage(self.server, self.act)

    def act(self, action: str, arguments: Mapping[str, str]) -> tuple[HTTPStatus, str]:
        self.acted.append((action, arguments))
        return HTTPStatus.ACCEPTED, "done"

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.page.close()


def test_the_page_loads_nothing_from_elsewhere(desk: Desk) -> None:
    status, html = desk.ask("GET", "/")
    assert status == 200
    for wanted in re.findall(r'(?:href|src)="([^"]+)"', html):
        assert wanted.startswith("data:") or desk.ask("GET", wanted)[0] == 200
    for file in (Path(page_.__file__).parent / "static").iterdir():
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", file.read_text(encoding="utf-8"))


def test_the_stream_sends_snapshots_and_starts_with_the_newest(desk: Desk) -> None:
    for turn in range(2):
        desk.page.show({"turn": turn})
        connection = http.client.HTTPConnection("127.0.0.1", desk.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/events")
            answer = connection.getresponse()
            assert answer.getheader("Content-Type") == "text/event-stream"
            lines = [answer.readline().decode().strip() for _ in range(4)]
            assert lines[0] == "retry: 1000"
            assert json.loads(lines[3].removeprefix("data: ")) == {"turn": turn}
            desk.page.show({"turn": 10 + turn})
            more = [answer.readline().decode().strip() for _ in range(3)]
            assert json.loads(more[2].removeprefix("data: ")) == {"turn": 10 + turn}


def test_every_reader_receives_the_last_snapshot_before_the_page_closes(desk: Desk) -> None:
    desk.page.show({"turn": 1})
    connections = [http.client.HTTPConnection("127.0.0.1", desk.port, timeout=30) for _ in range(3)]
    answers = []
    for connection in connections:
        connection.request("GET", "/events")
        answers.append(connection.getresponse())
        assert [answers[-1].readline() for _ in range(5)][3] == b'data: {"turn":1}\n'
    desk.page.show({"turn": "last"})
    desk.page.close()
    for answer, connection in zip(answers, connections, strict=True):
        with contextlib.closing(connection):
            assert b'data: {"turn":"last"}' in answer.read()


def test_a_dead_letter_is_asked_for_by_its_order(desk: Desk) -> None:
    assert desk.ask("GET", "/letter?order=7") == (202, "done")
    assert desk.ask("GET", "/letter?order=7", Host="shop.example.com")[0] == 403
    assert desk.acted == [("letter", {"order": "7"})]


def test_the_demos_own_page_may_act(desk: Desk) -> None:
    own = {"Origin": f"http://127.0.0.1:{desk.port}"}
    assert desk.ask("POST", "/kill?worker=2", **own) == (202, "done")
    assert desk.ask("POST", "/burst") == (202, "done")  # curl sends no origin
    assert desk.acted == [("kill", {"worker": "2"}), ("burst", {})]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://example.com"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Host": "shop.example.com"},
        {"Host": "shop.example.com", "Origin": "http://shop.example.com"},
    ],
    ids=str,
)
def test_another_site_may_not_act(desk: Desk, headers: Mapping[str, str]) -> None:
    status, _ = desk.ask("POST", "/kill?worker=1", **headers)
    assert status == 403
    assert desk.acted == []


def test_another_host_name_for_this_address_is_refused(desk: Desk) -> None:
    assert desk.ask("GET", "/events", Host="shop.example.com:8400")[0] == 403


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_malformed_host_is_a_bad_request(desk: Desk, method: str, capfd: pytest.CaptureFixture[str]) -> None:
    for host in ("[", "[::1", "127.0.0.1:x", "]", "127.0.0.1:99999999"):
        assert desk.ask(method, "/", Host=host)[0] == 400, host
    assert desk.ask(method, "x://[")[0] == 400
    assert not capfd.readouterr().err


def test_other_paths_and_actions_are_not_found(desk: Desk) -> None:
    assert desk.ask("GET", "/../check.py")[0] == 404
    assert desk.ask("POST", "/shutdown")[0] == 404
    assert desk.acted == []


def test_the_next_free_port_is_used_if_a_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = bind(port)
        server.server_close()
        assert port < server.server_port < port + 50
