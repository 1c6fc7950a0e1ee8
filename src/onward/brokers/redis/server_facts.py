"""What a server says of itself, and whether it can be used. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from onward.brokers.base import Durability, Finding

OLDEST = (6, 2)
_REPLICA = re.compile(r"slave\d+")
INFO = ("server", "replication", "persistence", "memory")  # the sections that are read


class ServerFacts(NamedTuple):
    version: str
    incarnation: str  # changes with every restart and fail-over
    is_master: bool
    is_loading: bool
    durability: Durability
    eviction: str  # maxmemory-policy
    max_memory: int
    replicas: int  # that are connected and up to date
    is_cluster: bool
    may_fail_over: bool = False  # as far as we know

    @classmethod
    def of(cls, sections: Sequence[bytes], config: Mapping[str, str]) -> "ServerFacts":
        """`config`: what CONFIG GET says, as far as it may be asked."""
        info = info_of(sections)
        run_id, replication_id = info.get("run_id", ""), info.get("master_replid", "")
        return cls(
            version=info.get("redis_version", ""),
            incarnation=f"{run_id[:12]}{replication_id[:12]}" if run_id and replication_id else "",
            is_master=info.get("role") == "master",
            is_loading=info.get("loading") == "1",
            durability=_durability(info, config),
            eviction=info.get("maxmemory_policy", "noeviction"),
            max_memory=int(info.get("maxmemory", "0")),
            replicas=sum("state=online" in value for name, value in info.items() if _REPLICA.fullmatch(name)),
            is_cluster=info.get("redis_mode") == "cluster",
        )

    def promising(self, replication: int, *, fails_over: bool) -> "ServerFacts":
        """With the durability that publish can promise. A server that a replica may replace loses what the replica does
        not have, whatever is on its own disk."""
        if replication > 1:
            return self._replace(durability="replicated")
        if not (fails_over or self.replicas):
            return self
        durability: Durability = "window" if self.durability == "fsync" else self.durability
        return self._replace(durability=durability, may_fail_over=True)

    @property
    def evicts(self) -> bool:
        return self.max_memory > 0 and self.eviction not in ("noeviction", "")

    def risk(self) -> str:
        """Why it may lose events. It is refused at start; one that begins later is used on, because otherwise nothing
        could be finished."""
        if not self.evicts:
            return ""
        return f"maxmemory-policy {self.eviction} deletes events when memory is full; set maxmemory-policy noeviction"

    def obstacle(self) -> str:
        """Why it cannot be used; empty: it can."""
        if not self.incarnation:
            return "it hides its run id, so that a restart could go unnoticed; connect to the server, not to a proxy"
        if not self.is_master:
            return "it is a read-only replica; connect to its master"
        if _numbers(self.version) < OLDEST:
            return f"it is version {self.version}; use 6.2 or newer"
        return ""

    def findings(self) -> Iterator[Finding]:
        yield Finding("ok", f"Redis {self.version} answers, and is a master")
        if self.durability == "fsync":
            yield Finding("ok", "durability fsync: what publish accepted survives a power cut")
        elif self.durability == "replicated":
            yield Finding("ok", "durability replicated: what publish accepted survives the loss of the master")
        elif self.durability == "window" and self.may_fail_over:
            cure = "set replication=2 where no event may be lost"
            yield Finding("warning", "durability window: a crash or a fail-over may lose the last moments", cure)
        elif self.durability == "window":
            cure = "set appendfsync always where no event may be lost"
            yield Finding("warning", "durability window: a crash may lose the last second", cure)
        else:
            cure = "set appendonly yes, with appendfsync everysec or always"
            yield Finding("warning", "durability memory: a restart loses events, the append-only file is off", cure)


_RANKS: Mapping[Durability, int] = {"memory": 0, "window": 1, "replicated": 2, "fsync": 3}


def is_weaker(durability: Durability, wanted: Durability | None) -> bool:
    return wanted is not None and _RANKS[durability] < _RANKS[wanted]


def weakest(facts: Sequence[ServerFacts]) -> ServerFacts:
    """Of the masters of a cluster: the first one, with the lowest durability and the fewest replicas of all."""
    promised = [each.promising(1, fails_over=False).durability for each in facts]
    durability = min(promised, key=_RANKS.__getitem__)
    return facts[0]._replace(durability=durability, replicas=min(each.replicas for each in facts))


def _durability(info: Mapping[str, str], config: Mapping[str, str]) -> Durability:
    if info.get("aof_enabled") != "1":
        return "memory"
    return "fsync" if config.get("appendfsync") == "always" else "window"


def info_of(sections: Sequence[bytes]) -> dict[str, str]:
    """What INFO answered, by name."""
    return dict(_pairs(b"\n".join(sections).decode()))


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name, value.strip()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
