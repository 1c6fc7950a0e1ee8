"""The tables of docs/settings.md, made from the settings and the brokers. `make docs` writes them."""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from msgspec import Meta

from onward.brokers import SCHEMES
from onward.brokers.core.topic_rules import DEFAULT_PARTITIONS
from onward.settings import Settings
from tests.examples import ROOT

PAGE = ROOT / "docs/settings.md"
GROUPS = {
    "broker": ["url", "app", "client", "durability", "file_mode", "debug"],
    "topics": [
        "partitions",
        "auto_declare",
        "on_partition_growth",
        "replication",
        "retention_s",
        "retention_bytes",
        "retention_events",
    ],
    "streams": ["streams", "reclaim_idle_s", "reclaim_every_s", "reclaim_batch"],
    "outbox": ["outbox_url", "outbox_relay", "outbox_max_age_s", "outbox_keep_s"],
    "publishing": ["max_event_bytes", "max_backlog_bytes", "max_outgoing_bytes", "publish_timeout_s"],
    "ownership": ["lease_s", "takeover_grace_s", "revoke_grace_s", "max_poll_gap_s", "drain_timeout_s"],
    "handling": ["max_in_flight", "max_in_flight_bytes", "max_gap", "receive_batch", "settle_interval_s"],
    "failures": ["max_delayed", "park_after_s", "max_parked", "crash_limit", "dead_threshold", "dead_check_s"],
    "metrics": ["metrics_prefix"],
}
WITHOUT_DEFAULT = {
    "app": "none",
    "client": "none",
    "durability": "the broker's own",
    "outbox_url": "none",
    "partitions": str(DEFAULT_PARTITIONS),
    "replication": "the cluster's own",
    "retention_events": "no limit",
    "streams": "none",
}
VALUES = {
    "streams": "topics and `Streams`",
    "app": "`MODULE:APP`",
    "client": "names and values",
    "metrics_prefix": "letters, digits, `_`",
    "outbox_url": "a URL",
    "url": "a URL",
}
_MARKS = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- /settings -->)", re.DOTALL)


def names() -> list[str]:
    """Every setting."""
    return [name for name in Settings.__struct_fields__ if name != "sources"]


def rendered(page: str) -> str:
    """The page with new tables between its marks. The text around them is written by hand."""
    return _MARKS.sub(lambda marks: f"{marks[1]}{table(GROUPS[marks[2]])}{marks[3]}", page)


def table(group: list[str]) -> str:
    lines = ["| setting | default | values | brokers | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{n}` | {default(n)} | {values(n)} | {brokers(n)} | {description(n)} |" for n in group]
    return "".join(f"{line}\n" for line in lines)


def description(name: str) -> str:
    assert name in descriptions(), f"the setting {name} has no description: write a string under its field in Settings"
    return descriptions()[name]


@functools.cache
def descriptions() -> dict[str, str]:
    """The string under each field of Settings, on one line."""
    (node,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(node, ast.ClassDef)
    return dict(_described(node))


def _described(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), " ".join(str(text.value.value).split())


def default(name: str) -> str:
    value = getattr(Settings(), name)
    if name in WITHOUT_DEFAULT:
        return WITHOUT_DEFAULT[name]
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith("_s"):
        return duration(value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"{value:,}" if isinstance(value, int) else f"`{value}`"


def size(count: int) -> str:
    """In the largest unit that gives a whole number."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count % 1024**power == 0:
            return f"{count // 1024**power} {unit}"
    return f"{count:,} bytes"


def duration(seconds: float) -> str:
    """In the largest unit that gives a whole number above 1."""
    for unit_s, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds % unit_s == 0 and seconds > unit_s:
            return f"{seconds / unit_s:g} {unit}"
    return f"{seconds:g} s"


def values(name: str) -> str:
    """What may be written, from the type."""
    if name in VALUES:
        return VALUES[name]
    type_ = get_type_hints(Settings, include_extras=True)[name]
    parts = list(_parts(type_))
    if bool in parts:
        return "`true`, `false`"
    if choices := [f"`{each}`" for each in parts if isinstance(each, str)]:
        return ", ".join(choices)
    (meta,) = [each for each in parts if isinstance(each, Meta)]
    if meta.gt is not None:
        return f"more than {meta.gt:g}"
    return f"{meta.ge:g} to {meta.le:g}" if meta.le is not None and int in parts else f"{meta.ge:g} or more"


def _parts(type_: Any) -> Iterator[Any]:
    """The type, and everything that it is made of."""
    yield type_
    for part in get_args(type_):
        yield from _parts(part)


def brokers(name: str) -> str:
    """The brokers that accept it."""
    labels = dict.fromkeys(scheme.label for scheme in SCHEMES.values())  # several schemes may lead to one broker
    accepting = dict.fromkeys(scheme.label for scheme in SCHEMES.values() if name in scheme.takes)
    return ", ".join(accepting) if 0 < len(accepting) < len(labels) else "all"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
