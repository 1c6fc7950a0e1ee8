"""The way to the nodes of a cluster: each command goes to the master of its key's slot.

A node that does not answer does not hold up the others: its commands get NoAnswer in place of a reply. redis-py's own
cluster client is not used, because it repeats commands whose answer was lost.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, ResponseError

from onward.brokers.redis.address import Host, RedisAddress
from onward.brokers.redis.link import (
    TIMEOUT_S,
    Link,
    LinkDown,
    NoAnswer,
    Pauses,
    ServerLink,
    is_unknown_script,
)
from onward.brokers.redis.scripts import Command, keys_of, with_text
from onward.brokers.redis.server_errors import explained, is_passing
from onward.brokers.redis.server_facts import ServerFacts, weakest

_SLOTS = 16_384
_HOPS = 5  # from node to node, of one command
_LEARN_S = 0.25  # between two looks at the map of slots while a node does not answer
_MAP_S = 1.0  # for the map of slots from a node that we are not connected to
_UNKNOWN = "not connected"  # the incarnation of no server
_KEYLESS = frozenset({"CLIENT", "TIME"})  # they go to any node
_READS = frozenset({"HMGET"})  # what is sent again when a command before it went to another node


def new_link(address: RedisAddress, timeout_s: float = TIMEOUT_S, key: str = "") -> Link:
    """`key`: on a cluster, connect only to the node that has it."""
    return ClusterLink(address, timeout_s, key) if address.kind == "cluster" else ServerLink(address, timeout_s)


class RoutedCall(NamedTuple):
    at: int  # its place in the call
    command: Command
    host: Host
    asking: bool = False  # the slot is on its way to this node


class ClusterNode:
    """A master, as one link sees it. After it has failed, it is connected to in the background."""

    def __init__(self, address: RedisAddress, timeout_s: float) -> None:
        self.link = ServerLink(address, timeout_s)
        self.trouble: LinkDown | None = None
        self._pauses = Pauses()
        self._attempt: threading.Timer | None = None

    @property
    def is_ready(self) -> bool:
        return self._attempt is None and self.link.is_connected

    @property
    def incarnation(self) -> str:
        return self.link.incarnation("") if self.is_ready else _UNKNOWN

    def prepare(self) -> None:
        """Connect, or look whether the background has."""
        if self._attempt is not None:
            if self._attempt.is_alive():
                return
            self._attempt = None
        if self.link.is_connected:
            self.trouble = None
            self._pauses.reset()
        elif self.trouble is None:
            self._connect()
        else:
            self._attempt = threading.Timer(self._pauses.next_s(), self._connect)
            self._attempt.daemon = True
            self._attempt.start()

    def failed(self, error: LinkDown) -> NoAnswer:
        """A connection that was cut is made again at once, a node that hangs is not waited for."""
        if error.hung:
            self.trouble = error
        return NoAnswer(str(error), sent=error.sent)

    def close(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None and attempt.is_alive():
            attempt.cancel()  # if it connects now, the connection ends with its last reference
            self.link = ServerLink(self.link.address)
        self.link.close()

    def _connect(self) -> None:
        try:
            self.link.connect()
        except LinkDown as error:
            self.trouble = error


class ClusterLink(Link):
    def __init__(self, address: RedisAddress, timeout_s: float = TIMEOUT_S, key: str = "") -> None:
        super().__init__(address)
        self._timeout_s = timeout_s
        self._key = key  # connect only to its node; empty: to all masters
        self._slots: list[Host | None] = []  # the master of each slot
        self._masters: frozenset[Host] = frozenset()
        self._nodes: dict[Host, ClusterNode] = {}
        self._learned = 0.0

    def call(self, *commands: Command, copies: int = 0) -> list[Any]:
        if not self._ready():  # otherwise slots stay at the nodes whose incarnations the commands have
            self.connect()
        replies: dict[int, Any] = {}
        calls = routed = list(self._routed(commands, replies))
        ends = {call.at: call.host for call in calls}  # where each command went last
        behind: dict[RoutedCall, None] = {}
        for _ in range(_HOPS):
            self._exchange(calls, replies)
            calls = [again for call in calls if (again := self._again(call, replies[call.at])) is not None]
            if not calls:
                break
            ends |= {call.at: call.host for call in calls}
            behind |= dict.fromkeys(_behind(routed, calls))
        self._exchange(list(behind), replies)
        if copies:
            self._confirm_copies(ends, replies, copies)
        if not self._ready():
            self._raise_down(replies)
        return [replies[at] for at in range(len(commands))]

    def connect(self) -> None:
        if not self._slots or (not self._is_complete() and time.monotonic() - self._learned > _LEARN_S):
            self._learn()
        for host in self._wanted():
            self._node(host).prepare()
        if not self._ready():
            errors = [node.trouble for node in self._nodes.values() if node.trouble is not None]
            why = "; ".join(dict.fromkeys(map(str, errors))) or f"Redis at {self.address.name} does not answer"
            self.trouble = why
            raise LinkDown(why, sent=False, final=bool(errors) and all(error.final for error in errors))

    def confirm(self) -> None:
        self.connect()

    @property
    def is_connected(self) -> bool:
        return any(node.is_ready for node in self._nodes.values())

    @property
    def risk(self) -> str:
        return "; ".join(filter(None, [node.link.risk for node in list(self._nodes.values())]))

    def incarnation(self, key: str) -> str:
        host = self._slots[_slot(key)] if self._slots else None
        return _UNKNOWN if host is None else self._node(host).incarnation

    def refresh(self) -> None:
        with suppress(LinkDown):
            self._learn()
        self.connect()
        for node in self._ready():
            try:
                node.link.refresh()
            except LinkDown as error:
                node.failed(error)

    def facts(self) -> ServerFacts:
        self.connect()
        for host in self._masters:
            node = self._node(host)
            if node.trouble is not None and node.trouble.final:
                raise node.trouble
        return weakest([node.link.facts() for node in self._ready()])

    def infos(self, sections: Sequence[str]) -> dict[str, Mapping[str, str]]:
        self.connect()
        return {node.link.address.name: node.link.infos(sections)[""] for node in self._ready()}

    def denied(self) -> list[str]:
        self.connect()
        return sorted({name for node in self._ready() for name in node.link.denied()})

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()
        self._nodes.clear()

    # -- nodes and slots --------------------------------------------------------------------------------------------

    def _ready(self) -> list[ClusterNode]:
        return [node for node in self._nodes.values() if node.is_ready]

    def _wanted(self) -> Iterable[Host]:
        if not self._key:
            return self._masters
        host = self._slots[_slot(self._key)]
        return () if host is None else (host,)

    def _is_complete(self) -> bool:
        return all(host in self._nodes and self._nodes[host].is_ready for host in self._wanted())

    def _node(self, host: Host) -> ClusterNode:
        node = self._nodes.get(host)
        if node is None:
            node = self._nodes[host] = ClusterNode(self.address.at(host), self._timeout_s)
        return node

    def _learn(self) -> None:
        """Which node has which slots, from the first one that answers. LinkDown: none does."""
        self._learned = time.monotonic()
        problems = []
        for host, node in self._sources():
            link = ServerLink(self.address.at(host), min(_MAP_S, self._timeout_s)) if node is None else node.link
            try:
                if node is None:
                    link.open()
                (reply,) = link.exchange([("CLUSTER", "SLOTS")])
                if isinstance(reply, ResponseError):
                    why = f"Redis at {link.address.name}: {explained(reply)}"
                    raise LinkDown(why, sent=False, final=not is_passing(reply))
                return self._know(reply, host)
            except LinkDown as error:
                problems.append(error)
                if node is not None:
                    node.failed(error)
            finally:
                if node is None:
                    link.close()
        self.trouble = "; ".join(map(str, problems))
        raise LinkDown(self.trouble, sent=False, final=all(error.final for error in problems))

    def _sources(self) -> list[tuple[Host, ClusterNode | None]]:
        """Nodes that we are connected to, then all others that are known."""
        connected = {host: node for host, node in self._nodes.items() if node.is_ready}
        return [*connected.items(), *((host, None) for host in list(self.address.hosts) if host not in connected)]

    def _know(self, reply: Sequence[Any], asked: Host) -> None:
        slots: list[Host | None] = [None] * _SLOTS
        for first, last, (name, port, *_), *_ in reply:
            host = (name or b"").decode(), int(port)
            slots[first : last + 1] = [_named(host, asked)] * (last + 1 - first)
        self._slots = slots
        self._masters = frozenset(host for host in slots if host is not None)
        self.address.hosts.update(dict.fromkeys(self._masters))
        for host in self._nodes.keys() - self._masters:
            self._nodes.pop(host).close()

    # -- calls ------------------------------------------------------------------------------------------------------

    def _routed(self, commands: Sequence[Command], replies: dict[int, Any]) -> Iterable[RoutedCall]:
        anywhere = next((host for host, node in self._nodes.items() if node.is_ready), None)
        for at, command in enumerate(commands):
            keys = () if command[0] in _KEYLESS else keys_of(command)
            host = self._slots[_slot(keys[0])] if keys else anywhere
            if host is None:
                replies[at] = NoAnswer(f"Redis at {self.address.name}: no node has the slot of {keys[0]}", sent=False)
            else:
                yield RoutedCall(at, command, host)

    def _exchange(self, calls: Sequence[RoutedCall], replies: dict[int, Any]) -> None:
        """Send to all nodes, then read from all."""
        by_host: dict[Host, list[RoutedCall]] = {}
        for call in calls:
            by_host.setdefault(call.host, []).append(call)
        sent: list[tuple[ClusterNode, list[RoutedCall]]] = []
        for host, mine in by_host.items():
            node = self._node(host)
            if not node.is_ready:
                node.prepare()
            try:
                self._send(node, mine)
                sent.append((node, mine))
            except LinkDown as error:
                replies.update(dict.fromkeys([call.at for call in mine], node.failed(error)))
        for node, mine in sent:
            self._receive(node, mine, replies)

    def _send(self, node: ClusterNode, calls: Sequence[RoutedCall]) -> None:
        if not node.is_ready:
            why = str(node.trouble or f"Redis at {node.link.address.name} does not answer")
            raise LinkDown(why, sent=False)
        if any(_UNKNOWN in call.command for call in calls):  # it has connected since the command was made
            raise LinkDown(f"Redis at {node.link.address.name} was not connected", sent=False)
        node.link.send([each for call in calls for each in _with_asking(call)])

    def _receive(self, node: ClusterNode, calls: Sequence[RoutedCall], replies: dict[int, Any]) -> None:
        try:
            answers = iter(node.link.receive(sum(1 + call.asking for call in calls)))
            found = [(next(answers) if call.asking else None, next(answers))[1] for call in calls]
            found = node.link.named([call.command for call in calls], found)
        except LinkDown as error:
            replies.update(dict.fromkeys([call.at for call in calls], node.failed(error)))
        else:
            replies.update(zip([call.at for call in calls], found, strict=True))

    def _confirm_copies(self, ends: Mapping[int, Host], replies: dict[int, Any], copies: int) -> None:
        for host in dict.fromkeys(ends.values()):
            places = [at for at, end in ends.items() if end == host]
            node = self._node(host)
            if not node.is_ready:
                continue  # it failed in this call
            try:
                found = node.link.confirmed([replies[at] for at in places], copies)
                replies.update(zip(places, found, strict=True))
            except LinkDown as error:
                replies.update(dict.fromkeys(places, node.failed(error)))

    def _again(self, call: RoutedCall, reply: Any) -> RoutedCall | None:
        """Where the command is sent next, if it was not carried out here."""
        if is_unknown_script(reply):
            return call._replace(command=with_text(call.command))
        if not isinstance(reply, AskError):
            return None
        host = _named((reply.host, reply.port), call.host)
        if not isinstance(reply, MovedError):
            return call._replace(host=host, asking=True)
        former, self._slots[reply.slot_id] = self._node(call.host).incarnation, host
        self._masters |= {host}
        self._node(host).prepare()
        return RoutedCall(call.at, _replaced(call.command, former, self._node(host).incarnation), host)

    def _raise_down(self, replies: dict[int, Any]) -> None:
        lost = [reply for reply in replies.values() if isinstance(reply, NoAnswer)]
        self.trouble = "; ".join(dict.fromkeys(map(str, lost)))
        raise LinkDown(self.trouble, sent=any(reply.sent for reply in lost))


def _slot(key: str) -> int:
    slot: int = key_slot(key.encode())
    return slot


def _named(host: Host, asked: Host) -> Host:
    """A node that has no name to announce is where we asked."""
    return host if host[0] not in ("", "?") else (asked[0], host[1])


def _with_asking(call: RoutedCall) -> list[Command]:
    return [("ASKING",), call.command] if call.asking else [call.command]


def _replaced(command: Command, former: str, incarnation: str) -> Command:
    """The slot is on another node for good: a fenced script needs its incarnation, which the node compares with what is
    stored."""
    return tuple(incarnation if value == former else value for value in command)


def _behind(routed: Sequence[RoutedCall], moved: Sequence[RoutedCall]) -> list[RoutedCall]:
    """Reads of the same slot that must come after a command that is sent again."""
    again = {call.at for call in moved}
    slots = {_slot(keys_of(call.command)[0]): call.at for call in reversed(moved)}
    return [
        call
        for call in routed
        if call.command[0] in _READS and call.at not in again and slots.get(_slot(call.command[1]), call.at) < call.at
    ]
