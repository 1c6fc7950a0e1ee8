"""Positions and the ids of stream entries. Pure.

A position is `ms << 21 | seq`. It is beyond what a double can hold exactly, so in Redis it is always 16 hex digits:
never a Lua number, never a score.
"""

_SEQ_BITS = 21
_SEQ_MASK = (1 << _SEQ_BITS) - 1
_MS_BITS = 42


def position_of(id_: bytes) -> int | None:
    """The position of an entry; None: its id does not fit into one."""
    ms, _, seq = id_.partition(b"-")
    return joined(int(ms), int(seq))


def joined(ms: int, seq: int = 0) -> int | None:
    return ms << _SEQ_BITS | seq if ms >> _MS_BITS == 0 and seq >> _SEQ_BITS == 0 else None


def id_of(position: int) -> str:
    return f"{position >> _SEQ_BITS}-{position & _SEQ_MASK}"


def ms_of(position: int) -> int:
    return position >> _SEQ_BITS


def hex_of(position: int) -> str:
    return f"{position:016x}"
