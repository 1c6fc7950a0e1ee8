"""Decides when dead letters cause an alert. Pure: counts in, alerts out."""

from collections.abc import Sequence
from typing import Literal

import msgspec

_SETTINGS = {"depth": "dead_threshold=", "growth": "growth limit ", "age": "age limit in seconds "}
CLEAR_AT = 0.7  # of the limit. If it were 1, a count around the limit would alert and recover at every check

Place = tuple[str, str]
"""Topic and group."""


class Tally(msgspec.Struct, frozen=True):
    """The dead letters of a topic and group at one moment."""

    topic: str
    group: str
    depth: int
    oldest_age_s: float = 0.0  # since its last failure; 0 when there is none


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """An alert is raised when one of them is exceeded. None: never."""

    depth: int | None = 100
    growth: int | None = None  # letters between two checks
    oldest_age_s: float | None = None


class Alert(msgspec.Struct, frozen=True):
    """`kind`: too many dead letters (`high`) or few enough again (`recovered`); or the monitor or a hook fails
    (`broken`) or works again (`repaired`). `text` is a complete sentence for people."""

    kind: Literal["high", "recovered", "broken", "repaired"]
    subject: str  # what the alert is about; an alert and its all-clear have the same one
    text: str
    tally: Tally | None = None


class AlertState:
    """Remembers which alerts it has raised, so that each problem is reported once, and its end once."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._before: dict[Place, int] = {}  # depths at the last check
        self._raised: set[str] = set()
        self._blind = False

    def see(self, tallies: Sequence[Tally]) -> list[Alert]:
        alerts = []
        if self._blind:
            self._blind = False
            alerts.append(Alert("repaired", "monitor", "the dead letters can be counted again"))
        for tally in tallies:
            alerts += self._judge(tally, tally.depth - self._before.get((tally.topic, tally.group), 0))
        self._before = {(tally.topic, tally.group): tally.depth for tally in tallies}
        subjects = {subject for tally in tallies for subject in _subjects(tally)}
        self._raised &= subjects  # if another process counts a group now, the all-clear is not ours to give
        return alerts

    def fail(self, why: str) -> list[Alert]:
        """The check itself failed."""
        if self._blind:
            return []
        self._blind = True
        return [Alert("broken", "monitor", f"the dead letters cannot be counted: {why}")]

    def _judge(self, tally: Tally, growth: int) -> list[Alert]:
        values: dict[str, float] = {"depth": tally.depth, "growth": growth, "age": tally.oldest_age_s}
        limits = self._thresholds
        bounds = {"depth": limits.depth, "growth": limits.growth, "age": limits.oldest_age_s}
        alerts = []
        for measure, subject in zip(values, _subjects(tally), strict=True):
            limit = bounds[measure]
            if limit is None:
                continue
            if subject not in self._raised and values[measure] > limit:
                self._raised.add(subject)
                alerts.append(Alert("high", subject, _high(tally, growth, f"{_SETTINGS[measure]}{limit:g}"), tally))
            elif subject in self._raised and values[measure] <= limit * CLEAR_AT:
                self._raised.discard(subject)
                text = f"{tally.topic}: {tally.depth:,} dead letters of group {tally.group}, {measure} is fine again"
                alerts.append(Alert("recovered", subject, text, tally))
        return alerts


def _subjects(tally: Tally) -> list[str]:
    return [f"{tally.topic}/{tally.group}/{measure}" for measure in ("depth", "growth", "age")]


def _high(tally: Tally, growth: int, why: str) -> str:
    return (
        f"{tally.topic}: {tally.depth:,} dead letters of group {tally.group} ({why}), {growth:+,} since the last "
        f"check, the oldest {_age(tally.oldest_age_s)} old; see: onward dead list --topic {tally.topic} "
        f"--group {tally.group}"
    )


def _age(seconds: float) -> str:
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s"
