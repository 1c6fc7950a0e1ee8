"""The embedded broker: one SQLite file, any number of processes on one machine, nothing to install."""

from onward.brokers.sqlite.broker import open_broker
from onward.brokers.sqlite.gate import Holder, lock_holder

__all__ = ["Holder", "lock_holder", "open_broker"]
