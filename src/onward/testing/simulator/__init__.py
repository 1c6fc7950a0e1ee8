"""A whole group of consumers on a simulated broker and clock, from one seed.

`simulate(seed)` interleaves deliveries, successes, failures, timeouts, slow-downs, pauses, revocations, fences,
crashes, settles that are late, lost, or refused in some partitions, replays and removals. Positions are dense or a
million apart; partitions have one owner, or are shared by all members. It checks that nothing was lost, keys kept
their order, nothing open was settled, no former owner had an effect, everything stayed bounded, and everything
completed once faults stopped.
`python -m onward.testing.simulator` runs many seeds, or replays one with a readable trace.
"""

from onward.testing.simulator.world import Result, simulate

__all__ = ["Result", "simulate"]
