"""Real consumer groups in streams of other programs: who else uses them."""

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from onward.brokers.redis.foreign.scripts import CONSUMER
from onward.brokers.redis.link import Link


def other_consumers(link: Link, groups: Sequence[tuple[str, str]]) -> list[str]:
    """Consumers of others that have entries open in one of these groups, each in a stream."""
    replies = link.call(*[("XINFO", "CONSUMERS", *each) for each in groups]) if groups else []
    found = [_pairs(row) for rows in replies if not isinstance(rows, ResponseError) for row in rows]
    names = {row["name"].decode(errors="backslashreplace") for row in found if row["pending"]}
    return sorted(names - {CONSUMER})


def _pairs(row: Sequence[Any]) -> dict[str, Any]:
    return {name.decode(): value for name, value in zip(row[::2], row[1::2], strict=True)}
