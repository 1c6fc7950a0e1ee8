"""Decides what happens to an event whose handler raised an error. Reads no clock and writes no log."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from onward.brokers.base import Failure
from onward.error_report import message_of, name_of, trace_of
from onward.errors import Expired, GiveUp, RetryLater, Skip, Undecodable, Unfinished, WorkerDied
from onward.event import Delivery
from onward.failure import trace
from onward.failure.retry import Retry
from onward.flow.entry import DONE, RELEASED, Again, Dead, Instant, Outcome

_MAX_LINE = 500


class Ruling(NamedTuple):
    """What happens to the event, and what to write in the log about it."""

    outcome: Outcome
    level: int
    text: str
    trace: str = ""  # the last frames of the user's code; empty if the text is enough


class ErrorJudge:
    """The judge of one handler. `random` is the source of the jitter."""

    def __init__(self, handler: str, retry: Retry, random: Callable[[], float]) -> None:
        self._handler = handler
        self._retry = retry
        self._random = random

    def rule(self, delivery: Delivery, error: BaseException, at: Instant) -> Ruling:
        """Every error gets a ruling: the event is done, runs again, or is dead."""
        try:
            return self._rule(delivery, error, at)
        except BaseException as odd:  # the methods of a user's exception may raise anything
            text = f"{self._what(delivery)} is dead: its error of type {name_of(error)} cannot be read"
            return Ruling(Dead(self._end(delivery, odd, at)), logging.ERROR, text)

    def _rule(self, delivery: Delivery, error: BaseException, at: Instant) -> Ruling:
        what, cause = self._what(delivery), _line(f"{name_of(error)}: {message_of(error)}")
        if isinstance(error, Skip):
            return Ruling(DONE, logging.INFO, f"{what} was skipped: {_line(message_of(error))}")
        if isinstance(error, Unfinished):
            return Ruling(RELEASED, logging.INFO, f"{what} runs again: {message_of(error)}")
        delay_s = self._retry.delay_s(delivery.attempt, error, self._random)
        if delay_s is not None:
            text = f"{what} failed, attempt {delivery.attempt}, again in {delay_s:.1f} s: {cause}"
            again = Again(at.now + delay_s, self._failure(delivery, error, at), isinstance(error, WorkerDied))
            return Ruling(again, logging.WARNING, text, _trace(error))
        text = f"{what} is dead after attempt {delivery.attempt}: {cause}"
        return Ruling(Dead(self._end(delivery, error, at)), logging.ERROR, text, _trace(error))

    def _what(self, delivery: Delivery) -> str:
        return f"{self._handler}: {delivery.partition} position {delivery.position} key {delivery.event.key!r}"

    def _end(self, delivery: Delivery, error: BaseException, at: Instant) -> Failure:
        failure, text = self._failure(delivery, error, at), trace_of(error)
        return msgspec.structs.replace(failure, reason=self._reason(delivery, error), traceback=text)

    def _failure(self, delivery: Delivery, error: BaseException, at: Instant) -> Failure:
        return Failure(
            reason="failed",
            error=name_of(error),
            message=message_of(error),
            traceback="",
            handler=self._handler,
            attempts=delivery.attempt - isinstance(error, Expired),  # the handler was not called
            first=at.wall,
            last=at.wall,
        )

    def _reason(self, delivery: Delivery, error: BaseException) -> str:
        for kind, reason in _REASONS.items():
            if isinstance(error, kind):
                return reason
        return "exhausted" if delivery.attempt >= self._retry.attempts else "refused"


_REASONS: dict[type[BaseException], str] = {
    Undecodable: "undecodable",
    Expired: "expired",
    GiveUp: "refused",
    WorkerDied: "crashed",
    RetryLater: "exhausted",
}


def _trace(error: BaseException) -> str:
    return "" if isinstance(error, tuple(_REASONS)) else trace.in_brief(error)


def _line(text: str) -> str:
    """One line for the log, cut if it is long, without control characters. The dead letter has the whole text."""
    text = text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}…"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
