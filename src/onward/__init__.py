"""Onward publishes events to a broker (SQLite or Kafka) and runs handlers for them, in order for each key.

It retries failed events, stores those it gives up on as dead letters, and with an inbox lets each effect happen once.

The packages, in the order of an event's path: `brokers` (transport), `flow` (control), `engines` (execution),
`failure` (retries and dead letters), `inbox` (effects once). `app` composes them; `testing` has their test suites.
"""

from onward.app import Onward
from onward.brokers.base import TopicSpec
from onward.errors import GiveUp, OnwardError, RetryLater, Skip
from onward.event import Event
from onward.failure.retry import Retry

__version__ = "0.1.0"
__all__ = ["Event", "GiveUp", "Onward", "OnwardError", "Retry", "RetryLater", "Skip", "TopicSpec"]
