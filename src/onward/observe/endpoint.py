"""Serves metrics, health and readings over HTTP, for Prometheus, Kubernetes and `onward health`."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import msgspec

from onward.errors import BadSetting
from onward.observe.health import Health
from onward.observe.reading import Reading

log = logging.getLogger("onward")

_PATIENCE_S = 5.0  # for the request, and for the client to read the answer
_MAX_REQUEST_BYTES = 8_192
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_JSON = "application/json"
_REASONS = {
    200: "OK",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class System(Protocol):
    """What an endpoint reports on: an application, or all workers of one."""

    def metrics(self) -> str: ...
    def health(self) -> Health: ...
    def readings(self) -> Sequence[Reading]: ...


class Address(NamedTuple):
    """The address to serve at."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read [HOST:]PORT; ValueError if it is not. An IPv6 address is written in brackets."""
        host, _, port = text.rpartition(":")
        if not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
            raise ValueError(f"{text!r} is not [HOST:]PORT")
        return cls(host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def seen_from(self, everywhere: str) -> "Address":
        """The address to connect to: if the host means every interface, `everywhere` is used in its place."""
        try:
            return Address(everywhere, self.port) if ipaddress.ip_address(self.host).is_unspecified else self
        except ValueError:  # a name
            return self

    @property
    def public(self) -> "Address":
        """The address that other machines use, as far as this machine knows."""
        return self.seen_from(socket.gethostname())


class Answer(NamedTuple):
    status: int
    content_type: str
    body: bytes


def always_live() -> Health:
    """For a process that answers on the event loop of its handlers: an answer proves that it is live."""
    return Health(True)


@contextlib.asynccontextmanager
async def serving(system: System, place: Address, live: Callable[[], Health] = always_live) -> AsyncIterator[Address]:
    """Serve while entered. Yields the address; for port 0, with the port that the operating system chose."""
    pages = _pages(system, live)

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_PATIENCE_S):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(request, pages))
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(respond, place.host, place.port, limit=_MAX_REQUEST_BYTES)
    except OSError as error:
        raise BadSetting(f"cannot serve at {place}: {_cause(error)}; choose another address for --metrics") from error
    async with server:
        yield Address(place.host, server.sockets[0].getsockname()[1])


def _cause(error: OSError) -> str:
    """Why the address cannot be used, without the number of the error."""
    known = {errno.EADDRINUSE: "the port is in use", errno.EACCES: "not permitted"}
    if error.errno is not None and error.errno in errno.errorcode:  # asyncio puts the address into such a text
        return known.get(error.errno) or os.strerror(error.errno)
    return error.strerror or str(error)


@contextlib.contextmanager
def serving_in_thread(system: System, place: Address, live: Callable[[], Health]) -> Iterator[Address]:
    """`serving` on an event loop in its own thread, for a program that has no event loop."""
    ready: Future[Address] = Future()
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        try:
            async with serving(system, place, live) as where:
                ready.set_result(where)
                await over.wait()
        except BadSetting as error:
            ready.set_exception(error)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="onward-endpoint", daemon=True)
    thread.start()
    try:
        yield ready.result()
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed, because serving failed
            loop.call_soon_threadsafe(over.set)
        thread.join()


def _pages(system: System, live: Callable[[], Health]) -> Mapping[str, Callable[[], Answer]]:
    return {
        "/metrics": lambda: Answer(200, _TEXT, system.metrics().encode()),
        "/health/live": lambda: _health("live", live()),
        "/health/ready": lambda: _health("ready", system.health()),
        "/readings": lambda: Answer(200, _JSON, msgspec.json.encode(system.readings())),
    }


def _health(name: str, health: Health) -> Answer:
    body = {name: health.ready, "troubles": health.troubles}
    return Answer(200 if health.ready else 503, _JSON, msgspec.json.encode(body))


def _response(request: bytes, pages: Mapping[str, Callable[[], Answer]]) -> bytes:
    """HEAD gets the same answer as GET, without the body."""
    method, _, rest = request.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
    answer = _page(path, pages) if method in (b"GET", b"HEAD") else Answer(405, "text/plain", b"use GET or HEAD\n")
    return _head(answer) + (b"" if method == b"HEAD" else answer.body)


def _page(path: str, pages: Mapping[str, Callable[[], Answer]]) -> Answer:
    if path not in pages:
        return Answer(404, "text/plain", f"no such page; there are {', '.join(pages)}\n".encode())
    try:
        return pages[path]()
    except Exception as error:
        log.exception("%s cannot be served", path)
        return Answer(500, "text/plain", f"{path} failed with {type(error).__name__}; see the log\n".encode())


def _head(answer: Answer) -> bytes:
    head = [
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode()
