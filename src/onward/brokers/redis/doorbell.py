"""The doorbell: a blocking XREAD from the positions that were read so far, on a connection of its own.

A lost ring costs at most a second: a waiting receive looks by itself. It also hears the group's news, such as a member
that comes or goes.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from onward import clock
from onward.brokers.redis.link import Link, LinkDown, Pauses
from onward.errors import BrokerError

_BLOCK_MS = 1_000  # less than the time in which an answer must come
_FRESH_S = 2.5  # an XREAD that has no answer for longer proves nothing
_MOST_BELLS = 64  # of a member on a cluster: each is a thread and a connection
_NEVER, _LOST = -1, 0  # in place of the id of a connection
_REARM_S = 0.05  # how soon a reader usually has read what the bell rang for


class Blocked(NamedTuple):
    """The XREAD that blocks now, or the last one that did."""

    streams: frozenset[str] = frozenset()
    since: float = 0.0
    now: bool = False


class RedisDoorbell:
    def __init__(self, link: Link, news: Sequence[str], *, ring: Callable[[], None], tell: Callable[[], None]) -> None:
        self._link = link
        self._news = dict.fromkeys(news, "$")  # by stream: the last id seen
        self._ring = ring  # there are events
        self._tell = tell  # there is news of the group
        self._changed = threading.Condition()
        self._armed: Mapping[str, str] = {}  # by stream: the last id that was read
        self._rearmed = False
        self._blocked = Blocked()
        self._client = _NEVER  # the id of our connection at the server
        self._closed = False

    def arm(self, ids: Mapping[str, str]) -> int:
        """Ring when one of these streams has an entry above its id. Returns the id of a client to unblock, or 0: it
        blocks without some of these streams."""
        with self._changed:
            self._armed, self._rearmed = dict(ids), True
            self._changed.notify()
            return self._client if self._blocked.now and not ids.keys() <= self._blocked.streams else 0

    def is_quiet(self, ids: Mapping[str, str]) -> bool:
        """It listens from these ids, and nothing has come."""
        with self._changed:
            listens = self._blocked.now and clock.now() - self._blocked.since < _FRESH_S
            return listens and self._armed == ids and ids.keys() <= self._blocked.streams

    @property
    def trouble(self) -> str:
        """Why it cannot listen. Without a connection the keeper of the leases says so."""
        return self._link.trouble if self._link.is_connected else ""

    def start(self, name: str) -> None:
        threading.Thread(target=self._run, name=f"onward-redis-doorbell-{name}", daemon=True).start()

    def stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        pauses = Pauses()
        while not self._closed:
            try:
                self._listen()
                pauses.reset()
                self._link.trouble = ""
            except LinkDown:
                self._client = _LOST
                self._pause(pauses.next_s())
            except BrokerError as error:  # such as a missing permission: receive looks by itself
                self._link.trouble = f"events arrive up to a second late: {error}"
                self._pause(1.0)
        self._link.close()

    def _pause(self, seconds: float) -> None:
        end = clock.now() + seconds
        with self._changed:
            while not self._closed and (left_s := end - clock.now()) > 0:
                self._changed.wait(left_s)

    def _listen(self) -> None:
        self._link.connect()
        if self._client in (_NEVER, _LOST):
            with self._changed:
                if self._client == _LOST:
                    self._armed = {}  # until the reader has looked whether the server has lost anything
            (self._client,) = self._link.ask(("CLIENT", "ID"))
            self._know_news()
        with self._changed:
            if not self._rearmed and not self._closed:
                self._changed.wait(_REARM_S if self._news or self._armed else None)
            self._rearmed = False
            streams = {**self._news, **self._armed}
            if not streams:
                return
            self._blocked = Blocked(frozenset(streams), clock.now(), now=True)
        try:
            (found,) = self._link.ask(("XREAD", "COUNT", 1, "BLOCK", _BLOCK_MS, "STREAMS", *streams, *streams.values()))
        finally:
            with self._changed:
                self._blocked = self._blocked._replace(now=False)
        self._heard(found or ())

    def _know_news(self) -> None:
        """Look once, and from then on listen from the last entry: what happened before the connection is not missed."""
        if not self._news:
            return
        found = self._link.ask(*[("XREVRANGE", stream, "+", "-", "COUNT", 1) for stream in self._news])
        for stream, entries in zip(self._news, found, strict=True):
            self._news[stream] = entries[0][0].decode() if entries else "0-0"
        self._tell()

    def _heard(self, found: Sequence[Any]) -> None:
        has_events = False
        for name, entries in found:
            stream = name.decode()
            if stream in self._news:
                self._news[stream] = entries[-1][0].decode()
                self._tell()
            else:
                has_events = True
        with self._changed:
            if has_events and not self._rearmed:
                self._armed = {}  # until the reader has read them
            elif not has_events:
                self._rearmed = True  # nothing to read: block again at once
        if has_events:
            self._ring()


class ClusterDoorbell:
    """On a cluster an XREAD can only name streams of one slot, so each stream has a doorbell of its own, up to a limit.
    A stream beyond it is looked at once a second."""

    def __init__(
        self,
        link: Callable[[str], Link],
        news: Sequence[str],
        *,
        ring: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        """`link`: to the node that has this stream."""
        self._link = link
        self._ring = ring
        self._tell = tell
        self._name = ""
        self._changing = threading.Lock()
        self._closed = False
        self._bells = {stream: self._bell(stream, [stream]) for stream in news}

    def arm(self, ids: Mapping[str, str]) -> int:
        """As RedisDoorbell. A doorbell that blocks blocks with its only stream: none must be unblocked."""
        with self._changing:
            room = 0 if self._closed else max(0, _MOST_BELLS - len(self._bells))
            for stream in sorted(ids.keys() - self._bells.keys())[:room]:
                self._bells[stream] = self._bell(stream, ())
                self._bells[stream].start(self._name)
        for stream in ids.keys() & self._bells.keys():
            self._bells[stream].arm({stream: ids[stream]})
        return 0

    def is_quiet(self, ids: Mapping[str, str]) -> bool:
        return all(stream in self._bells and self._bells[stream].is_quiet({stream: id_}) for stream, id_ in ids.items())

    @property
    def trouble(self) -> str:
        return next(filter(None, [bell.trouble for bell in tuple(self._bells.values())]), "")

    def start(self, name: str) -> None:
        self._name = name
        for bell in self._bells.values():
            bell.start(name)

    def stop(self) -> None:
        with self._changing:
            self._closed = True
            for bell in self._bells.values():
                bell.stop()

    def _bell(self, stream: str, news: Sequence[str]) -> RedisDoorbell:
        return RedisDoorbell(self._link(stream), news, ring=self._ring, tell=self._tell)
