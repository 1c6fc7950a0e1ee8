"""Metrics."""

import re
from collections.abc import Iterator

from tests.docs.pages import Code, Pages, code

NOT_METRICS = {
    *("onward_inbox", "onward_inbox_cursor", "onward_nats"),  # tables, and the package of an example
    *("onward_outbox", *(f"onward_outbox_{name}" for name in ("meta", "relay", "shard", "parked", "lock"))),
    *("onward_enqueue", "onward_lock", "onward_outbox_clean"),  # functions of the database
}


def wrong_metrics(texts: Pages, exported: set[str]) -> list[str]:
    return [each.problem(f"no metric is named {name}") for each, name, found in _metrics(texts, exported) if not found]


def missing_metrics(texts: Pages, exported: set[str]) -> list[str]:
    mentioned = {family for _, _, found in _metrics(texts, exported) for family in found}
    return [f"no page mentions the metric {name}" for name in sorted(exported - mentioned)]


def _metrics(texts: Pages, exported: set[str]) -> Iterator[tuple[Code, str, set[str]]]:
    """Each name of a metric in the text, and the families that it means. In a table, `_open` behind `onward_lag_gap`
    means the families that begin with `onward_lag_open`."""
    last = ("", 0, "")  # page, line and first words of the last full name
    for each in code(texts):
        for name in re.findall(r"\bonward_[a-z_]*[a-z]\b", each.text):
            if name not in NOT_METRICS:
                last = each.page, each.line, "_".join(name.split("_")[:2])
                base = re.sub("_(bucket|sum|count)$", "", name)
                yield each, name, {name, base} & exported
        if each.language == "inline" and re.fullmatch("_[a-z_]+", each.text) and last[:2] == (each.page, each.line):
            yield each, each.text, {family for family in exported if family.startswith(last[2] + each.text)}
