"""Turns an error into text that every store accepts, also if reading the error raises.

A user's exception may raise from `__str__`, `__class__` or the name of its class. Its text may contain half a surrogate
pair, which no encoding can represent. Every error text passes through this module before it is stored.
"""

from traceback import format_exception, format_tb

import msgspec

from onward.errors import GiveUp, RemoteError, RetryLater, Skip, Undecodable, class_name, kind_name

_MAX_TEXT = 20_000  # characters of an error's message, and of its traceback
_traceback = BaseException.__dict__["__traceback__"].__get__  # a subclass may override the attribute
_DECISIONS: tuple[type[BaseException], ...] = (Undecodable, RetryLater, GiveUp, Skip)


class ErrorReport(msgspec.Struct, frozen=True, array_like=True):
    """A description of an error that can be sent and stored."""

    name: str
    message: str
    kinds: list[str]  # its class and all its bases, as module.name
    trace: str
    decision: str = ""  # the name of the class in `_DECISIONS` that the error belongs to; empty: none
    after_s: float = 0.0  # only for RetryLater


def storable(text: str) -> str:
    """The text as every store accepts it: half a surrogate pair is escaped, and a long text is cut in the middle."""
    if len(text) > _MAX_TEXT:
        text = f"{text[: _MAX_TEXT // 2]} … {text[-_MAX_TEXT // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode()


def name_of(error: BaseException) -> str:
    """The name of the error's class."""
    return error.name if issubclass(type(error), RemoteError) else storable(class_name(type(error)))  # type: ignore[attr-defined]


def message_of(error: BaseException) -> str:
    try:
        return storable(str(error))
    except BaseException as odd:
        return f"its text cannot be read: {class_name(type(odd))}"


def trace_of(error: BaseException) -> str:
    try:
        return storable(error.trace if isinstance(error, RemoteError) else "".join(format_exception(error)))
    except BaseException:
        where = format_tb(_traceback(error))
        return storable("".join((*where, f"{name_of(error)}: {message_of(error)}\n")))


def report(error: BaseException) -> ErrorReport:
    kind = type(error)
    decision = next((each for each in _DECISIONS if issubclass(kind, each)), None)
    after_s = getattr(error, "after_s", None) if decision is RetryLater else 0.0
    if not isinstance(after_s, float):
        decision, after_s = None, 0.0  # a RetryLater without a valid time is an ordinary failure
    return ErrorReport(
        name=name_of(error),
        message=message_of(error),
        kinds=[storable(kind_name(each)) for each in kind.__mro__],
        trace=trace_of(error),
        decision="" if decision is None else decision.__name__,
        after_s=after_s,
    )


def revived(reported: ErrorReport) -> BaseException:
    """An error built from the report. It leads to the same outcome as the original one."""
    error = RemoteError(reported.name, reported.message, reported.kinds, reported.trace)
    decision = next((each for each in _DECISIONS if each.__name__ == reported.decision), None)
    if decision is None:
        return error
    deciding = RetryLater(reported.after_s, reported.message) if decision is RetryLater else decision(reported.message)
    deciding.__cause__ = error
    return deciding


def harmless(error: BaseException) -> BaseException:
    """The error, or a replacement if reading the error raises."""
    try:
        error.__class__  # noqa: B018  # isinstance reads it
        if isinstance(error, RetryLater):
            float(error.after_s)
    except BaseException:
        return revived(report(error))
    return error
