"""Onward carries an event from a database commit to the code that must act on it and to the browser that must show it.

The path, and the room of each stage: brokers (transport), flow (control), engines (execution), failure (retries and
what is given up). `app` composes them; `testing` proves them.
"""

from onward.app import Onward
from onward.brokers.base import TopicSpec
from onward.errors import GiveUp, OnwardError, RetryLater, Skip
from onward.event import Event
from onward.failure.retry import Retry

__version__ = "0.1.0"
__all__ = ["Event", "GiveUp", "Onward", "OnwardError", "Retry", "RetryLater", "Skip", "TopicSpec"]
