"""`GET /metrics`, on the application's own event loop: nothing else reads its state beside it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from onward.errors import BadSetting

_PATIENCE_S = 5.0  # for a request, and for whoever reads the answer
_MOST_BYTES = 8_192  # of a request


@contextlib.asynccontextmanager
async def serving(metrics: Callable[[], str], host: str, port: int) -> AsyncIterator[int]:
    """While entered, metrics can be scraped; gives the port, which the system chooses if it is 0."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_PATIENCE_S):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(request, metrics))
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port, limit=_MOST_BYTES)
    except OSError as error:
        raise BadSetting(f"metrics cannot be served at {host}:{port}: {error}; choose another --metrics") from error
    async with server:
        yield server.sockets[0].getsockname()[1]


def _response(request: bytes, metrics: Callable[[], str]) -> bytes:
    found = request.split(b" ", 2)[:2] == [b"GET", b"/metrics"]
    body = (metrics() if found else "metrics are at /metrics\n").encode()
    head = [
        f"HTTP/1.1 {'200 OK' if found else '404 Not Found'}",
        "Content-Type: text/plain; version=0.0.4; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body
