"""How a script is called, and the Lua functions that several of them use. All checks of a script stand before its first
write: a script that fails half-way is not undone."""

import hashlib
from collections.abc import Sequence
from typing import Any

Command = tuple[Any, ...]

# A position in hex from an entry's id, and back. ms and seq are exact in Lua, their combination is not. An id that does
# not fit into a position is above all of them.
HEX = """
local function hex(id)
  local ms, seq = id:match('^(%d+)-(%d+)$')
  ms, seq = tonumber(ms), tonumber(seq)
  if ms >= 4398046511104 or seq > 2097152 then return 'ffffffffffffffff' end
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
# How many bytes and events were ever appended before a position. It counts back from the next mark, or from the end, so
# that it is exact also when another program has removed the entries before the position. nil: nothing counts here.
BEFORE = """
local function before(stream, meta, marks, h)
  local m = redis.call('HMGET', meta, 'bytes', 'count')
  if not m[2] then return nil end
  local stop, bytes, count = '+', tonumber(m[1]), tonumber(m[2])
  local mark = redis.call('ZRANGEBYLEX', marks, '[' .. h, '+', 'LIMIT', 0, 1)[1]
  if mark then
    local at, b, c = mark:match('^(%x+):(%d+):(%d+)$')
    if at == h then return tonumber(b), tonumber(c) end
    stop, bytes, count = '(' .. id(at), tonumber(b), tonumber(c)
  end
  for _, entry in ipairs(redis.call('XRANGE', stream, id(h), stop, 'COUNT', 2000)) do
    count = count - 1
    bytes = bytes - #entry[2][2]
  end
  return bytes, count
end
-- Of the first entry that is there at a position or above: what was appended before it, and the entry.
local function upcoming(stream, meta, marks, h)
  local first = redis.call('XRANGE', stream, id(h), '+', 'COUNT', 1)[1]
  if first then
    local bytes, count = before(stream, meta, marks, hex(first[1]))
    return bytes, count, first[1]
  end
  local m = redis.call('HMGET', meta, 'bytes', 'count')
  return tonumber(m[1]), tonumber(m[2]), nil
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


# The bytes of a record that wait or are held. A row begins with its state, see aside_rows.RecordRow.
ASIDE = """
local function weight(rows, bodies, place)
  local row = redis.call('HGET', rows, place)
  if not row or row:sub(3, 6) == 'dead' then return 0 end
  return redis.call('HSTRLEN', bodies, place)
end
local function weighed(g, meta, change)
  if change == 0 then return end
  for _, key in ipairs({g, meta}) do
    if redis.call('HEXISTS', key, 'log') == 1 then redis.call('HINCRBY', key, 'aside', change) end
  end
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
    if command[0] in ("XINFO", "XGROUP"):
        return command[2:3]
    if command[0] in ("EVALSHA", "EVAL"):
        return command[3 : 3 + command[2]]
    if command[0] == "XREAD":
        names = command[command.index("STREAMS") + 1 :]
        return names[: len(names) // 2]
    return command[1:2]
