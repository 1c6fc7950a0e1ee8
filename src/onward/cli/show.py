"""Prints an event as one line: a JSON object for programs, or coloured text for people."""

import select
import sys

import msgspec
from rich.console import Console
from rich.text import Text

from onward import clock
from onward.event import Event
from onward.failure.letter import compact_json, event_fields

_MOST_CHARS = 1_000  # of a value in a line of text


class Screen:
    """Prints events on stdout. With `key` only those of one key, with `limit` at most that many."""

    def __init__(self, *, json: bool, key: str | None, limit: int | None) -> None:
        self._key = key
        self._left = limit
        self._console = None if json else _Console(highlight=False)

    @property
    def full(self) -> bool:
        return self._left == 0

    def show(self, event: Event) -> None:
        if self._key is not None and event.key != self._key:
            return
        if self._left is not None:
            self._left -= 1
        if self._console is None:
            sys.stdout.buffer.write(as_json(event) + b"\n")
        else:
            self._console.print(as_line(event), soft_wrap=True)

    def flush(self) -> None:
        """Raises BrokenPipeError if the reader of our output has closed it, also when there is nothing to write."""
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout, 0)
        if any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0)):
            raise BrokenPipeError


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # not SystemExit: `tail` must still drop its group


def as_json(event: Event) -> bytes:
    """The whole event in one line. A tombstone is marked as one, because `null` is also a value."""
    return msgspec.json.encode(event_fields(event))


def as_line(event: Event) -> Text:
    """The event as coloured text. Control characters are escaped, so it cannot affect the terminal."""
    line = Text(no_wrap=True)
    at = clock.moment(event.time) if event.time else None  # 0: the publisher, another program, gave it none
    line.append("--:--:--.---" if at is None else f"{at:%H:%M:%S.%f}"[:-3], "dim")
    line.append(f" {event.topic}", "cyan")
    line.append(" key=", "dim")
    line.append("-" if event.key is None else _word(event.key), "dim" if event.key is None else "bold yellow")
    if event.type:
        line.append(" type=", "dim")
        line.append(_word(event.type), "green")
    line.append(f" {_value(event.value)}", "dim italic" if event.value is None else "")
    for name, value in event.headers.items():
        line.append(f" {harmless(name)}={harmless(value)}", "dim")
    return line


def _value(data: bytes | None) -> str:
    if data is None:
        return "tombstone"
    text = harmless((compact_json(data) or data).decode("utf-8", "backslashreplace"))
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}… ({len(data):,} bytes)"


def _word(text: str) -> str:
    """The text as one word. If that would be ambiguous, it is quoted as JSON."""
    plain = text.isprintable() and text != "-" and not set(text) & set(' "')
    return text if text and plain else harmless(msgspec.json.encode(text).decode())


def harmless(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
