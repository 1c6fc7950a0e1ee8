"""The trace context that an event carries from the code that adds it to the code that handles it."""

import sys
from collections.abc import Mapping

from onward import context

_NAMES = ("traceparent", "tracestate")


def with_trace(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """The headers with the trace context of the active OpenTelemetry span, or else of the event that is being handled.
    Headers that are given win."""
    found = _of_span() or _of_handler()
    return {**found, **headers} if found and headers else (found or headers)


def _of_span() -> dict[str, str]:
    if "opentelemetry.trace" not in sys.modules:
        return {}  # nothing in this process traces
    from opentelemetry import propagate, trace

    carrier: dict[str, str] = {}
    if trace.get_current_span().get_span_context().is_valid:
        propagate.inject(carrier)
    return carrier


def _of_handler() -> dict[str, str]:
    try:
        run = context.current()
    except LookupError:
        return {}
    if len(run.batch) > 1:
        return {}  # each event of a batch has a trace of its own
    return {name: run.event.headers[name] for name in _NAMES if name in run.event.headers}
