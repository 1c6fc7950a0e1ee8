"""Links and pictures lead to a file of the repository, and to a heading of it."""

import re
from collections.abc import Iterator

from tests.docs.pages import Pages, line_of
from tests.examples import ROOT

_MARKDOWN = r"\]\((?!https?:)([^)#]*)#?([^)]*)\)"
_HTML = r"\b(?:src|href)=\"(?!https?:)([^\"#]*)#?([^\"]*)\""


def wrong_links(texts: Pages) -> list[str]:
    """Links of Markdown, and src and href of HTML."""
    problems = []
    for page, text in texts.items():
        for found in (*re.finditer(_MARKDOWN, text), *re.finditer(_HTML, text)):
            where = f"{page}:{line_of(text, found.start())}"
            problems += [f"{where}: {what}" for what in _judge(page, found[1], found[2])]
    return problems


def _judge(page: str, target: str, anchor: str) -> Iterator[str]:
    file = (ROOT / page).parent / target if target else ROOT / page
    if not file.exists():
        yield f"no file {target}"
    elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
        yield f"{target} has no heading #{anchor}"


def anchors(page: str) -> list[str]:
    """The anchors that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
