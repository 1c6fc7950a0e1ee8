"""One connection to the server, for one thread at a time.

redis-py's own retries are off: they would store twice what was stored once. Replies come as the server sent them,
without redis-py's callbacks, which make a dict of every entry.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

from redis.backoff import NoBackoff
from redis.connection import URL_QUERY_ARGUMENT_PARSERS, Connection, parse_url
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.retry import Retry

from onward.brokers.redis.keys import type_of
from onward.brokers.redis.permissions import PROBE, TRIALS, is_denied_in_script, missing, refused
from onward.brokers.redis.scripts import Command, keys_of, with_text
from onward.brokers.redis.server_errors import LOADING, code_of, explained, is_passing, is_wrong_type, wrong_types
from onward.brokers.redis.server_facts import INFO, ServerFacts
from onward.errors import BadSetting, BrokerError, Closed
from onward.settings import Settings, redacted

T = TypeVar("T")

_parse_url: Callable[[str], Any] = parse_url
_parsers: Mapping[str, Any] = URL_QUERY_ARGUMENT_PARSERS

TIMEOUT_S = 5.0  # of one answer
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_OURS = frozenset({"decode_responses", "health_check_interval", "protocol", "retry", "retry_on_error"})
_OURS |= {"retry_on_timeout", "socket_timeout"}
_CLOSE_S = 2.0


class LinkDown(BrokerError):
    """There is no answer, or only one that means "not now". `sent`: the commands may have been carried out. `final`:
    another attempt would not help."""

    def __init__(self, why: str, *, sent: bool, final: bool = False) -> None:
        super().__init__(why)
        self.sent = sent
        self.final = final


class RedisAddress(NamedTuple):
    """Where the server is, and how to connect to it."""

    name: str  # without secrets
    options: Mapping[str, Any]

    @classmethod
    def of(cls, url: str, settings: Settings) -> "RedisAddress":
        try:
            options = cast("dict[str, Any]", _parse_url(url)) | {
                name: _client_value(name, value) for name, value in settings.client.items()
            }
        except (ValueError, TypeError) as error:
            raise BadSetting(f"{redacted(url)}: {error}") from error
        if taken := sorted(_OURS & options.keys()):
            raise BadSetting(f"client {taken[0]!r}: Onward sets it itself; remove it")
        path = url.partition("://")[2].partition("/")[2]
        if path and not path.isdigit():
            raise BadSetting(f"{redacted(url)}: {path!r} is no database; use a number, such as /0, or nothing")
        return cls(redacted(url), options)

    def connection(self, timeout_s: float) -> Any:
        """`timeout_s`: for connecting, and for each answer."""
        options: dict[str, Any] = {"socket_connect_timeout": timeout_s, "socket_keepalive": True}
        options |= self.options
        kind = options.pop("connection_class", Connection)
        try:
            return kind(**options, socket_timeout=timeout_s, protocol=2, retry=Retry(NoBackoff(), 0))
        except TypeError as error:
            raise BadSetting(f"client settings of {self.name}: {error}; use the names of redis-py") from error


def _client_value(name: str, value: Any) -> Any:
    """In a URL all values are texts."""
    parser = _parsers.get(name)
    return parser(value) if parser is not None and isinstance(value, str) else value


class Pauses:
    """Between attempts: they double, up to a limit, and differ from one process to the next."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    def next_s(self) -> float:
        pause_s, self._next_s = self._next_s, min(_LONGEST_PAUSE_S, 2 * self._next_s)
        return pause_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = _FIRST_PAUSE_S


