"""Progress as it is stored in a group's hash. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from onward.brokers.base import Progress, Tries
from onward.brokers.redis.positions import hex_of
from onward.event import Partition

_encode = msgspec.msgpack.encode
_intervals = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
_tries = msgspec.msgpack.Decoder(dict[int, Tries]).decode


class ProgressFields(NamedTuple):
    """What SETTLE takes. An empty watermark: there is no progress to store."""

    watermark: str = ""
    above: bytes = b""
    tries: bytes = b""
    before: int | str = ""  # how many events were appended before the watermark; empty: unknown


def encoded(progress: Progress, before: int | None) -> ProgressFields:
    """`before`: how many events were appended before the watermark."""
    above = _encode(progress.done_above) if progress.done_above else b""
    tries = _encode(progress.tries) if progress.tries else b""
    return ProgressFields(hex_of(progress.watermark), above, tries, "" if before is None else before)


def decoded(partition: Partition, epoch: int, fields: Sequence[bytes]) -> Progress | None:
    """What was settled last, None if nothing ever was."""
    watermark, above, tries = int(fields[0], 16), fields[1], fields[2]
    if not watermark and not above and not tries:
        return None
    return Progress(
        partition, epoch, watermark, _intervals(above) if above else (), tries=_tries(tries) if tries else {}
    )
