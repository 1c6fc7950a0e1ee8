"""Partition counts: which count a process expects, and what is refused. Pure."""

from collections.abc import Callable, Sequence

from onward.brokers.base import Change, TopicSpec, Topology
from onward.errors import BadSetting, BrokerError, PartitionsDiffer
from onward.settings import Settings, check_name

DEFAULT_PARTITIONS = 8


class TopicRules:
    """The partition counts that one process has declared or has as a setting, and the checks that follow from them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._declared: dict[str, int] = {}

    def insisted(self, name: str) -> int | None:
        """The count that this process requires. None if it accepts any stored count."""
        return self._declared.get(name, self._settings.partitions)

    def for_new(self, name: str) -> int:
        """The count for a topic that is created on first use. Raises BrokerError if it may not be created."""
        check_name("topic", name)
        if not self._settings.auto_declare:
            raise BrokerError(
                f"topic {name} does not exist and auto_declare is off; create it with `onward topology apply --app "
                "MODULE:APP`, or turn auto_declare on"
            )
        return self.insisted(name) or DEFAULT_PARTITIONS

    def check(self, name: str, stored: int, known: int | None = None, *, added: int = 0) -> None:
        """Raise PartitionsDiffer if the stored count is not the one that this process requires or has used before
        (`known`). With another count, keys would change their partitions. `added`: further partitions of the topic,
        which are not in `stored`."""
        wanted = self.insisted(name) or known or stored
        if stored != wanted:
            raise PartitionsDiffer(_differs(name, stored, wanted, added))

    def plan(
        self, topology: Topology, count: Callable[[str], int | None], create: Callable[[TopicSpec], object] | None
    ) -> list[Change]:
        """The differences from the topology. `count` returns a topic's stored count, or None if the topic does not
        exist. `create` creates a topic; if it is None, nothing is created."""
        changes = []
        for spec in _topics(topology):
            stored = count(spec.name)
            if stored is None:
                detail = f"create topic {spec.name} with {spec.partitions} partitions"
                changes.append(Change(f"topic {spec.name}", "create", detail))
                if create is None:
                    continue
                create(spec)
            elif stored != spec.partitions:
                changes.append(Change(f"topic {spec.name}", "refuse", _differs(spec.name, stored, spec.partitions)))
                continue
            self._declared[spec.name] = spec.partitions
        return changes


def _topics(topology: Topology) -> Sequence[TopicSpec]:
    for own in topology.own:
        raise BadSetting(f"{own!r}: this broker has topics only; use a broker that has such objects, or remove it")
    for spec in topology.topics:
        check_name("topic", spec.name)
        if spec.partitions < 1:
            raise BadSetting(f"topic {spec.name}: {spec.partitions} partitions; use at least 1")
    return topology.topics


def _differs(name: str, stored: int, wanted: int, added: int = 0) -> str:
    more = f", and {added} more that hold no keys" if added else ""
    return (
        f"topic {name} has {stored} partitions{more}, this process expects {wanted}; keys would change their "
        f"partitions and lose their order. Set partitions={stored} here, or use a new topic"
    )
