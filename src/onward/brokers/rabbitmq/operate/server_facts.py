"""What the server says of itself and its objects, for `onward doctor`."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from onward.brokers.rabbitmq.address import RabbitAddress
from onward.brokers.rabbitmq.amqp import Channel, Connection
from onward.brokers.rabbitmq.operate.management import ManagementApi, ManagementError
from onward.brokers.rabbitmq.operate.policies import Policy, Role
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel
from onward.brokers.rabbitmq.operate.routing import ExchangeRoute
from onward.brokers.rabbitmq.operate.topology import Binding
from onward.brokers.rabbitmq.server_errors import DIFFERS, explained

_COLUMNS = (
    *("name", "type", "durable", "exclusive", "arguments", "state"),
    *("messages_ready", "consumers", "members", "online", "policy", "operator_policy"),
)
_UNSET = "the client setting management_url is not set"
_SET_IT = "turn on the management plugin, and set client.management_url=http://host:15672"


class ExpectedQueue(NamedTuple):
    """A queue that Onward or the application relies on. `what`: whose it is, such as "a partition of topic orders"."""

    name: str
    role: Role
    what: str
    consumers: int = 0  # how many it should have at least
    is_created: bool = True  # False: nothing relies on it yet, and the application creates it when it starts
    is_declared: bool = False  # by the application. Onward does not create it for the group that consumes it
    keys: tuple[str, ...] | None = None  # of its bindings; empty: any binding; None: it needs none
    topic: str = ""  # of which it is a partition
    arguments: Mapping[str, Any] | None = None  # with which Onward declares it; None: they are not compared here


class NodeFacts(NamedTuple):
    name: str
    is_running: bool
    alarms: Sequence[str]
    partitions: Sequence[str]  # the nodes that it cannot reach
    descriptors: tuple[int, int] | None  # used, and the limit; None: the version does not report it

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "NodeFacts":
        alarms = [text for name, text in (("mem_alarm", "memory"), ("disk_free_alarm", "disk")) if found.get(name)]
        used, most = found.get("fd_used"), found.get("fd_total")
        counts = (used, most) if isinstance(used, int) and isinstance(most, int) and used >= 0 and most > 0 else None
        return cls(found["name"], bool(found.get("running")), alarms, found.get("partitions") or (), counts)


class QueueFacts(NamedTuple):
    name: str
    kind: str
    durable: bool
    arguments: Mapping[str, Any]
    state: str
    consumers: int
    members: Sequence[str]  # the nodes with a replica
    online: Sequence[str]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "QueueFacts":
        arguments = dict(found.get("arguments") or {})
        kind = found.get("type") or arguments.get("x-queue-type", "classic")
        return cls(
            found["name"],
            kind,
            bool(found.get("durable", True)),
            arguments,
            found.get("state") or "running",
            found.get("consumers") or 0,
            found.get("members") or (),
            found.get("online") or (),
        )


class ManagedFacts(NamedTuple):
    """What only the management API knows."""

    nodes: Sequence[NodeFacts]
    queues: Mapping[str, QueueFacts]
    exchanges: Mapping[str, ExchangeRoute]
    bindings: Sequence[Binding]
    policies: Sequence[Policy]
    flags: Mapping[str, str]  # the state of each feature flag


class RabbitFacts(NamedTuple):
    place: str  # the address without secrets
    version: tuple[int, ...]
    blocked: str | None
    heartbeat_s: float
    nodes: int | None  # how many the cluster has; None: unknown
    expected: Sequence[ExpectedQueue]
    missing: Sequence[str]  # of the expected queues
    managed: ManagedFacts | None
    unmanaged: str  # why there is no `managed`
    unmanaged_cure: str = ""
    taken: Mapping[str, str] = {}  # by expected queue that another program has declared: how it differs


async def gathered(
    connection: Connection,
    address: RabbitAddress,
    expected: Sequence[ExpectedQueue],
    management: ManagementApi | None,
) -> RabbitFacts:
    """Raises BrokerError or AmqpError if the server does not answer."""
    managed, unmanaged = None, (_UNSET, _SET_IT)
    if management is not None:
        try:
            managed, unmanaged = await _managed(management), ("", "")
        except ManagementError as error:
            unmanaged = _why_and_cure(str(error))
    probe = ProbeChannel(connection)
    try:
        missing = [each.name for each in expected if each.is_created and not await probe.has_queue(each.name)]
        taken = await _taken(probe, [each for each in expected if each.name not in missing])
    finally:
        await probe.close()
    return RabbitFacts(
        address.name,
        connection.version,
        connection.blocked,
        address.client.heartbeat_s,
        address.client.cluster_nodes if managed is None else len(managed.nodes),
        expected,
        missing,
        managed,
        *unmanaged,
        taken=taken,
    )


async def _taken(probe: ProbeChannel, existing: Iterable[ExpectedQueue]) -> dict[str, str]:
    """The server compares an existing queue only when it is asked to declare it again. A user who may not do that gets
    no comparison."""
    found: dict[str, str] = {}
    for each in existing:
        if each.arguments is None:
            continue
        again = functools.partial(Channel.declare_queue, name=each.name, arguments=each.arguments)
        refusal = await probe.refusal(again)
        if refusal is not None and refusal.code == DIFFERS:
            found[each.name] = explained(refusal, f"queue {each.name}")
    return found


def _why_and_cure(text: str) -> tuple[str, str]:
    """The two parts of an error of the management API, which ends with its cure."""
    why, _, cure = text.rpartition("; ")
    return (why, cure) if why else (text, "check client.management_url, or remove it")


async def _managed(management: ManagementApi) -> ManagedFacts:
    exchanges = {
        name: ExchangeRoute(each["type"], each["arguments"].get("alternate-exchange"))
        for name, each in (await management.exchanges()).items()
    }
    policies = [
        *_policies(await management.policies(), is_operators=False),
        *_policies(await management.operator_policies(), is_operators=True),
    ]
    return ManagedFacts(
        [NodeFacts.of(each) for each in await management.nodes()],
        {each["name"]: QueueFacts.of(each) for each in await management.queues(_COLUMNS)},
        exchanges,
        await management.bindings(),
        policies,
        await management.feature_flags(),
    )


def _policies(found: Iterable[Mapping[str, Any]], *, is_operators: bool) -> list[Policy]:
    return [Policy.of(each, is_operators=is_operators) for each in found]
