"""Connects to one of the hosts of an address, and explains why it cannot."""

import asyncio
import itertools
import logging
import random
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from onward import clock
from onward.brokers.rabbitmq.address import RabbitAddress
from onward.brokers.rabbitmq.amqp import AmqpError, ConnectFailed, Connection, LoginRefused
from onward.brokers.rabbitmq.hosts import HostOrder
from onward.brokers.rabbitmq.server_errors import is_interrupted, is_starting
from onward.errors import BadSetting, BrokerError

T = TypeVar("T")
log = logging.getLogger("onward")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_LEAST_SHARE_S = 0.5  # for one host
_AGAIN_S = 5.0
_ANSWER_S = 30.0
_UNIQUE = re.compile(r"[0-9a-f]{32}|channel \d+")
_OLDEST = (3, 9)  # the first version with streams


async def connected(
    address: RabbitAddress, *, name: str, patience_s: float, hosts: HostOrder | None = None
) -> Connection:
    """A connection to the first host that answers, tried again for `patience_s`. `hosts`: in which order to try them.

    Raises BrokerError with the cause and the cure, at once if the server refuses the login."""
    hosts = HostOrder(address.hosts) if hosts is None else hosts
    end = clock.now() + patience_s
    for pause_s in pauses():
        try:
            return await _to_any(address, hosts, name=name, within_s=end - clock.now())
        except ConnectFailed as error:
            if isinstance(error, LoginRefused) or clock.now() + pause_s >= end:
                raise BrokerError(_cured(address, error)) from error
        await asyncio.sleep(pause_s)
    raise AssertionError("pauses never end")


async def connected_at_last(
    address: RabbitAddress, *, name: str, hosts: HostOrder, report: Callable[[str], None]
) -> Connection:
    """A connection, tried for ever. A problem that lasts is logged, and reported when it changes."""
    problem = ""
    within_s = address.client.connect_timeout_s * len(hosts)
    for pause_s in pauses():
        try:
            return await _to_any(address, hosts, name=name, within_s=within_s)
        except (ConnectFailed, BrokerError) as error:
            why = _cured(address, error) if isinstance(error, ConnectFailed) else str(error)
            if problem != why:
                problem = why
                log.warning("%s; trying again until it succeeds (%s)", problem, name)
                report(problem)
        await asyncio.sleep(pause_s)
    raise AssertionError("pauses never end")


async def reconnecting(work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which must be harmless to repeat and ask for its connection itself. If that connection ends
    meanwhile, or it uses a queue that is just starting, it is done again for some seconds. Raises BrokerError if it
    takes too long."""
    end = clock.now() + _AGAIN_S
    for pause_s in pauses():
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await work()
        except TimeoutError as error:
            raise BrokerError(
                f"RabbitMQ did not answer in {_ANSWER_S:g} s; does it have a memory or disk alarm? Then it answers "
                "nothing to a client that has sent messages: free memory or disk there"
            ) from error
        except (AmqpError, BrokerError) as error:
            if not (is_interrupted(error) or is_starting(error)) or clock.now() + pause_s >= end:
                raise
        await asyncio.sleep(pause_s)
    raise AssertionError("pauses never end")


class LoggedCauses:
    """Logs each cause once. Unique names in the text, such as those of temporary queues, make no other cause."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def report(self, text: str) -> None:
        cause = _UNIQUE.sub("", text)
        if cause not in self._known:
            self._known.add(cause)
            log.warning("%s", text)

    def clear(self) -> None:
        """It was well in between, so the next problem is a new one."""
        self._known.clear()


def pauses() -> Iterator[float]:
    """How long to wait before each further attempt: ever longer, and random, so that many clients do not come at
    once."""
    for attempt in itertools.count():
        yield random.uniform(0.5, 1.0) * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 10))


async def _to_any(address: RabbitAddress, hosts: HostOrder, *, name: str, within_s: float) -> Connection:
    """The hosts share the time, so that one that is silent leaves some to the next one."""
    end = clock.now() + within_s
    failures: list[ConnectFailed] = []
    for left, host in zip(range(len(hosts), 0, -1), hosts, strict=True):
        share_s = max(_LEAST_SHARE_S, (end - clock.now()) / left)
        try:
            connection = await Connection.open(
                host.name,
                host.port,
                vhost=address.vhost,
                user=address.user,
                password=address.password,
                ssl=_context(address),
                heartbeat_s=address.client.heartbeat_s,
                timeout_s=min(address.client.connect_timeout_s, share_s),
                name=name,
            )
        except ConnectFailed as error:
            failures.append(error)
            hosts.put_last(host)
            continue
        if reason := _unusable(connection):
            await connection.close()
            raise BrokerError(f"RabbitMQ at {host}: {reason}")
        hosts.watch(connection, host)
        return connection
    refused = [failure for failure in failures if isinstance(failure, LoginRefused)]
    raise refused[0] if refused else ConnectFailed("; ".join(failure.why for failure in failures))


def _unusable(connection: Connection) -> str:
    version = connection.version
    if connection.product == "RabbitMQ" and version and version < _OLDEST:
        return (
            f"version {'.'.join(map(str, version))} has no streams, in which Onward stores events; "
            f"upgrade it to {'.'.join(map(str, _OLDEST))} or later"
        )
    return ""


def _context(address: RabbitAddress) -> ssl.SSLContext | None:
    """BadSetting: a file of the settings cannot be used."""
    if not address.is_encrypted:
        return None
    client = address.client
    try:
        context = ssl.create_default_context(cafile=client.cafile)
        if client.certfile:
            context.load_cert_chain(client.certfile, client.keyfile)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(each for each in (client.cafile, client.certfile, client.keyfile) if each)
        raise BadSetting(f"client cafile, certfile, keyfile ({files}) cannot be used: {error}") from error
    if not client.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _cured(address: RabbitAddress, error: ConnectFailed) -> str:
    cure = _login_cure(address, error.why) if isinstance(error, LoginRefused) else _cure(address)
    return f"RabbitMQ at {address.name}: {error.why}; {cure}"


def _login_cure(address: RabbitAddress, why: str) -> str:
    vhost, user = address.vhost, address.user
    if "vhost" not in why:
        return f"correct the user ({user}) and the password in the URL"
    if "not found" in why:
        return f"create it with `rabbitmqctl add_vhost {vhost}`, or correct the path of the URL"
    ours = r"^onward\..*"
    command = rf"rabbitmqctl set_permissions -p {vhost} {user} '{ours}' '{ours}|amq\.default' '{ours}'"
    return f"allow it with `{command}`, and add the names of your own exchanges and queues, or use another user"


def _cure(address: RabbitAddress) -> str:
    other = "amqp://, if the server has no TLS on this port" if address.is_encrypted else "amqps://, if it wants TLS"
    return f"start RabbitMQ, or correct host and port in the URL (and write {other})"
