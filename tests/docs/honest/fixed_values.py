"""Values from a fixed set: exit codes, paths of the endpoint, reasons of dead letters, states of events."""

import re
from collections.abc import Iterator, Set
from typing import NamedTuple

from tests.docs.known import exit_codes, paths, reasons, states
from tests.docs.pages import Pages, code, line_of

_TABLE = r"^\| {} \|.*\n\|-.*\n((?:\|.*\n?)+)"
_FIRST_CELL = r"^\| `?([^ `|]+)"
_SPAN = r"`(\w+)`"
_EXIT_CODE = r"(?:\bexits with|\bexit code|ExitStatus=)\s?(\d+)"
_SIGNAL = 128
_PATH = r"\bpath: *[\"']?(/[\w/-]*)|^(/(?:health|metrics|readings)[\w/-]*)$"


class Listed(NamedTuple):
    """A place that lists all of these values."""

    what: str
    place: str  # a pattern; its group is the list
    value: str  # a pattern for each value in the list
    real: Set[str]


LISTS = (
    Listed("exit code", _TABLE.format("exit code"), _FIRST_CELL, {str(each) for each in exit_codes()}),
    Listed("path of the endpoint", _TABLE.format("path"), _FIRST_CELL, paths()),
    Listed("reason of a dead letter", _TABLE.format("reason"), _FIRST_CELL, reasons()),
    Listed("reason of a failure", r"^\| `reason` \| (.*) \|$", _SPAN, reasons() | {"failed"}),
    Listed("status of an event", r"The label `status` is ([^|]*)", _SPAN, states()),
)


def wrong_lists(texts: Pages) -> list[str]:
    """Tables and sentences that list all values."""
    problems = []
    for each in LISTS:
        places = [
            (page, line_of(text, found.start()), set(re.findall(each.value, found[1], re.MULTILINE)))
            for page, text in texts.items()
            for found in re.finditer(each.place, text, re.MULTILINE)
        ]
        problems += [] if places else [f"no page lists every {each.what}"]
        problems += [f"{page}:{line}: {what}" for page, line, values in places for what in _compared(each, values)]
    return problems


def _compared(listed: Listed, values: set[str]) -> Iterator[str]:
    wrong = [f"{value} does not exist" for value in sorted(values - listed.real)]
    missing = [f"{value} is missing" for value in sorted(listed.real - values)]
    if wrong or missing:
        yield f"{listed.what}: {', '.join(wrong + missing)}"


def wrong_exit_codes(texts: Pages) -> list[str]:
    """Exit codes in sentences and in the unit of systemd. From 128 on, a signal has ended the process."""
    found = [
        (f"{page}:{line_of(text, each.start())}", int(each[1]))
        for page, text in texts.items()
        for each in re.finditer(_EXIT_CODE, text, re.IGNORECASE)
    ]
    return [f"{at}: no exit code is {n}" for at, n in found if n not in exit_codes() and n < _SIGNAL]


def wrong_paths(texts: Pages) -> list[str]:
    """Paths of probes, and paths in the text that look like ours."""
    found = [(each, re.search(_PATH, each.text)) for each in code(texts) if each.language in ("inline", "yaml")]
    given = [(each, path[1] or path[2]) for each, path in found if path]
    return [each.problem(f"the endpoint does not serve {path}") for each, path in given if path not in paths()]
