"""What is said of other consumers in our groups. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

_NAMED = 5  # consumers in one message


class ActiveConsumer(NamedTuple):
    name: str
    idle_s: float

    @property
    def text(self) -> str:
        return f"{self.name} {self.idle_s:.0f} s ago"


def beside_us(stream: str, group: str, names: Sequence[str]) -> str:
    """Why a partition cannot be read, or not in order: others are active in the group now."""
    place = f"group {group} of stream {stream}"
    if not names:
        return (
            f"another program has moved {place}; the order of keys needs one reader, so stop it, or use another group"
        )
    if len(names) == 1:
        who, them = f"consumer {names[0]} of another program is active in {place}", "it"
    else:
        who, them = f"consumers of another program are active in {place}: {_listed(names)}", "them"
    return f"{who}; the order of keys needs one reader, so stop {them}, or use another group"


def waiting(consumers: Sequence[ActiveConsumer], for_s: float, setting: str) -> str:
    """Why a partition is not read yet: others were active lately. `setting`: how long they must have been idle."""
    if len(consumers) == 1:
        (one,) = consumers
        who, they = f"consumer {one.name} of another program was active {one.idle_s:.0f} s ago", "that consumer stays"
    else:
        texts = _listed([each.text for each in consumers])
        who, they = f"consumers of another program were active: {texts}", "they stay"
    return (
        f"waits: {who}; the partition goes on in {for_s:.0f} s ({setting}) if {they} idle, or sooner with a smaller "
        f"{setting}"
    )


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_NAMED]) + (f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else "")
