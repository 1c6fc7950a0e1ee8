"""Connections to Redis, each for one thread at a time.

redis-py's own retries are off: they would store twice what was stored once. Replies come as the server sent them,
without redis-py's callbacks, which make a dict of every entry.
"""

import asyncio
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as NoReply

from onward import clock
from onward.brokers.redis.address import RedisAddress
from onward.brokers.redis.keys import type_of
from onward.brokers.redis.permissions import (
    PROBE,
    TRIALS,
    foreign_keys,
    is_denied_in_script,
    is_denied_key,
    missing,
    refused,
)
from onward.brokers.redis.scripts import Command, keys_of, with_text
from onward.brokers.redis.server_errors import (
    LOADING,
    code_of,
    explained,
    is_passing,
    is_wrong_type,
    unanswered,
    wrong_types,
)
from onward.brokers.redis.server_facts import INFO, ServerFacts, info_of
from onward.errors import BrokerError, Closed

T = TypeVar("T")

TIMEOUT_S = 5.0  # of one answer
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_CLOSE_S = 2.0
_CONFIRM_S = 1.0  # between two questions to the Sentinels, whether the master is the same
_ASK_AGAIN_S = 10.0  # when none of them has answered


class LinkDown(BrokerError):
    """There is no answer, or only one that means "not now". `sent`: the commands may have been carried out. `final`:
    another attempt would not help. `hung`: it took too long."""

    def __init__(self, why: str, *, sent: bool, final: bool = False, hung: bool = False) -> None:
        super().__init__(why)
        self.sent = sent
        self.final = final
        self.hung = hung


class NoPermission(BrokerError):
    """The user may not run the command, or not use its keys."""


class NoAnswer(ResponseError):
    """In place of a reply: the node that has the key does not answer, or too few replicas have the write. `sent`: the
    command may have been carried out."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class Pauses:
    """Between attempts: they double, up to a limit, and differ from one process to the next."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    def next_s(self) -> float:
        pause_s, self._next_s = self._next_s, min(_LONGEST_PAUSE_S, 2 * self._next_s)
        return pause_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = _FIRST_PAUSE_S


class Link(ABC):
    """The way to a server or to the nodes of a cluster. An incarnation is asked for after `connect`, and right before
    the call that it is for."""

    def __init__(self, address: RedisAddress) -> None:
        self.address = address
        self.trouble = ""  # why the last call had no answer

    @abstractmethod
    def call(self, *commands: Command, copies: int = 0) -> list[Any]:
        """The replies, in order; one may be a ResponseError. LinkDown: there is no answer at all. A reply counts only
        when so many replicas have `copies` of what was written; otherwise it is NoAnswer."""

    @abstractmethod
    def connect(self) -> None:
        """Also from time to time while it is connected: a fail-over may have replaced the server. LinkDown: no server
        answers, or it cannot be used."""

    @abstractmethod
    def confirm(self) -> None:
        """Connect, and make sure that this is still the server to use."""

    @property
    @abstractmethod
    def is_connected(self) -> bool:
        """As far as we know: a connection that was cut shows it at the next call."""

    @property
    @abstractmethod
    def risk(self) -> str:
        """Why a server that answers may lose events, as it was when the incarnation was read."""

    @abstractmethod
    def incarnation(self, key: str) -> str:
        """Of the server that has this key, when we connected to it."""

    @abstractmethod
    def refresh(self) -> None:
        """Read the incarnations again."""

    @abstractmethod
    def facts(self) -> ServerFacts:
        """What the server says of itself; of a cluster, the weakest of its masters."""

    @abstractmethod
    def infos(self, sections: Sequence[str]) -> dict[str, Mapping[str, str]]:
        """What INFO says, by the name of each server; "" if there is only one."""

    @abstractmethod
    def denied(self) -> list[str]:
        """The commands that the user has no permission for, as far as the server can tell."""

    @abstractmethod
    def close(self) -> None: ...

    def ask(self, *commands: Command) -> list[Any]:
        """As `call`, for commands that must all succeed. BrokerError: one did not; LinkDown: it may in a moment."""
        replies = self.call(*commands)
        for reply in replies:
            if isinstance(reply, NoAnswer):
                raise LinkDown(str(reply), sent=reply.sent) from reply
            if isinstance(reply, ResponseError):
                why = f"Redis at {self.address.name}: {explained(reply)}"
                if not is_passing(reply):
                    raise (NoPermission if code_of(reply) == "NOPERM" else BrokerError)(why) from reply
                self.trouble = why
                raise LinkDown(why, sent=False) from reply
        return replies


