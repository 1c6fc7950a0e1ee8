"""A whole group of consumers on a simulated broker and clock, from one seed.

`simulate(seed)` interleaves deliveries, successes, failures, timeouts, slow-downs, pauses, revocations, fences,
crashes, late and failing settles, replays and removals, and checks that nothing was lost, keys kept their order,
nothing open was settled, no former owner had an effect, everything stayed bounded, and everything completed once
faults stopped.
`python -m onward.testing.simulator` runs many seeds, or replays one with a readable trace.
"""

from onward.testing.simulator.world import Result, simulate

__all__ = ["Result", "simulate"]
