"""A TCP proxy on loopback that can be cut and stalled, to test what a client does when the network fails."""

import asyncio
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Self

HOST = "127.0.0.1"
CHUNK_BYTES = 65536
ANSWER_S = 10.0


class Proxy:
    """Forwards `port` to `target_port`. `url` is the server's URL with the port of the proxy. Use it in a `with`.

    cut()    drops every connection and refuses new ones; nothing more is forwarded once it returns
    stall()  keeps connections open and accepts new ones, but forwards nothing
    mute()   forwards the clients' requests, and holds the answers back
    mend()   forwards again; after a stall the bytes held back arrive
    redirect(port)  mends, and leads to another server; connections to the former one are dropped
    """

    def __init__(self, *, port: int, target_port: int, url: str) -> None:
        self.host, self.port, self.url = HOST, port, url
        self._target_port = target_port
        self._flowing = asyncio.Event()
        self._answering = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        # The proxy has its own loop: the caller may be sync, or may block its loop.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy {port}", daemon=True)
        self._thread.start()
        self.mend()

    def cut(self) -> None:
        self._do(self._cut())

    def stall(self) -> None:
        self._do(self._accept(flowing=False))

    def mute(self) -> None:
        self._loop.call_soon_threadsafe(self._answering.clear)

    def mend(self) -> None:
        self._do(self._accept(flowing=True))

    def redirect(self, target_port: int) -> None:
        if target_port != self._target_port:
            self.cut()
            self._target_port = target_port
        self.mend()

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_S)

    async def _accept(self, *, flowing: bool) -> None:
        if flowing:
            self._flowing.set()
            self._answering.set()
        else:
            self._flowing.clear()
        if self._listener is None:
            self._listener = await asyncio.start_server(self._connected, HOST, self.port)

    async def _cut(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        connection = self._loop.create_task(self._forward(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _forward(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one connection. When one side closes, the other side is dropped as well."""
        writers = [writer]
        try:
            await self._flowing.wait()
            with suppress(OSError):
                server_reader, server_writer = await asyncio.open_connection(HOST, self._target_port)
                writers.append(server_writer)
                await asyncio.gather(
                    self._pump(reader, server_writer, self._flowing), self._pump(server_reader, writer, self._answering)
                )
        finally:
            for each in writers:
                each.transport.abort()

    async def _pump(self, source: StreamReader, sink: StreamWriter, gate: asyncio.Event) -> None:
        while data := await source.read(CHUNK_BYTES):
            await self._flowing.wait()
            await gate.wait()
            sink.write(data)
            await sink.drain()
        await self._flowing.wait()
        await gate.wait()
        sink.write_eof()
