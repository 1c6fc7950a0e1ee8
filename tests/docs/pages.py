"""The pages of the documentation, and the code in them."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.examples import ROOT

_BLOCK = re.compile(r"^[ ]*```([a-z]*)\n(.*?)^[ ]*```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")

Pages = Mapping[str, str]
"""Text by file name, such as docs/start.md."""


class Code(NamedTuple):
    """An inline code span, or one line of a code block. Their `language` is "inline" or the block's own."""

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


def blocks(texts: Pages, language: str) -> Iterator[Code]:
    """The code blocks in this language, each as a whole."""
    for page, text in texts.items():
        for block in _BLOCK.finditer(text):
            if block[1] == language:
                yield Code(page, _line(text, block.start()) + 1, block[2], language)


def _block_lines(page: str, text: str) -> Iterator[Code]:
    for block in _BLOCK.finditer(text):
        first = _line(text, block.start()) + 1
        for number, line in enumerate(block[2].splitlines()):
            yield Code(page, first + number, line, block[1])


def _spans(page: str, text: str) -> Iterator[Code]:
    """A span may go on in the next line, but not over a blank line."""
    prose = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    for paragraph in re.finditer(r"(?:.+\n?)+", prose):
        for span in _SPAN.finditer(paragraph[0]):
            line = _line(prose, paragraph.start() + span.start())
            yield Code(page, line, " ".join(span[1].split("\n")), "inline")


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
