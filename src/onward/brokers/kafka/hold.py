"""What this broker stores with each partition that a member holds."""

import msgspec

from onward.brokers.base import Progress
from onward.brokers.core.holdings import Hold, Holdings
from onward.brokers.kafka.owner_marks import TakeoverWait


class KafkaOwn(msgspec.Struct):
    suffix: str  # of the metadata of its commits
    latest: Progress  # as last committed
    marked_at: int  # the offset in its aside's log at which the aside became ours
    mark: str  # of this member, for its commits
    wait: TakeoverWait  # what the member waits for before the partition is announced


KafkaHold = Hold[KafkaOwn]
KafkaHoldings = Holdings[KafkaOwn]
