"""The process engine, for handlers that keep a processor busy. It spawns its workers and never forks them."""

from onward.engines.processes.engine import ProcessEngine

__all__ = ["ProcessEngine"]
