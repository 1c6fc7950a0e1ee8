"""Versions of RabbitMQ with problems that matter to Onward, from the release notes of RabbitMQ. Pure."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from onward.brokers.base import Finding

Version = tuple[int, ...]
TESTED = ((3, 10), (4, 3))  # the oldest and the newest series


class KnownProblem(NamedTuple):
    """`fixed`: the first version without it. `clusters_only`: it needs several nodes."""

    since: Version
    fixed: Version
    level: Literal["warning", "error"]
    what: str
    clusters_only: bool = False


PROBLEMS = (
    KnownProblem(
        (0,),
        (3, 10),
        "error",
        "its quorum queues have no TTL and may lose dead letters, so work queues cannot store retries",
    ),
    KnownProblem((3, 10), (3, 10, 5), "warning", "a quorum queue can fail when it dead-letters a message"),
    KnownProblem((3, 12), (3, 12, 6), "warning", "consumers of a quorum queue can stop getting messages (#9158)"),
    KnownProblem(
        (3, 8),
        (4, 0, 7),
        "warning",
        "the replicas of a quorum queue can diverge, which can lose messages (#13326)",
        clusters_only=True,
    ),
    KnownProblem(
        (4, 3),
        (4, 3, 3),
        "warning",
        "a quorum queue can confirm what too few replicas have (ra #637), and its dead letters can get stuck (#16652)",
        clusters_only=True,
    ),
)


def problems(version: Version, nodes: int | None) -> Iterator[Finding]:
    """`nodes`: how many the cluster has. None: unknown."""
    name = ".".join(map(str, version)) or "of an unknown version"
    for each in PROBLEMS:
        if each.since <= version < each.fixed and not (each.clusters_only and nodes == 1):
            where = "in a cluster, " if each.clusters_only and nodes is None else ""
            fixed = ".".join(map(str, each.fixed))
            yield Finding(each.level, f"RabbitMQ {name}: {where}{each.what}", f"upgrade to {fixed} or later")
    if version and not TESTED[0] <= version[:2] <= TESTED[1]:
        series = " to ".join(".".join(map(str, each)) for each in TESTED)
        yield Finding("warning", f"RabbitMQ {name}: Onward is tested with {series}", "test your application with it")
