"""Settings, keywords and their defaults."""

import re
import tomllib
from collections.abc import Iterator

from tests.docs.honest.api_page import API, defaults
from tests.docs.known import variables
from tests.docs.pages import Pages, blocks, code
from tests.docs.settings_page import names

NOT_VARIABLES = ("ONWARD_SERVICE_HOST", "ONWARD_PATITIONS")  # of Kubernetes, and a misspelt one


def wrong_settings(texts: Pages) -> list[str]:
    """Names that end in _s or _bytes or begin with max_, in a URL, in onward.toml, and ONWARD_ variables."""
    known = set(defaults(texts[API]))
    problems = [each.problem(what) for each in code(texts) for what in _wrong_settings(each.text, known)]
    for block in blocks(texts, "toml"):
        given = tomllib.loads(block.text)
        wrong = [name for name in given if "url" in given and name not in names()]
        problems += [block.problem(f"no setting is named {name}") for name in wrong]
    return problems


def _wrong_settings(text: str, known: set[str]) -> Iterator[str]:
    limits = re.findall(r"(?<![\w.])(?:[a-z][a-z_]*_(?:s|bytes)|max_[a-z_]+)\b", text)
    yield from (f"no setting or keyword is named {name}" for name in limits if name not in known)
    queries = re.findall(r"\w+://[^\s?]*\?(\S+)", text)
    given = [name for query in queries for name in re.findall(r"(?:^|&)([a-z_]+)=", query)]
    yield from (f"no setting is named {name}" for name in given if name not in names())
    found = set(re.findall(r"\bONWARD_[A-Z_]*[A-Z]\b", text)) - variables() - set(NOT_VARIABLES)
    yield from (f"Onward reads no variable {name}" for name in sorted(found))


def wrong_defaults(texts: Pages) -> list[str]:
    """A number in parentheses behind a name is its default: `lease_s` (10 s), `max_event_bytes` (1 MiB)."""
    units = {"": 1, "s": 1, "minutes": 60, "days": 86_400, "MiB": 1 << 20, "GiB": 1 << 30}
    problems = []
    for page, text in texts.items():
        for found in re.finditer(rf"`([a-z_]+)`\s\((\d[\d,.]*) ?({'|'.join(units)})\)", text):
            known = defaults(texts[API]).get(found[1], set())
            if known and float(found[2].replace(",", "")) * units[found[3]] not in known:
                line = text.count("\n", 0, found.start()) + 1
                problems.append(f"{page}:{line}: the default of {found[1]} is {sorted(known)}, not {found[2]}")
    return problems
