"""What an operator should know about the server, each problem with its cure. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from onward.brokers.base import Finding
from onward.brokers.rabbitmq import names
from onward.brokers.rabbitmq.operate import known_problems, policies
from onward.brokers.rabbitmq.operate.queue_troubles import QueueTrouble, combined
from onward.brokers.rabbitmq.operate.routing import RouteMap
from onward.brokers.rabbitmq.operate.server_facts import ExpectedQueue, ManagedFacts, NodeFacts, QueueFacts, RabbitFacts
from onward.brokers.rabbitmq.operate.topology import DEFAULT_EXCHANGE, WITHOUT_KEYS
from onward.brokers.rabbitmq.registry.registry_log import CURE_WHEN_DELETED
from onward.brokers.rabbitmq.registry.topic_objects import cure_of_a_deleted_stream
from onward.brokers.rabbitmq.server_errors import APPLY
from onward.settings import Settings

_FULL = 0.8  # of the file descriptors: time to act
_MOST_PARTITIONS = 1_000  # streams on which Onward was measured
_RUNNING = ("running", "idle", "flow", "syncing")
_START = 'start a member of the group: it declares the queue again; see "When something fails" in docs/rabbitmq.md'


def findings(facts: RabbitFacts, settings: Settings) -> list[Finding]:
    found = [*_server(facts), *_times(facts, settings), *_missing(facts), *_partitions(facts)]
    if facts.managed is None:
        return [*found, _unmanaged(facts)]
    found += [each for node in facts.managed.nodes for each in _node(node)]
    found += _flags(facts.managed)
    return [*found, *combined(_queues(facts, facts.managed)), *_dead_letters(facts.managed)]


def _server(facts: RabbitFacts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.version))
    nodes = "" if facts.nodes is None else f", {facts.nodes} {'node' if facts.nodes == 1 else 'nodes'}"
    yield Finding("ok", f"RabbitMQ {version} at {facts.place} answers{nodes}")
    yield from known_problems.problems(facts.version, facts.nodes)
    if facts.blocked is not None:
        yield Finding("error", f"the server blocks publishers: {facts.blocked}", "free memory or disk at the server")
    if facts.nodes == 1:
        yield Finding("ok", "1 node: a power cut may lose the last events, and a lost disk loses them all")
    elif facts.nodes == 2:
        yield Finding("warning", "2 nodes: when one is down, no queue accepts messages", "run 3 nodes")


def _times(facts: RabbitFacts, settings: Settings) -> Iterator[Finding]:
    if facts.heartbeat_s > settings.lease_s:
        yield Finding(
            "warning",
            f"client heartbeat_s={facts.heartbeat_s:g} is longer than lease_s={settings.lease_s:g}: the server notices "
            f"a frozen member only after up to {3 * facts.heartbeat_s:g} s",
            "lower heartbeat_s; the default is 5",
        )


def _missing(facts: RabbitFacts) -> Iterator[Finding]:
    expected = {each.name: each for each in facts.expected}
    if _is_unused(facts):
        yield Finding(
            "ok", f"there is no topic and no group: stream {names.REGISTRY}, which lists them, does not exist"
        )
        return
    missing = [expected[name] for name in facts.missing]
    yield from combined(map(_missing_queue, missing))
    count = sum(each.is_created for each in facts.expected)
    for text in facts.taken.values():
        what, _, cure = text.rpartition("; ")
        yield Finding("error", what or text, cure if what else "delete it at the server, or use another name")
    if count and not missing and not facts.taken:
        only = "the list of topics and groups exists; no queue of a topic or group is expected yet"
        yield Finding("ok", only if count == 1 else f"all {count:,} queues of topics and groups exist")


def _is_unused(facts: RabbitFacts) -> bool:
    """The list of topics and groups is created with the first of them. If it was deleted later, there are queues."""
    queues = () if facts.managed is None else facts.managed.queues
    return names.REGISTRY in facts.missing and not any(map(names.is_ours, queues))


def _missing_queue(queue: ExpectedQueue) -> QueueTrouble:
    before = f"missing ({queue.what}):"
    if not queue.is_declared:
        return QueueTrouble("error", before, queue.name, "", _cure_of_missing(queue))
    cure = f"if it was deleted, its messages are lost; {APPLY}, or start a member with auto_declare"
    return QueueTrouble("warning", before, queue.name, "", cure)


def _cure_of_missing(queue: ExpectedQueue) -> str:
    if queue.topic:
        return f"it was deleted with all its events; {cure_of_a_deleted_stream(queue.topic)}"
    return CURE_WHEN_DELETED if queue.role == "record" else f"{_START} for what runs again and what is lost"


def _partitions(facts: RabbitFacts) -> Iterator[Finding]:
    roles = Counter(each.role for each in facts.expected)
    if roles["log"] > _MOST_PARTITIONS:
        yield Finding(
            "warning",
            f"{roles['log']:,} partitions: each needs file descriptors, memory, and two queues for each group",
            "use topics with fewer partitions",
        )


def _unmanaged(facts: RabbitFacts) -> Finding:
    what = f"policies, alarms of other nodes, replicas and dead-letter routes were not checked: {facts.unmanaged}"
    return Finding("warning", what, facts.unmanaged_cure)


# -- with the management API ----------------------------------------------------------------------------------------


def _node(node: NodeFacts) -> Iterator[Finding]:
    if not node.is_running:
        yield Finding("error", f"node {node.name} is down", "start it, or remove it from the cluster")
        return
    for alarm in node.alarms:
        cure = "free it, or raise the limit; until then nothing can be published"
        yield Finding("error", f"node {node.name} has a {alarm} alarm", cure)
    if node.partitions:
        others = ", ".join(node.partitions)
        yield Finding("error", f"node {node.name} cannot reach {others}", "repair the network between the nodes")
    if node.descriptors is not None and node.descriptors[0] >= _FULL * node.descriptors[1]:
        used, most = node.descriptors
        what = f"node {node.name} uses {used:,} of {most:,} file descriptors"
        yield Finding("warning", what, "raise its limit (ulimit -n, or LimitNOFILE of its service)")


def _flags(managed: ManagedFacts) -> Iterator[Finding]:
    for name in ("quorum_queue", "stream_queue"):
        if managed.flags.get(name, "enabled") != "enabled":
            what = f"feature flag {name} is off, so the server has no such queues"
            yield Finding("error", what, f"rabbitmqctl enable_feature_flag {name}, on one node")


def _queues(facts: RabbitFacts, managed: ManagedFacts) -> Iterator[QueueTrouble]:
    """Of the queues that Onward relies on."""
    expected = {each.name: each for each in facts.expected}
    keys: defaultdict[str, set[str]] = defaultdict(set)
    for binding in managed.bindings:
        keys[binding.queue].add(binding.key)
    for queue in managed.queues.values():
        known = expected.get(queue.name)
        role = known.role if known is not None else role_of(queue.name, queue.kind)
        if role is not None:
            yield from policies.harm(managed.policies, queue.name, queue.kind, role)
            yield from _queue(queue, role, len(managed.nodes))
        if known is not None:
            yield from _unrouted(known, keys[queue.name])
        if known is not None and queue.consumers < known.consumers:
            before = f"fewer consumers than declared ({queue.consumers} of {known.consumers}):"
            yield QueueTrouble("warning", before, queue.name, "", "start more members of its group")


def _unrouted(expected: ExpectedQueue, found: set[str]) -> Iterator[QueueTrouble]:
    """An exchange that routes nothing to a queue is silent about it, as long as it routes to another one."""
    if expected.keys is None or (found and found.issuperset(expected.keys)):
        return
    cure = "start a member of the group: it binds the queue again; publish what the group has missed"
    missing = " and ".join(expected.keys) if expected.keys else "any key"
    before = f"no binding with {missing}, so events are lost ({expected.what}):"
    yield QueueTrouble("error", before, expected.name, "", cure)


def role_of(name: str, kind: str) -> policies.Role | None:
    """The role of a queue of ours. None: it is not ours."""
    if not names.is_ours(name):
        return None
    if kind != "stream":
        return "rung" if ".rung." in name else "work"
    return "record" if name == names.REGISTRY or ".aside." in name else "log"


def _queue(queue: QueueFacts, role: policies.Role, nodes: int) -> Iterator[QueueTrouble]:
    if queue.state not in _RUNNING:
        cure = "start the nodes that have its replicas; if they all run, it is broken and must be deleted"
        yield QueueTrouble("error", f"in the state {queue.state}:", queue.name, "", cure)
    if down := sorted(set(queue.members) - set(queue.online)):
        before = f"no live replica on {', '.join(down)}:"
        yield QueueTrouble("warning", before, queue.name, "", "start these nodes")
    if nodes > 1 and queue.kind != "classic" and len(queue.members) == 1:
        tool = "rabbitmq-streams add_replica" if queue.kind == "stream" else "rabbitmq-queues grow"
        before = f"1 replica in a cluster of {nodes} nodes:"
        yield QueueTrouble("warning", before, queue.name, "", f"add replicas with {tool}")
    timeout_ms = queue.arguments.get("x-consumer-timeout")
    if role == "work" and timeout_ms is not None and timeout_ms < policies.LEAST_CONSUMER_TIMEOUT_MS:
        yield policies.short_timeout(f"x-consumer-timeout={timeout_ms} on", queue.name)


def _dead_letters(managed: ManagedFacts) -> Iterator[Finding]:
    """Of every queue of the virtual host, ours or not."""
    routes = RouteMap(managed.exchanges, managed.queues, managed.bindings)
    for queue in managed.queues.values():
        exchange, key, source = _dead_letter_route(queue, managed.policies)
        if exchange is None:
            continue
        if exchange != DEFAULT_EXCHANGE and not routes.knows(exchange):
            what = f"dead letters of queue {queue.name} are lost: exchange {exchange} does not exist ({source})"
            yield Finding("error", what, f"create exchange {exchange}, and bind a queue to it")
            continue
        keys = sorted(routes.keys(queue.name)) if key is None else [key]
        lost = [each for each in keys if not routes.targets(exchange, each)]
        if lost and exchange and managed.exchanges[exchange].kind in WITHOUT_KEYS:
            what = f"dead letters of queue {queue.name} are lost: exchange {exchange} routes them to no queue"
            yield Finding("error", what, f"bind a queue to {exchange}")
            continue
        for each in lost:
            name = f"exchange {exchange}" if exchange else "the default exchange"
            what = f"dead letters of queue {queue.name} with key {each} are lost: {name} routes them to no queue"
            yield Finding("error", what, f"bind a queue to {exchange}" if exchange else f"create queue {each}")


def _dead_letter_route(queue: QueueFacts, found: Sequence[policies.Policy]) -> tuple[str | None, str | None, str]:
    """The exchange, the key, and where they are set. Arguments win over policies."""
    table = queue.arguments
    if "x-dead-letter-exchange" in table:
        return table["x-dead-letter-exchange"], table.get("x-dead-letter-routing-key"), "its argument"
    for policy in policies.applied(found, queue.name, queue.kind):
        if "dead-letter-exchange" in policy.definition:
            definition = policy.definition
            return definition["dead-letter-exchange"], definition.get("dead-letter-routing-key"), str(policy)
    return None, None, ""
