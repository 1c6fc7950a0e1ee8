"""Findings about a cluster for its operator, each problem with its cure. Pure."""

from collections.abc import Iterator, Sequence

from onward.brokers.base import Finding
from onward.brokers.kafka.aside_topics import FAILURE_BYTES, groups_of, topic_name
from onward.brokers.kafka.cluster_facts import ClusterFacts, Config, TopicFacts
from onward.brokers.kafka.key_counts import FOR_EVER
from onward.brokers.kafka.placement import unused
from onward.brokers.kafka.start_points import ACCEPT_GROWTH, grown
from onward.brokers.kafka.topics import COUNTS_TOPIC, asked_retention_s, is_internal
from onward.settings import Settings

_DAY_S = 86_400.0


def diagnose(facts: ClusterFacts, settings: Settings) -> list[Finding]:
    """The cluster first, then Onward's own topic, each topic with its asides, and the groups."""
    by_name = {topic.name: topic for topic in facts.topics}
    found = [*_cluster(facts), *_offsets_retention(facts.config, settings)]
    if COUNTS_TOPIC in by_name:
        found += _counts_topic(by_name[COUNTS_TOPIC], facts.brokers)
    for topic in facts.topics:
        if not is_internal(topic.name):
            found += _judged(topic, list(_topic(topic, facts, settings)))
            for group in groups_of(topic.name, by_name):
                found += _aside(by_name[topic_name(group, topic.name)], topic, settings)
    return [*found, *_groups(facts, settings)]


def _cluster(facts: ClusterFacts) -> Iterator[Finding]:
    version = (facts.config or {}).get("inter.broker.protocol.version")
    brokers = _count(facts.brokers, "broker")
    yield Finding("ok", f"Kafka at {facts.servers} answers: {brokers}{f', version {version}' if version else ''}")
    if facts.brokers == 1:
        yield Finding(
            "warning",
            "1 broker: no event is replicated, so a lost disk loses them all",
            "run at least 3 brokers, and set replication=3 before topics are created",
        )
    if facts.config is None:
        yield Finding(
            "warning",
            "the brokers' settings cannot be read, so offsets.retention.minutes was not checked",
            "allow this user DescribeConfigs on the cluster",
        )


def _offsets_retention(config: Config | None, settings: Settings) -> Iterator[Finding]:
    minutes = (config or {}).get("offsets.retention.minutes")
    if minutes is None:
        return
    kept_s, events_s = int(minutes) * 60.0, asked_retention_s(settings)
    if kept_s < events_s:
        yield Finding(
            "warning",
            f"offsets.retention.minutes={minutes}: the cluster forgets the progress of a group that is stopped for "
            f"{_time(kept_s)}, while events are kept for {_time(events_s)}; such a group starts as a new one",
            f"set offsets.retention.minutes={int(events_s // 60)} or more on the brokers",
        )
    else:
        yield Finding("ok", f"the progress of a stopped group is kept for {_time(kept_s)}")


def _counts_topic(topic: TopicFacts, brokers: int) -> Iterator[Finding]:
    yield from _replication(topic, brokers)
    config = topic.config or {}
    for name, value in FOR_EVER.items():
        if (found := config.get(name, value)) != value:
            yield Finding(
                "error",
                f"topic {topic.name}: {name}={found}, so it forgets how many partitions the keys of a topic use. The "
                "keys of a topic that has grown then move to other partitions and lose their order",
                f"set {name}={value} on topic {topic.name}",
            )


def _judged(topic: TopicFacts, problems: Sequence[Finding]) -> Sequence[Finding]:
    if problems:
        return problems
    kept = _time(_retention_s(topic.config or {}))
    return [Finding("ok", f"topic {topic.name}: {_size(topic)}, events kept for {kept}")]


def _topic(topic: TopicFacts, facts: ClusterFacts, settings: Settings) -> Iterator[Finding]:
    name = f"topic {topic.name}"
    yield from _replication(topic, facts.brokers)
    if topic.key_partitions is not None and topic.key_partitions < topic.partitions:
        yield Finding(
            "warning",
            unused(topic.name, topic.partitions, topic.key_partitions),
            "leave it as it is; or empty the topic, delete and create it again, see More partitions in docs/kafka.md",
        )
    if topic.config is None:
        yield Finding("warning", f"{name}: its settings cannot be read", "allow this user DescribeConfigs on the topic")
        return
    yield from _in_sync(topic, int(topic.config.get("min.insync.replicas", "0")))
    if topic.config.get("unclean.leader.election.enable") == "true":
        yield Finding(
            "error",
            f"{name}: unclean.leader.election.enable=true, so a change of leader may lose accepted events",
            f"set unclean.leader.election.enable=false on {name}",
        )
    if "compact" in topic.config.get("cleanup.policy", ""):
        yield Finding(
            "warning",
            f"{name}: cleanup.policy has compact, so a key's earlier events are removed, handled or not",
            f"set cleanup.policy=delete on {name}",
        )
    yield from _retention(topic, topic.config, settings)


