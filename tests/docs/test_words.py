"""Words that plain technical English does not need are not used; the list is in avoided_words.txt."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.examples import ROOT

WORDS = (Path(__file__).parent / "avoided_words.txt").read_text(encoding="utf-8").splitlines()
FOLDERS = ("src", "docs", "tests", "bench", "examples")
KINDS = (".css", ".html", ".js", ".md", ".py", ".sql", ".toml")
_AVOIDED = re.compile(r"\b({})\b".format("|".join(WORDS).replace(" ", r"[\s#]+")), re.IGNORECASE)


def avoided(text: str) -> Iterator[tuple[int, str]]:
    """Line and word of each hit, also in names such as test_what_a_member_is_told, and over the end of a line."""
    for hit in _AVOIDED.finditer(text.replace("_", " ")):
        yield text.count("\n", 0, hit.start()) + 1, " ".join(hit[0].split())


def test_words_that_need_a_second_reading_are_avoided() -> None:
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in _files()}
    texts[Path("CHANGELOG.md")] = _unreleased((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    hits = [f"{path}:{line}: {word}" for path, text in texts.items() for line, word in avoided(text)]
    assert not hits, "\n".join(["", *hits])


def test_an_avoided_word_is_found_in_prose_in_names_and_over_two_lines() -> None:
    assert list(avoided("def test_who_is_told(): ...")) == [(1, "is told")]
    assert list(avoided("one\nWhoever\nthis is\n    # told")) == [(2, "Whoever"), (3, "is # told")]
    assert not list(avoided("a chest, told, henceforward, whole"))


def _files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.suffix in KINDS or path.name == "Makefile")
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix in KINDS and path != Path(__file__):
            yield path


def _unreleased(changelog: str) -> str:
    """Up to the heading of the last release, so that line numbers stay."""
    return "\n## ".join(changelog.split("\n## ")[:2])
