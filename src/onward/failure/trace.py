"""Where an error came from, for the log: the last frames of the user's code."""

import textwrap
from pathlib import Path
from traceback import StackSummary, TracebackException

from onward.error_report import trace_of
from onward.errors import RemoteError

_OURS = str(Path(__file__).parent.parent)
_FRAMES = 8
_MAX_CHARS = 4_000


def in_brief(error: BaseException) -> str:
    """The last frames, without those of this package that lead to the handler. Indented, so that no line looks like a
    log line of its own. Control characters are escaped."""
    text = _text(error)
    text = text.rstrip() if len(text) <= _MAX_CHARS else f"…{text[-_MAX_CHARS:].rstrip()}"
    return textwrap.indent("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text), "    ")


def _text(error: BaseException) -> str:
    try:
        return error.trace if isinstance(error, RemoteError) else "".join(_pruned(error).format())
    except BaseException:  # the methods of a user's exception may raise anything
        return trace_of(error)


def _pruned(error: BaseException) -> TracebackException:
    pruned = TracebackException.from_exception(error, limit=-_FRAMES, compact=True)
    part: TracebackException | None = pruned
    while part is not None:
        users = [frame for frame in part.stack if not frame.filename.startswith(_OURS)]
        if users:
            part.stack = StackSummary.from_list(users)
        part = part.__cause__ or part.__context__
    return pruned
