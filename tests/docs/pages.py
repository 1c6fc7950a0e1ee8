"""The pages of the documentation, and the code in them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.examples import ROOT

_BLOCK = re.compile(r"^[ ]*```([a-z]*)\n(.*?)^[ ]*```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_IMPORT = re.compile(r"from (onward[\w.]*) import (?:\(([^)]*)\)|([\w, ]+))")

Pages = Mapping[str, str]
"""Text by file name, such as docs/start.md."""


class Code(NamedTuple):
    """An inline code span, or one line of a code block, with the lines that continue it behind a backslash. The
    `language` is "inline" or the block's own."""

    page: str
    line: int
    text: str
    language: str

    def problem(self, what: str) -> str:
        """For the failure message of a test."""
        return f"{self.page}:{self.line}: {what}"


def pages() -> dict[str, str]:
    """README.md and docs/*.md."""
    files = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def code(texts: Pages) -> list[Code]:
    """All code of these pages."""
    return [each for page, text in texts.items() for each in (*_block_lines(page, text), *_spans(page, text))]


def blocks(texts: Pages, language: str | None = None) -> Iterator[Code]:
    """The code blocks in this language, or in all, each as a whole."""
    for page, text in texts.items():
        for block in _BLOCK.finditer(text):
            if language in (None, block[1]):
                yield Code(page, line_of(text, block.start()) + 1, block[2], block[1])


def imports(texts: Pages) -> Iterator[tuple[Code, str, str]]:
    """Each name that the code imports from Onward, with its module."""
    inline = [each for each in code(texts) if each.language == "inline"]
    for each in (*blocks(texts), *inline):
        for found in _IMPORT.finditer(each.text):
            where = each._replace(line=each.line + line_of(each.text, found.start()) - 1)
            listed = re.sub("#.*", "", found[2] or found[3])
            yield from ((where, found[1], part.split()[0]) for part in listed.split(",") if part.strip())


def _block_lines(page: str, text: str) -> Iterator[Code]:
    for block in _BLOCK.finditer(text):
        first = line_of(text, block.start()) + 1
        for number, line in _joined(block[2].splitlines()):
            yield Code(page, first + number, line, block[1])


def _joined(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The lines with their numbers. A line that ends with a backslash and the next one are one line."""
    start, before = 0, ""
    for number, line in enumerate(lines):
        start = start if before else number
        before += line.strip() if before else line
        if line.endswith("\\"):
            before = before[:-1].rstrip() + " "
        else:
            yield start, before
            before = ""
    if before:
        yield start, before


def _spans(page: str, text: str) -> Iterator[Code]:
    """A span may go on in the next line, but not over a blank line."""
    prose = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    for paragraph in re.finditer(r"(?:.+\n?)+", prose):
        for span in _SPAN.finditer(paragraph[0]):
            line = line_of(prose, paragraph.start() + span.start())
            yield Code(page, line, " ".join(span[1].split("\n")), "inline")


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