def _replication(topic: TopicFacts, brokers: int) -> Iterator[Finding]:
    name, replicas = f"topic {topic.name}", topic.replicas
    if replicas == 1 and brokers > 1:
        yield Finding(
            "warning",
            f"{name}: 1 replica on {brokers} brokers, so one lost broker loses its events",
            "add replicas with kafka-reassign-partitions.sh, and set replication=3 for new topics",
        )
    if topic.in_sync < replicas:
        yield Finding(
            "warning",
            f"{name}: only {topic.in_sync} of {replicas} replicas are in sync in some partition",
            "bring the missing broker back",
        )


def _in_sync(topic: TopicFacts, least: int) -> Iterator[Finding]:
    name, replicas = f"topic {topic.name}", topic.replicas
    if least > replicas:
        yield Finding(
            "error",
            f"{name}: min.insync.replicas={least}, but it has {replicas} replicas, so nothing can be published",
            f"set min.insync.replicas={max(1, replicas - 1)} on {name}, or add replicas",
        )
    elif replicas > 2 and least == 1:
        yield Finding(
            "warning",
            f"{name}: min.insync.replicas=1, so an accepted event may be on one broker only",
            f"set min.insync.replicas=2 on {name}",
        )
    elif 1 < replicas == least:
        yield Finding(
            "warning",
            f"{name}: min.insync.replicas={least} of {replicas} replicas, so publishing stops when one broker is down",
            f"add a replica, or set min.insync.replicas={least - 1} on {name}",
        )


def _retention(topic: TopicFacts, config: Config, settings: Settings) -> Iterator[Finding]:
    kept_s, asked_s = _retention_s(config), asked_retention_s(settings)
    if kept_s < asked_s:
        yield Finding(
            "warning",
            f"topic {topic.name}: events are kept for {_time(kept_s)}, this process asks for {_time(asked_s)}; events "
            "that a group has not handled by then are lost",
            f"set retention.ms={int(asked_s * 1000)} on topic {topic.name}, or lower retention_s here",
        )
    if (limit := config.get("retention.bytes", "-1")) != "-1":
        yield Finding(
            "warning",
            f"topic {topic.name}: retention.bytes={limit}, so a full partition removes events that were not handled",
            f"set retention.bytes=-1 on topic {topic.name}",
        )


def _aside(aside: TopicFacts, topic: TopicFacts, settings: Settings) -> Sequence[Finding]:
    problems = list(_aside_problems(aside, topic, settings))
    return problems or [Finding("ok", f"topic {aside.name}: compacted, {_size(aside)}")]


def _aside_problems(aside: TopicFacts, topic: TopicFacts, settings: Settings) -> Iterator[Finding]:
    name, config = f"topic {aside.name}", aside.config or {}
    if (policy := config.get("cleanup.policy", "compact")) != "compact":
        yield Finding(
            "error",
            f"{name}: cleanup.policy={policy}, so dead letters and waiting events are removed by age",
            f"set cleanup.policy=compact on {name}",
        )
    if aside.partitions < topic.partitions and not settings.auto_declare:
        yield Finding(
            "error",
            f"{name}: {aside.partitions} partitions, topic {topic.name} has {topic.partitions}; events of the other "
            "partitions cannot be set aside",
            f"kafka-topics.sh --alter --topic {aside.name} --partitions {topic.partitions}",
        )
    needed = settings.max_event_bytes + FAILURE_BYTES
    if int(size := config.get("max.message.bytes", str(needed))) < needed:
        yield Finding(
            "warning",
            f"{name}: max.message.bytes={size}, so large events cannot be set aside",
            f"set max.message.bytes={needed} on {name}",
        )


def _groups(facts: ClusterFacts, settings: Settings) -> Iterator[Finding]:
    counts = {topic.name: topic.partitions for topic in facts.topics}
    for each in facts.groups:
        now = counts.get(each.topic, 0)
        if each.began_with < now and settings.on_partition_growth == "stop":
            yield Finding("warning", f"group {each.group}: {grown(each.topic, each.began_with, now)}", ACCEPT_GROWTH)


def _retention_s(config: Config) -> float:
    """Without a limit: infinite."""
    kept_ms = int(config.get("retention.ms", "-1"))
    return float("inf") if kept_ms < 0 else kept_ms / 1000


def _time(seconds: float) -> str:
    if seconds == float("inf"):
        return "ever"
    count, unit = (seconds / _DAY_S, "day") if seconds >= _DAY_S else (seconds / 3_600, "hour")
    return _count(round(count, 1), unit)


def _size(topic: TopicFacts) -> str:
    return f"{_count(topic.partitions, 'partition')}, {_count(topic.replicas, 'replica')}"


def _count(count: float, unit: str) -> str:
    return f"{count:.6g} {unit}{'' if count == 1 else 's'}"
