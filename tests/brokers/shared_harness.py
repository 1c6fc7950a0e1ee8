"""The harness of the reference broker: its scheme, and its stores by URL, for this process or for all processes."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from onward.settings import Settings
from tests.brokers.shared_reference import ReferenceBroker, Store
from tests.examples import ROOT


class ReferenceHarness:
    def __init__(self, url: str, folder: Path, *, in_process: bool) -> None:
        self.url = url
        self.folder = folder
        self.in_process = in_process


@pytest.fixture(autouse=True)
def scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the scheme reference:// for this process and its children."""
    package = tmp_path / "installed/reference-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: reference\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[onward.brokers]\nreference = {__name__}:open_broker\n")
    for path in (package.parent, ROOT):
        monkeypatch.syspath_prepend(str(path))
        monkeypatch.setenv("PYTHONPATH", str(path), prepend=":")


_brokers: dict[str, Callable[[Settings], ReferenceBroker]] = {}  # in this process, by URL


def open_broker(url: str, settings: Settings) -> ReferenceBroker:
    """The entry point of the scheme names this function."""
    if url in _brokers:
        return _brokers[url](settings)
    address = urlsplit(url)
    remote: Any = RemoteStore((address.hostname or "", address.port or 0))
    return ReferenceBroker(remote, settings)


@contextmanager
def stored(store: Store, kind: type[ReferenceBroker] = ReferenceBroker) -> Iterator[str]:
    """Yield the URL of a broker of this kind on this store, for this process only."""
    url = f"reference://{uuid4().hex}"
    _brokers[url] = lambda settings: kind(store, settings)
    yield url
    del _brokers[url]


@contextmanager
def served(store: Store) -> Iterator[str]:
    """Yield the URL of a broker on this store, for all processes."""
    with Listener(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, store, threading.Lock()), daemon=True).start()
        host, port = listener.address
        yield f"reference://{host}:{port}"


def _accept(listener: Listener, store: Store, lock: threading.Lock) -> None:
    with suppress(OSError):  # the listener was closed
        while True:
            threading.Thread(target=_answer, args=(listener.accept(), store, lock), daemon=True).start()


def _answer(connection: "Connection[Any, Any]", store: Store, lock: threading.Lock) -> None:
    with connection, suppress(EOFError, OSError):  # the caller has left
        while True:
            name, arguments = connection.recv()
            with lock:
                answer = getattr(store, name)(*arguments)
            connection.send(answer)


class RemoteStore:
    """A store in another process, with the same methods."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._connection = Client(address)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._ask, name)

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._connection.send((name, arguments))
        return self._connection.recv()
