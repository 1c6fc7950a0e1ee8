"""How a script is called, and the Lua functions that several of them use. All checks of a script stand before its first
write: a script that fails half-way is not undone."""

import hashlib
from collections.abc import Sequence
from typing import Any

Command = tuple[Any, ...]

# A position in hex from an entry's id, and back. ms and seq are exact in Lua, their combination is not.
HEX = """
local function hex(id)
  local ms, seq = id:match('^(%d+)-(%d+)$')
  ms, seq = tonumber(ms), tonumber(seq)
  return string.format('%011x%05x', ms * 2 + math.floor(seq / 1048576), seq % 1048576)
end
local function id(h)
  local a = tonumber(h:sub(1, 11), 16)
  return string.format('%.0f-%.0f', math.floor(a / 2), (a % 2) * 1048576 + tonumber(h:sub(12), 16))
end
"""
NOW = """
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
"""
# A server that is out of memory refuses a script whose first write may take more. Leases and progress go on: without
# them nothing could be trimmed. So their first write is one that takes nothing, and does nothing.
SPARE = """
local function spare() redis.call('HDEL', KEYS[1], '') end
"""
# An empty stream, so that a stream that is missing was deleted; and the last id that a stream has given.
STREAM = """
local function make(stream)
  redis.call('XGROUP', 'CREATE', stream, 'onward', '0', 'MKSTREAM')
  redis.call('XGROUP', 'DESTROY', stream, 'onward')
end
local function last_id(stream)
  local x = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #x, 2 do if x[i] == 'last-generated-id' then return x[i + 1] end end
end
"""
# Bytes and events before a position: those before the nearest mark, and what lies between.
BEFORE = """
local function before(stream, marks, h)
  local mark = redis.call('ZREVRANGEBYLEX', marks, '(' .. h .. ';', '-', 'LIMIT', 0, 1)[1]
  local from, bytes, count = '0000000000000000', 0, 0
  if mark then from, bytes, count = mark:match('^(%x+):(%d+):(%d+)$') end
  bytes, count = tonumber(bytes), tonumber(count)
  if from < h then
    for _, entry in ipairs(redis.call('XRANGE', stream, id(from), '(' .. id(h), 'COUNT', 2000)) do
      count = count + 1
      bytes = bytes + #entry[2][2]
    end
  end
  return bytes, count
end
local function lowest(first)
  if redis.call('SCARD', KEYS[first]) ~= #KEYS - first then return 'again' end
  local low, at
  for i = first + 1, #KEYS do
    local w = redis.call('HGET', KEYS[i], 'watermark')
    if not w then return 'again' end
    if not low or w < low then low, at = w, i - first end
  end
  return low, at
end
"""


class Script:
    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        _by_sha[self.sha] = self

    def __call__(self, keys: Sequence[str], *arguments: Any) -> Command:
        return ("EVALSHA", self.sha, len(keys), *keys, *arguments)


_by_sha: dict[str, Script] = {}


def with_text(command: Command) -> Command:
    """The same call for a server that does not know the script."""
    return ("EVAL", _by_sha[command[1]].text, *command[2:])


def keys_of(command: Command) -> Command:
    """The keys of a script, of an XREAD, or of a command with one key."""
    if command[0] in ("EVALSHA", "EVAL"):
        return command[3 : 3 + command[2]]
    if command[0] == "XREAD":
        names = command[command.index("STREAMS") + 1 :]
        return names[: len(names) // 2]
    return command[1:2]
