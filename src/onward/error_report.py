"""An error as text that every store takes, whatever happens when the error is looked at.

An exception of a user's may raise from `__str__`, `__class__` or the name of its class, and its text may hold half a
surrogate pair, which no encoding has. Texts of errors enter here and nowhere else.
"""

from traceback import format_exception, format_tb

import msgspec

from onward.errors import GiveUp, RemoteError, RetryLater, Skip, Undecodable, class_name, kind_name

_MAX_TEXT = 20_000  # characters of an error's message, and of its traceback
_traceback = BaseException.__dict__["__traceback__"].__get__  # whatever a subclass makes of the name
_DECISIONS: tuple[type[BaseException], ...] = (Undecodable, RetryLater, GiveUp, Skip)


class ErrorReport(msgspec.Struct, frozen=True, array_like=True):
    """What is known of an error, fit to be sent and stored."""

    name: str
    message: str
    kinds: list[str]  # its class and all its bases, as module.name
    trace: str
    decision: str = ""  # the name of the class by which the error decides what becomes of its event; empty: it does not
    after_s: float = 0.0  # of RetryLater


def storable(text: str) -> str:
    """Text that every store takes, cut in the middle if it is long. Half a surrogate pair is escaped."""
    if len(text) > _MAX_TEXT:
        text = f"{text[: _MAX_TEXT // 2]} … {text[-_MAX_TEXT // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode()


def name_of(error: BaseException) -> str:
    """The name of its class."""
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
        decision, after_s = None, 0.0  # a RetryLater that does not say when is a failure like any other
    return ErrorReport(
        name=name_of(error),
        message=message_of(error),
        kinds=[storable(kind_name(each)) for each in kind.__mro__],
        trace=trace_of(error),
        decision="" if decision is None else decision.__name__,
        after_s=after_s,
    )


def revived(reported: ErrorReport) -> BaseException:
    """An error that stands for the reported one."""
    error = RemoteError(reported.name, reported.message, reported.kinds, reported.trace)
    decision = next((each for each in _DECISIONS if each.__name__ == reported.decision), None)
    if decision is None:
        return error
    deciding = RetryLater(reported.after_s, reported.message) if decision is RetryLater else decision(reported.message)
    deciding.__cause__ = error
    return deciding


def harmless(error: BaseException) -> BaseException:
    """The error, or one that stands for it if looking at it raises."""
    try:
        error.__class__  # noqa: B018  # isinstance asks for it
        if isinstance(error, RetryLater):
            float(error.after_s)
    except BaseException:
        return revived(report(error))
    return error
