"""The simulator runs a whole group of members on a simulated broker and clock. One seed decides everything.

`simulate(seed)` mixes deliveries, successes, failures, timeouts, slow-downs, pauses, revocations, fences, crashes,
replays and removals with settles that are late, lost, or refused in some partitions. Positions are dense or a million
apart. Partitions have one owner, or all members share them.

It checks that no event was lost, keys kept their order, no open event was settled, no former owner had an effect,
every limit was kept, and everything completed once the faults stopped.

`python -m onward.testing.simulator` runs many seeds, or replays one with a readable trace.
"""

from onward.testing.simulator.world import Result, simulate

__all__ = ["Result", "simulate"]
