"""Ways in which a real Redis answers with an error, or not at all, until the block ends."""

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from redis import Redis

from tests.servers.redis import OldRedisServer, RedisServer, ValkeyServer
from tests.servers.server import free_port

Fault = Callable[[RedisServer], AbstractContextManager[None]]


class LimitedServer(RedisServer):
    """Its files can be given a limit, as on a full disk: a write above it fails, and does not end the server."""

    def command(self) -> list[str]:
        return ["/bin/sh", "-c", "trap '' XFSZ; exec \"$@\"", "sh", *super().command()]


class LimitedOldServer(LimitedServer, OldRedisServer):
    pass


class LimitedValkey(LimitedServer, ValkeyServer):
    pass


@contextmanager
def busy(server: RedisServer) -> Iterator[None]:
    """A script of another program that does not end."""

    def run() -> None:
        with server.client(60.0) as client, pytest.raises(Exception, match=r"killed|Script"):
            client.eval("while true do end", 0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with server.client() as client:
            until_error(client, "BUSY")
            yield
    finally:
        with server.client() as client:
            client.script_kill()
        thread.join()


@contextmanager
def scripts_forgotten(server: RedisServer) -> Iterator[None]:
    """SCRIPT FLUSH, again and again: NOSCRIPT."""
    ended = threading.Event()

    def flush() -> None:
        with server.client() as client:
            while not ended.wait(0.002):
                client.script_flush()

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def read_only(server: RedisServer) -> Iterator[None]:
    """It has become a replica, of a master that is away."""
    with server.client() as client:
        client.replicaof("127.0.0.1", free_port())
        yield
        client.replicaof("NO", "ONE")


@contextmanager
def too_few_replicas(server: RedisServer) -> Iterator[None]:
    with configured(server, "min-replicas-to-write", "1"):
        yield


@contextmanager
def out_of_memory(server: RedisServer) -> Iterator[None]:
    with configured(server, "maxmemory", "1"):
        yield


@contextmanager
def configured(server: RedisServer, name: str, value: str) -> Iterator[None]:
    with server.client() as client:
        before: Any = client.config_get(name)
        client.config_set(name, value)
        try:
            yield
        finally:
            client.config_set(name, before[name])


@contextmanager
def full_disk(server: RedisServer) -> Iterator[None]:
    """Its append-only file cannot grow. It must not have `appendfsync always`: such a server ends."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (server.appended.stat().st_size, resource.RLIM_INFINITY))
    with server.client() as client:
        until_error(client, "MISCONF")
        yield
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        until_error(client, "")


LOADS_SLOWLY = ("--key-load-delay", "200")  # in µs, for each command in its file


@contextmanager
def loading(server: RedisServer) -> Iterator[None]:
    """It was killed, and loads its data, for four seconds. It must have been started with LOADS_SLOWLY."""
    with server.client() as client, client.pipeline(transaction=False) as filling:
        for n in range(20_000):
            filling.set("filler", n)
        filling.execute()
    starting = threading.Thread(target=server.restart)
    starting.start()
    try:
        while b"LOADING" not in _ping(server):
            pass
        yield
    finally:
        starting.join()


def _ping(server: RedisServer) -> bytes:
    try:
        with socket.create_connection((server.host, server.port), 10.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(100)
    except OSError:
        return b""


_PAUSE_S = 2.5
_LONG_PAUSE_S = 14.0  # longer than two answers may take


@contextmanager
def paused(server: RedisServer) -> Iterator[None]:
    """CLIENT PAUSE of all commands: also of the one that would end it."""
    with server.client(30.0) as client:
        client.client_pause(int(_PAUSE_S * 1000))
        yield
        client.ping()


@contextmanager
def writes_paused(server: RedisServer, seconds: float = _PAUSE_S) -> Iterator[None]:
    with server.client(30.0) as client:
        client.client_pause(int(seconds * 1000), all=False)
        yield
        client.set("probe", "x")


@contextmanager
def writes_paused_for_long(server: RedisServer) -> Iterator[None]:
    with writes_paused(server, _LONG_PAUSE_S):
        yield


@contextmanager
def stopped(server: RedisServer, seconds: float = _PAUSE_S) -> Iterator[None]:
    """SIGSTOP."""
    server.pause()
    going_on = threading.Timer(seconds, server.resume)
    going_on.start()
    try:
        yield
    finally:
        going_on.join()


@contextmanager
def stopped_for_long(server: RedisServer) -> Iterator[None]:
    with stopped(server, _LONG_PAUSE_S):
        yield


@contextmanager
def killed(server: RedisServer) -> Iterator[None]:
    server.kill()
    yield
    server.start()


def until_error(client: Redis, code: str, within_s: float = 20.0) -> None:
    """Write until the answer is this error; "" is none."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            client.set("probe", "x")
            found = ""
        except Exception as error:  # of any class: redis-py cuts the code off some
            found = f"{type(error).__name__} {error}".upper()
        if (code in found) if code else not found:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {code or 'success'} within {within_s} s")
