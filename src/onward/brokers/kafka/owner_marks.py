"""How commits name the owner of a partition, and what the next owner of an unclean one waits for. Pure.

The coordinator gives the partitions of a dynamic member away when its session has ended. It gives the partitions of a
static member to the next client with the same `group.instance.id` at once, while the session of the first client may go
on. So a mark names both: four characters for the instance id, eight for the member.
"""

from base64 import urlsafe_b64encode
from enum import StrEnum
from hashlib import blake2b

_INSTANCE_CHARS = 4
_MEMBER_CHARS = 8
_DYNAMIC = "=" * _INSTANCE_CHARS  # no digest looks like this


class TakeoverWait(StrEnum):
    """What an owner waits for before it starts an event.

    While it waits, its commits have this value as their mark, which names no member. If this owner dies too, the next
    one still waits for the owner before it, even if it knows that no process of this one is left."""

    NONE = ""  # nothing of the last owner can still run
    GRACE = "?"  # the last owner's session has ended, but it may not have noticed yet
    SESSION = "!"  # the last owner's session may go on


class OwnerMarks:
    """Writes and reads the marks for one member. `instance` is its group.instance.id; empty: it is a dynamic member.
    `gone` names members that have no process left."""

    def __init__(self, member: str, *, instance: str, gone: frozenset[str]) -> None:
        self._instance = _digest(instance, _INSTANCE_CHARS) if instance else _DYNAMIC
        self.mine = self._instance + _digest(member, _MEMBER_CHARS)
        self._gone = frozenset(_digest(each, _MEMBER_CHARS) for each in gone)

    def wait(self, mark: str) -> TakeoverWait:
        """What to wait for at an unclean partition whose last commit has this mark. Commits of earlier versions have
        no mark."""
        instance, member = mark[:_INSTANCE_CHARS], mark[_INSTANCE_CHARS:]
        if member in self._gone:
            return TakeoverWait.NONE
        is_handed_over = instance == self._instance != _DYNAMIC and mark != self.mine
        return TakeoverWait.SESSION if is_handed_over or mark == TakeoverWait.SESSION else TakeoverWait.GRACE


def _digest(text: str, chars: int) -> str:
    return urlsafe_b64encode(blake2b(text.encode(), digest_size=chars * 3 // 4).digest()).decode()
