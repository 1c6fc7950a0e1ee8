"""The limit on RabbitMQ: hand-written frames, a typed handler, and one acknowledgement for many messages.

With `offset` the queues are streams, read from there.
"""

from collections.abc import Sequence

import msgspec

from bench.amqp_frames import Arguments, Wire, consume
from bench.contestants.lap import Lap, looped
from bench.kit import Ran
from bench.workload import Order

PREFETCH = 2_000
STREAM_PREFETCH = 500  # the server's cost of a stream's event grows with more


def run(url: str, queues: Sequence[str], events: int, offset: str | None = None) -> Ran:
    lap = Lap(events)
    decode = msgspec.json.Decoder(Order).decode
    arguments: Arguments = {} if offset is None else {"x-stream-offset": offset}

    async def handle(body: bytes) -> None:
        if body:  # a stream may begin with a message that has none
            order = decode(body)
            lap.saw(order.customer, order.number)

    with Wire(url) as wire:
        prefetch = PREFETCH if offset is None else STREAM_PREFETCH
        looped(consume(wire, queues, arguments, prefetch, handle, lambda: lap.is_over))
    return lap.ran()
