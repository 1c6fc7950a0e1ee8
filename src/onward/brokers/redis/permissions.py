"""Which commands a user lacks. From Redis 7.0 on a script can ask for each whether its user may run it; an older server
shows it when the command is queued in a transaction, which is then discarded. Pure."""

from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from onward.brokers.redis.scripts import Command

# As they could be sent: a server looks at the number of arguments before it looks at permissions.
_CALLS = """
DEL {key} | EXISTS {key} | GET {key} | HDEL {key} a | HGET {key} a | HGETALL {key} | HINCRBY {key} a 1 | HLEN {key}
HMGET {key} a | HSET {key} a b | HSETNX {key} a b | LLEN {key} | LRANGE {key} 0 0 | LTRIM {key} 0 0 | PEXPIRE {key} 1
RPUSH {key} a | SADD {key} a | SCARD {key} | SISMEMBER {key} a | SET {key} a | SMEMBERS {key} | SREM {key} a
TIME | TYPE {key}
UNLINK {key} | XADD {key} * a b | XGROUP CREATE {key} a 0 | XINFO STREAM {key} | XLEN {key} | XRANGE {key} - +
XREAD STREAMS {key} 0 | XREVRANGE {key} + - | XSETID {key} 0-1 | XTRIM {key} MAXLEN 0 | ZADD {key} 0 a
HEXISTS {key} a | HSTRLEN {key} a | MEMORY USAGE {key} | XACK {key} a 0 | XCLAIM {key} a b 0 0 | XPENDING {key} a
ZCARD {key} | ZRANGE {key} 0 0 | ZRANGEBYLEX {key} - +
ZREM {key} a | ZREMRANGEBYRANK {key} 0 0 | ZREVRANGEBYLEX {key} + -
"""
_ASK = """
local missing = {}
for i = 1, #ARGV do
  local words = {}
  for word in ARGV[i]:gmatch('%S+') do words[#words + 1] = word end
  if not redis.acl_check_cmd(unpack(words)) then missing[#missing + 1] = words[1] end
end
return missing
"""

_NEARLY_ALL = 0.9

TRIALS: tuple[Command, ...] = tuple(
    tuple(call.replace("{key}", "{onward:0}").split()) for call in _CALLS.strip().replace("\n", "|").split("|")
)
PROBE: Command = ("EVAL", _ASK, 0, *(" ".join(trial) for trial in TRIALS))


def missing(reply: Any) -> list[str] | None:
    """The commands that the user may not run, by the answer to PROBE. None: the server is too old to answer."""
    if isinstance(reply, ResponseError):
        return None if "acl_check_cmd" in str(reply) else []
    return [name.decode() for name in reply]


def refused(replies: Sequence[Any]) -> list[str]:
    """The commands that the user may not run, by the answers to TRIALS in a transaction."""
    answers = zip(TRIALS, replies, strict=True)
    return [name for (name, *_), reply in answers if isinstance(reply, NoPermissionError)]


def lacking(names: Sequence[str]) -> str:
    """What the user needs, by the commands that it may not run."""
    keyed = {trial[0] for trial in TRIALS if len(trial) > 1}
    if len(keyed.intersection(names)) > _NEARLY_ALL * len(keyed):  # then it is the keys, not the commands
        return "the user has no permission for keys that begin with {; add the key pattern ~{* with ACL SETUSER"
    return (
        f"the user has no permission for {', '.join(names)}; grant it with ACL SETUSER, for the keys ~{{* and ~onward:*"
    )


def foreign_keys(keys: Sequence[str]) -> list[str]:
    """Those of other programs: the patterns for our own keys do not cover them."""
    return [key for key in keys if not key.startswith(("{", "onward:"))]


def is_denied_key(reply: object) -> bool:
    return isinstance(reply, NoPermissionError) and "command" not in str(reply)


def is_denied_in_script(reply: object) -> bool:
    """The server does not say which command it was."""
    return isinstance(reply, ResponseError) and "user executing the script" in str(reply)