class ServerLink(Link):
    """One connection to one server."""

    def __init__(self, address: RedisAddress, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: how long an answer may take."""
        super().__init__(address)
        self._timeout_s = timeout_s
        self._incarnation = ""
        self._risk = ""
        self._confirm_at = 0.0  # when to ask the Sentinels again
        self._connection: Any = None  # of redis-py, whose connections have no annotations

    def call(self, *commands: Command, copies: int = 0) -> list[Any]:
        if self._connection is None:  # otherwise the server stays the one whose incarnation the commands have
            self.connect()
        replies = self.exchange(commands)
        unknown = [at for at, reply in enumerate(replies) if is_unknown_script(reply)]
        if unknown:
            again = self.exchange([with_text(commands[at]) for at in unknown])
            for at, reply in zip(unknown, again, strict=True):
                replies[at] = reply
        if any(isinstance(reply, ResponseError) and code_of(reply) == "READONLY" for reply in replies):
            self.close()  # a fail-over has made it a replica: the next call looks again
            return replies
        replies = self.named(commands, replies)
        return self.confirmed(replies, copies) if copies else replies

    def connect(self) -> None:
        """The incarnation is read first on every new connection."""
        if self._connection is not None and clock.now() > self._confirm_at:
            self._ask_sentinels()
        if self._connection is None:
            self.open()
            self._identify()
            self.trouble = ""

    def _identify(self) -> None:
        facts = self._info({})
        if why := LOADING if facts.is_loading else facts.obstacle():
            self.close()
            self.trouble = f"Redis at {self.address.name}: {why}"
            is_replaced = self.address.kind == "sentinel" and not facts.is_master  # the Sentinels will know
            raise LinkDown(self.trouble, sent=False, final=not facts.is_loading and not is_replaced)
        self._incarnation = facts.incarnation
        self._risk = f"Redis at {self.address.name}: {facts.risk()}" if facts.risk() else ""

    def open(self) -> None:
        """Connect, whatever the server is."""
        connection = None
        try:
            connection = self.address.connection(self._timeout_s)
            connection.connect()
        except (RedisError, OSError) as error:
            if connection is not None:
                connection.disconnect()
            raise self._down(error, sent=False) from error
        self._connection = connection

    def confirm(self) -> None:
        if self._connection is not None:
            self._ask_sentinels()
        self.connect()

    def _ask_sentinels(self) -> None:
        """Leave a former master: it may accept writes, and answer reads, until the Sentinels reach it. If none of them
        answers, no other master is known."""
        self._confirm_at = math.inf
        if self.address.kind == "sentinel":
            try:
                if self.address.master() != (self._connection.host, self._connection.port):
                    self.close()
                self._confirm_at = clock.now() + _CONFIRM_S
            except (RedisError, OSError):
                self._confirm_at = clock.now() + _ASK_AGAIN_S

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def risk(self) -> str:
        return self._risk

    def incarnation(self, key: str) -> str:
        return self._incarnation

    def refresh(self) -> None:
        self.connect()
        self._identify()

    def facts(self) -> ServerFacts:
        """With what CONFIG says, where it may be asked: without it, the weaker durability is assumed."""
        self.connect()
        (reply,) = self.exchange([("CONFIG", "GET", "appendfsync")])
        known = not isinstance(reply, ResponseError) and reply
        return self._info({"appendfsync": reply[1].decode()} if known else {})

    def _info(self, config: dict[str, str]) -> ServerFacts:
        sections = self.exchange([("INFO", section) for section in INFO])
        for reply in sections:
            if isinstance(reply, ResponseError):
                self.close()
                self.trouble = f"Redis at {self.address.name}: {explained(reply)}"
                raise LinkDown(self.trouble, sent=False, final=not is_passing(reply)) from reply
        return ServerFacts.of(sections, config)

    def infos(self, sections: Sequence[str]) -> dict[str, Mapping[str, str]]:
        return {"": info_of(self.ask(*[("INFO", section) for section in sections]))}

    def denied(self) -> list[str]:
        self.connect()
        (reply,) = self.exchange([PROBE])
        if (names := missing(reply)) is not None:
            return names
        (begun,) = self.exchange([("MULTI",)])
        if isinstance(begun, ResponseError):
            return []  # without a transaction the commands would be carried out
        *replies, ended = self.exchange([*TRIALS, ("DISCARD",)])
        if isinstance(ended, ResponseError):
            self.close()
        return refused(replies)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """The replies of an open connection as they come."""
        self.send(commands)
        return self.receive(len(commands))

    def send(self, commands: Sequence[Command]) -> None:
        connection = self._connection
        assert connection is not None, "connected"
        try:
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        except (RedisError, OSError) as error:
            self.close()
            raise self._down(error, sent=True) from error
        except BaseException:
            self.close()
            raise

    def receive(self, count: int) -> list[Any]:
        connection = self._connection
        assert connection is not None, "connected"
        try:
            return [_reply(connection) for _ in range(count)]
        except (RedisError, OSError) as error:
            self.close()
            raise self._down(error, sent=True) from error
        except BaseException:
            self.close()
            raise

    def confirmed(self, replies: list[Any], copies: int) -> list[Any]:
        """The replies, when so many replicas have what this connection wrote last."""
        (found,) = self.exchange([("WAIT", copies, int(self._timeout_s * 1000 / 2))])
        if not isinstance(found, ResponseError) and found >= copies:
            return replies
        why = explained(found) if isinstance(found, ResponseError) else f"{found} of {copies} replicas have the write"
        lacking = f"Redis at {self.address.name}: {why}"
        return [reply if isinstance(reply, ResponseError) else NoAnswer(lacking, sent=True) for reply in replies]

    def named(self, commands: Sequence[Command], replies: list[Any]) -> list[Any]:
        """An error about a type names the key that has it; one about a permission, the commands or the keys."""
        if not any(is_wrong_type(each) or is_denied_in_script(each) or is_denied_key(each) for each in replies):
            return replies
        return [self._named(command, reply) for command, reply in zip(commands, replies, strict=True)]

    def _down(self, error: Exception, *, sent: bool) -> LinkDown:
        why, name = explained(error) if isinstance(error, RedisError) else str(error), self.address.name
        if isinstance(error, AuthenticationError | ResponseError):  # it answers
            self.trouble = f"Redis at {name}: {why}"
            return LinkDown(self.trouble, sent=sent, final=not is_passing(error))
        self.trouble = f"Redis at {name} does not answer: {unanswered(why, encrypted=self.address.is_encrypted)}"
        return LinkDown(self.trouble, sent=sent, hung=isinstance(error, NoReply | TimeoutError))

    def _named(self, command: Command, reply: Any) -> Any:
        if is_denied_in_script(reply):
            return ResponseError(f"NOPERM no permission for '{'|'.join(self.denied())}' command ({reply})")
        if is_denied_key(reply) and (names := foreign_keys(keys_of(command))):
            return NoPermissionError(f"no permission for the key {','.join(names)} ({reply})")
        if not is_wrong_type(reply):
            return reply
        keys = keys_of(command)
        types = self.exchange([("TYPE", key) for key in keys])
        found = [(key, type_.decode(), type_of(key)) for key, type_ in zip(keys, types, strict=True)]
        return ResponseError(f"WRONGTYPE {wrong_types(found)}")


def is_unknown_script(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and code_of(reply) == "NOSCRIPT"


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def patiently(call: Callable[[], T], within_s: float, is_over: Callable[[], bool] = bool) -> T:
    """Make the call, and make it again for so long while the server does not answer or says "not now"."""
    deadline, pauses = time.monotonic() + within_s, Pauses()
    while True:
        try:
            return call()
        except LinkDown as error:
            if error.final or is_over() or time.monotonic() > deadline:
                raise
            time.sleep(pauses.next_s())


class LinkThread:
    """A thread with a connection of its own, for calls from event loops. A caller that is cancelled leaves its call on
    its way: it is carried out, and nothing reads a wrong answer."""

    def __init__(self, link: Link, name: str) -> None:
        self._link = link
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"onward-redis-{name}")
        self._closed = False

    async def run(self, call: Callable[[Link], T], *, repeat: bool = True, within_s: float = 0.0) -> T:
        """`repeat`: the call may be made twice. It is, if the connection turns out to be an old one that was cut, and
        for `within_s` while the server does not answer."""
        if self._closed:
            raise Closed(f"the connection to {self._link.address.name} is closed")
        work = self._twice if repeat else self._once
        loop = asyncio.get_running_loop()
        if not within_s:
            return await loop.run_in_executor(self._thread, work, call)
        return await loop.run_in_executor(self._thread, patiently, lambda: work(call), within_s, self._is_closed)

    def _is_closed(self) -> bool:
        return self._closed

    def _once(self, call: Callable[[Link], T]) -> T:
        self._link.connect()
        return call(self._link)

    def _twice(self, call: Callable[[Link], T]) -> T:
        was_connected = self._link.is_connected
        try:
            self._link.connect()
            return call(self._link)
        except LinkDown as error:
            if not was_connected or not error.sent:
                raise
        return call(self._link)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            closing = asyncio.get_running_loop().run_in_executor(self._thread, self._link.close)
            await asyncio.wait([closing], timeout=_CLOSE_S)
            self._thread.shutdown(wait=False)
