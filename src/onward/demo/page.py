"""The page's server: standard library only, on the loopback address only.

GET /          the page and its two files
GET /events    snapshots as server-sent events
GET /letter    a whole dead letter as JSON
POST /kill /poison /burst /replay
"""

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

ADDRESS = "127.0.0.1"
PORTS_TRIED = 50
MOST_READERS = 32  # of the stream at a time
LAST_SNAPSHOT_S = 1.0
ACTIONS = frozenset({"kill", "poison", "burst", "replay"})

_MALFORMED = "the address or the Host header is malformed"
_TEXT = "text/plain; charset=utf-8"
_STATIC = Path(__file__).parent / "static"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self';"
    " img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

# Called on the server's thread with the action and its arguments; returns the status and the text of the response.
Act = Callable[[str, Mapping[str, str]], tuple[HTTPStatus, str]]


class DemoPage:
    """Serves from its own threads until closed."""

    def __init__(self, server: "Server", act: Act) -> None:
        self._server = server
        server.act = act
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="demo-page", daemon=True)
        self._thread.start()

    def show(self, snapshot: Mapping[str, object]) -> None:
        self._server.stream.put(json.dumps(snapshot, separators=(",", ":")).encode())

    def close(self) -> None:
        """End after every open page has received the last snapshot, or after LAST_SNAPSHOT_S."""
        self._server.stream.end(LAST_SNAPSHOT_S)
        self._server.shutdown()
        self._server.server_close()


def bind(port: int) -> "Server":
    """A server on this port, or on the next free one. OSError: none of the ports is free."""
    for candidate in range(port, min(port + PORTS_TRIED, 65_536)):
        try:
            return Server(candidate)
        except OSError as error:
            taken = error
    raise OSError(f"no free port from {port} to {candidate}: {taken}") from taken


class Stream:
    """The newest snapshot. Readers wait for a newer one. A slow reader skips some: each snapshot is complete."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = 0
        self._data = b"{}"
        self._ended = False
        self._readers = 0

    def put(self, data: bytes) -> None:
        with self._changed:
            self._version += 1
            self._data = data
            self._changed.notify_all()

    def end(self, patience_s: float) -> None:
        """Wait until all readers have the newest snapshot and are gone, but no longer than this."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._readers == 0, patience_s)

    @contextmanager
    def seat(self) -> Iterator[bool]:
        """A place among the readers. False: all are taken."""
        with self._changed:
            free = self._readers < MOST_READERS
            self._readers += free
        try:
            yield free
        finally:
            with self._changed:
                self._readers -= free
                self._changed.notify_all()

    def after(self, version: int) -> tuple[int, bytes] | None:
        """Wait for a snapshot newer than this version and return it. None: there will be no newer one."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._version > version)
            return (self._version, self._data) if self._version > version else None


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    act: Act

    def __init__(self, port: int) -> None:
        self.stream = Stream()
        super().__init__((ADDRESS, port), _Handler)

    def server_bind(self) -> None:
        # The base class would look up our own name, which can take seconds where there is no resolver.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        # A browser may disconnect at any time. Anything else is a bug, so it is shown.
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 15  # seconds without progress in sending or receiving
    server_version = "onward-demo"
    sys_version = ""

    def do_GET(self) -> None:
        path = None if (target := self._target()) is None else target.path
        if path is None:
            self._answer(HTTPStatus.BAD_REQUEST, _MALFORMED)
        elif not self._is_local():
            self._answer(HTTPStatus.FORBIDDEN, "this page is only for localhost")
        elif path == "/events":
            self._stream()
        elif target is not None and path == "/letter":
            status, text = self.server.act("letter", dict(parse_qsl(target.query)))
            self._send(status, "application/json" if status == HTTPStatus.OK else _TEXT, text.encode())
        elif path in _FILES:
            name, kind = _FILES[path]
            self._send(HTTPStatus.OK, kind, (_STATIC / name).read_bytes())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "nothing here")

    def do_POST(self) -> None:
        target = self._target()
        action = "" if target is None else target.path.removeprefix("/")
        if target is None:
            self._answer(HTTPStatus.BAD_REQUEST, _MALFORMED)
        elif not self._is_local() or not self._is_ours():
            self._answer(HTTPStatus.FORBIDDEN, "only the demo's own page may do this")
        elif action not in ACTIONS:
            self._answer(HTTPStatus.NOT_FOUND, "no such action")
        else:
            self._answer(*self.server.act(action, dict(parse_qsl(target.query))))

    def log_message(self, *_: object) -> None:
        pass  # the terminal belongs to the demo

    def _target(self) -> SplitResult | None:
        """The requested address. None: the address or the Host header is malformed."""
        try:
            _ = self._host().port  # a port that is no number raises here
            return urlsplit(self.path)
        except ValueError:
            return None

    def _host(self) -> SplitResult:
        return urlsplit(f"//{self.headers.get('Host', '')}")

    def _is_local(self) -> bool:
        """Refuse other host names: another site could point its own name at this address (DNS rebinding)."""
        return self._host().hostname in {ADDRESS, "localhost"}

    def _is_ours(self) -> bool:
        """A browser names the posting page in Origin. A request without Origin is not from a browser."""
        origin = self.headers.get("Origin")
        return origin is None or origin == f"http://{self.headers.get('Host')}"

    def _stream(self) -> None:
        stream = self.server.stream
        with stream.seat() as free:
            if not free:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
                return
            try:
                self._head(HTTPStatus.OK, {"Content-Type": "text/event-stream"})
                self.wfile.write(b"retry: 1000\n\n")
                version = 0
                while (snapshot := stream.after(version)) is not None:
                    version, data = snapshot
                    self.wfile.write(b"id: %d\ndata: %b\n\n" % (version, data))
            except (ConnectionError, TimeoutError):
                self.close_connection = True

    def _answer(self, status: HTTPStatus, text: str) -> None:
        self._send(status, _TEXT, text.encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._head(status, {"Content-Type": kind, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, **_SECURITY}.items():
            self.send_header(name, value)
        self.end_headers()
