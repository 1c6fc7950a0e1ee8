"""What this broker keeps with a partition that it holds."""

import msgspec

from onward.brokers.base import Progress
from onward.brokers.core.holdings import Hold, Holdings


class KafkaOwn(msgspec.Struct):
    suffix: str  # of the metadata of its commits
    latest: Progress  # as last committed
    marked_at: int  # the offset in its aside's log at which the aside became ours


KafkaHold = Hold[KafkaOwn]
KafkaHoldings = Holdings[KafkaOwn]
