"""What this broker stores with each partition of an ordered group that a member holds."""

from onward.brokers.core.holdings import Hold, Holdings
from onward.brokers.rabbitmq.ordered.log_anchors import AnchorTrail


class OrderedOwn:
    __slots__ = ("sure_until", "trail")

    def __init__(self, trail: AnchorTrail, sure_until: float) -> None:
        self.trail = trail
        self.sure_until = sure_until  # until then no other member gets the partition


OrderedHold = Hold[OrderedOwn]
OrderedHoldings = Holdings[OrderedOwn]
