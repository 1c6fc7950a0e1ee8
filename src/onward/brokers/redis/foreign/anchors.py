"""After a restart or a fail-over of the server: whether what was read of another program's stream is still there.

Our own topics are lifted above every position that was given before. Other programs do not do that, so a position that
was read may come back with another entry, below the point that we have read up to.
"""

import hashlib
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from onward.brokers.redis.foreign.scripts import VERIFY
from onward.brokers.redis.link import Link
from onward.brokers.redis.member import RedisHold, RedisMember

log = logging.getLogger("onward")


def anchor_of(id_: bytes, fields: Sequence[bytes]) -> tuple[bytes, str]:
    """The id of an entry, and a hash of its fields, as the scripts make it."""
    return id_, hashlib.sha1(b"\0".join(fields), usedforsecurity=False).hexdigest()


def verified(link: Link, member: RedisMember, hold: RedisHold) -> bytes:
    """As SETTLE answers: ok, void, or lost, also if the log is another one now. Asked once of each server."""
    shard, key = hold.own.shard, member.key(hold.partition)
    if shard is None or shard.incarnation == link.incarnation(key):
        return b"ok"
    reply: Any = b"ok"
    if shard.anchor is not None:
        keys = member.keyspace.of(hold.partition)
        arguments = (link.incarnation(key), hold.own.token, *shard.anchor, uuid.uuid4().hex)
        (reply,) = link.call(VERIFY([key, keys.stream, keys.meta], *arguments))
    if isinstance(reply, ResponseError):
        return b"void"
    if reply == b"ok":
        if shard.incarnation and shard.projection is not None:
            shard.projection.reset()
        shard.incarnation = link.incarnation(key)
    if reply == b"moved":
        log.error(
            "%s of group %s begins again at its last entry that is still there: the server lost entries that were "
            "read; its log has a new id",
            *(hold.partition, member.group),
        )
    return bytes(reply)