class Link:
    def __init__(self, address: RedisAddress, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: how long an answer may take."""
        self.address = address
        self._timeout_s = timeout_s
        self._incarnation = ""
        self.trouble = ""  # why the last call had no answer
        self._connection: Any = None  # of redis-py, whose connections have no annotations

    def call(self, *commands: Command) -> list[Any]:
        """The replies, in order; one may be a ResponseError. LinkDown: there is no answer."""
        self.connect()
        replies = self._exchange(commands)
        unknown = [at for at, reply in enumerate(replies) if _is_unknown_script(reply)]
        if unknown:
            again = self._exchange([with_text(commands[at]) for at in unknown])
            for at, reply in zip(unknown, again, strict=True):
                replies[at] = reply
        if any(is_wrong_type(reply) or is_denied_in_script(reply) for reply in replies):
            replies = [self._named(command, reply) for command, reply in zip(commands, replies, strict=True)]
        if any(isinstance(reply, ResponseError) and code_of(reply) == "READONLY" for reply in replies):
            self.close()  # a fail-over has made it a replica: the next call looks again
        return replies

    def ask(self, *commands: Command) -> list[Any]:
        """As `call`, for commands that must all succeed. BrokerError: one did not; LinkDown: it may in a moment."""
        replies = self.call(*commands)
        for reply in replies:
            if isinstance(reply, ResponseError):
                why = f"Redis at {self.address.name}: {explained(reply)}"
                if not is_passing(reply):
                    raise BrokerError(why) from reply
                self.trouble = why
                raise LinkDown(why, sent=False) from reply
        return replies

    def connect(self) -> None:
        """The incarnation is read first on every new connection."""
        if self._connection is not None:
            return
        connection = self.address.connection(self._timeout_s)
        try:
            connection.connect()
        except (RedisError, OSError) as error:
            connection.disconnect()
            raise self._down(error, sent=False) from error
        self._connection = connection
        facts = self.facts()
        if why := LOADING if facts.is_loading else facts.obstacle():
            self.close()
            self.trouble = f"Redis at {self.address.name}: {why}"
            raise LinkDown(self.trouble, sent=False, final=not facts.is_loading)
        self._incarnation = facts.incarnation
        self.trouble = ""

    @property
    def is_connected(self) -> bool:
        """As far as we know: a connection that was cut shows it at the next call."""
        return self._connection is not None

    def incarnation(self, key: str) -> str:
        """Of the server that has this key, when we connected to it."""
        return self._incarnation

    def refresh(self) -> None:
        """Read the incarnations again."""
        self.connect()
        self._incarnation = self.facts().incarnation

    def facts(self, config: Mapping[str, str] | None = None) -> ServerFacts:
        sections = self._exchange([("INFO", section) for section in INFO])
        for reply in sections:
            if isinstance(reply, ResponseError):
                self.close()
                self.trouble = f"Redis at {self.address.name}: {explained(reply)}"
                raise LinkDown(self.trouble, sent=False, final=not is_passing(reply)) from reply
        return ServerFacts.of(sections, config or {})

    def denied(self) -> list[str]:
        """The commands that the user has no permission for, as far as the server can tell."""
        self.connect()
        (reply,) = self._exchange([PROBE])
        if (names := missing(reply)) is not None:
            return names
        (begun,) = self._exchange([("MULTI",)])
        if isinstance(begun, ResponseError):
            return []  # without a transaction the commands would be carried out
        *replies, ended = self._exchange([*TRIALS, ("DISCARD",)])
        if isinstance(ended, ResponseError):
            self.close()
        return refused(replies)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        connection = self._connection
        assert connection is not None, "connected"
        try:
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            return [_reply(connection) for _ in commands]
        except (RedisError, OSError) as error:
            self.close()
            raise self._down(error, sent=True) from error
        except BaseException:
            self.close()
            raise

    def _down(self, error: Exception, *, sent: bool) -> LinkDown:
        why = explained(error) if isinstance(error, RedisError) else str(error)
        cure = "is it running, and are host and port right?"
        self.trouble = f"Redis at {self.address.name} does not answer: {why.rstrip('.')}; {cure}"
        if isinstance(error, AuthenticationError):
            self.trouble = f"Redis at {self.address.name}: {why}"
        return LinkDown(self.trouble, sent=sent, final=isinstance(error, AuthenticationError))

    def _named(self, command: Command, reply: Any) -> Any:
        """Of an error about a type: with the key that has it. Of one about a permission: with the commands."""
        if is_denied_in_script(reply):
            return ResponseError(f"NOPERM no permission for '{'|'.join(self.denied())}' command ({reply})")
        if not is_wrong_type(reply):
            return reply
        keys = keys_of(command)
        types = self._exchange([("TYPE", key) for key in keys])
        found = [(key, type_.decode(), type_of(key)) for key, type_ in zip(keys, types, strict=True)]
        return ResponseError(f"WRONGTYPE {wrong_types(found)}")


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _is_unknown_script(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and code_of(reply) == "NOSCRIPT"


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

    def __init__(self, address: RedisAddress, name: str) -> None:
        self._link = Link(address)
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
        return call(self._link)

    def _twice(self, call: Callable[[Link], T]) -> T:
        was_connected = self._link.is_connected
        try:
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
