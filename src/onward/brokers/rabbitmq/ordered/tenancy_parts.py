"""What the ownerships of one member share."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

from onward.brokers.rabbitmq.amqp import Connection
from onward.brokers.rabbitmq.aside.aside_entries import AsidePlace
from onward.brokers.rabbitmq.aside.aside_log import AsideStream
from onward.brokers.rabbitmq.ordered.log_reader import PartitionReader
from onward.brokers.rabbitmq.ordered.ordered_hold import OrderedHoldings
from onward.brokers.rabbitmq.ordered.token import Token
from onward.event import Partition
from onward.settings import Settings


class OwnedAsides(Protocol):
    def owned(self, connection: Connection, place: AsidePlace) -> AsideStream: ...


class TenancyParts(NamedTuple):
    group: str
    member: str  # its name
    settings: Settings
    holdings: OrderedHoldings
    asides: OwnedAsides
    epochs: Iterator[int]
    topic_ids: Mapping[str, str]  # by topic: the id of its log in the registry
    first_token: Callable[[Partition], Token]  # of a partition that never had an owner
    stalled: set[PartitionReader]  # readers that wait for room
