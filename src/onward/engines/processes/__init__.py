"""The process engine: for handlers that keep a processor busy. Workers are spawned, never forked."""

from onward.engines.processes.engine import ProcessEngine

__all__ = ["ProcessEngine"]
