"""Which commands a user lacks. From Redis 7.0 on a script can ask for each whether its user may run it. Pure."""

from typing import Any

from redis.exceptions import ResponseError

from onward.brokers.redis.scripts import Command

_OF_KEYS = ("DEL", "EXISTS")  # all their arguments are keys
_COMMANDS = ("HDEL", "HGET", "HGETALL", "HINCRBY", "HMGET", "HSET", "HSETNX", "LRANGE", "LTRIM", "PEXPIRE", "RPUSH")
_MORE = ("SADD", "SCARD", "SET", "SMEMBERS", "SREM", "XADD", "XLEN", "XRANGE", "XREAD", "XSETID", "XTRIM", "ZADD")
_SORTED = ("ZRANGE", "ZRANGEBYLEX", "ZREM", "ZREMRANGEBYRANK", "ZREVRANGEBYLEX")
_ASK = f"""
local missing = {{}}
for i = 1, #ARGV do
  local may
  if i <= {len(_OF_KEYS)} then may = redis.acl_check_cmd(ARGV[i], '{{onward:0}}')
  else may = redis.acl_check_cmd(ARGV[i], '{{onward:0}}', 'a', 'b', 'c') end
  if not may then missing[#missing + 1] = ARGV[i] end
end
return missing
"""

PROBE: Command = ("EVAL", _ASK, 0, *_OF_KEYS, *_COMMANDS, *_MORE, *_SORTED)


def missing(reply: Any) -> list[str]:
    """The commands that the user may not run, by the answer to PROBE; none where an older server cannot tell."""
    return [] if isinstance(reply, ResponseError) else [name.decode() for name in reply]


def is_denied_in_script(reply: object) -> bool:
    """The server does not say which command it was."""
    return isinstance(reply, ResponseError) and "user executing the script" in str(reply)
