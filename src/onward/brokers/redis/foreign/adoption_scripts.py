"""Scripts that take over what other consumers of a group have left in a stream. Each checks the owner, and `inc` as in
lease_scripts. They answer `busy` while another consumer has been active in the last idle_ms. If none of the others has
pending entries, calm_ms is enough: there is nothing to take from a live one, and the first settle notices its reads.

All of them have KEYS g stream; ARGV inc token group idle_ms calm_ms."""

from onward.brokers.redis.foreign.scripts import ADDED
from onward.brokers.redis.scripts import HEX, SPARE, Script

# The answer that ends every script here early, or nil; where the group stands; its other consumers.
_GROUP = """
local function refused()
  local h = redis.call('HMGET', KEYS[1], 'inc', 'owner')
  if h[2] ~= ARGV[2] then return {'lost'} end
  if h[1] ~= ARGV[1] then return {'void'} end
end
local function fields(row)
  local found = {}
  for i = 1, #row, 2 do found[row[i]] = row[i + 1] end
  return found
end
local function last_delivered()
  if redis.call('EXISTS', KEYS[2]) == 0 then return nil end
  for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[2])) do
    local group = fields(row)
    if group['name'] == ARGV[3] then return group['last-delivered-id'], group['entries-read'] end
  end
end
local function others()
  local found = {}
  for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[2], ARGV[3])) do
    local consumer = fields(row)
    if consumer['name'] ~= 'onward' then found[#found + 1] = consumer end
  end
  return found
end
local function busy(consumers)
  local names, idles, wait, limit = {}, {}, 0, tonumber(ARGV[5])
  for _, consumer in ipairs(consumers) do
    if consumer['pending'] > 0 then limit = tonumber(ARGV[4]) end
  end
  for _, consumer in ipairs(consumers) do
    local left = limit - consumer['idle']
    if left > 0 then
      names[#names + 1], idles[#idles + 1] = consumer['name'], consumer['idle']
      wait = math.max(wait, left)
    end
  end
  if #names > 0 then return {'busy', wait, names, idles, limit} end
end
"""

# KEYS and ARGV as above, then start and count of the page. Answers the last id that the group was given, whether it was
# adopted before, the last id that we gave out, and of each pending entry its id, how often it was delivered, and its
# kind: o is ours, t is of another consumer, O and T are missing in the stream. Entries before its first one were
# trimmed. Others can only be missing up to the last deleted id, which 6.2 does not know.
LOOK = Script(
    _GROUP
    + """
local no = refused()
if no then return no end
local last = last_delivered()
if not last then return {'group'} end
no = busy(others())
if no then return no end
local stream = fields(redis.call('XINFO', 'STREAM', KEYS[2]))
local function parsed(id)
  local ms, seq = id:match('^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end
local function is_before(id, than)
  local ms, seq = parsed(id)
  local ms2, seq2 = parsed(than)
  return ms < ms2 or (ms == ms2 and seq < seq2)
end
local first, deleted = stream['first-entry'] and stream['first-entry'][1], stream['max-deleted-entry-id']
local trims, deletes = true, true
local function is_missing(id)
  if not first then return true end
  trims = trims and is_before(id, first)
  if trims then return true end
  deletes = deletes and not (deleted and is_before(deleted, id))
  return deletes and #redis.call('XRANGE', KEYS[2], id, id) == 0
end
local ids, counts, kinds = {}, {}, {}
for i, entry in ipairs(redis.call('XPENDING', KEYS[2], ARGV[3], ARGV[6], '+', ARGV[7])) do
  ids[i], counts[i] = entry[1], entry[4]
  local kind = entry[2] == 'onward' and 'o' or 't'
  kinds[i] = is_missing(entry[1]) and kind:upper() or kind
end
local h = redis.call('HMGET', KEYS[1], 'adopted', 'setid')
return {'page', last, h[1], h[2], ids, counts, table.concat(kinds)}
"""
)

# KEYS and ARGV as above, then number of ids to take, id*, id* to acknowledge. Answers how many were
# taken.
TAKE = Script(
    _GROUP
    + """
local no = refused()
if no then return no end
if not last_delivered() then return {'group'} end
local takes = tonumber(ARGV[6])
local function runs(from, to, call)
  for i = from, to, 1000 do call(i, math.min(i + 999, to)) end
end
runs(7 + takes, #ARGV, function(i, j) redis.call('XACK', KEYS[2], ARGV[3], unpack(ARGV, i, j)) end)
local taken = 0
runs(7, 6 + takes, function(i, j)
  local call = {'XCLAIM', KEYS[2], ARGV[3], 'onward', ARGV[4], unpack(ARGV, i, j)}
  call[#call + 1] = 'JUSTID'
  taken = taken + #redis.call(unpack(call))
end)
return {'ok', taken}
"""
)

# KEYS and ARGV as above, then the last id that was given out, watermark above tries count, the last id that it should
# be, or empty: another program may have set it back; and what others have left. Stores the progress that was found,
# unless the group has moved on since. Removes consumers that hold nothing: with a consumer that holds entries, they
# would be lost. A count that is empty is found out, if the server knows it. Answers the count, or empty, and how many
# entries were removed since the group was adopted before, and never read.
ADOPTED = Script(
    HEX
    + _GROUP
    + SPARE
    + ADDED
    + """
local no = refused()
if no then return no end
local last, read = last_delivered()
if not last then return {'group'} end
local consumers = others()
no = busy(consumers)
if no then return no end
if last ~= ARGV[6] then return {'again'} end
for _, consumer in ipairs(consumers) do
  if consumer['pending'] > 0 then return {'again'} end
end
spare()
local missing = 0
if ARGV[11] ~= '' then
  read = ARGV[11] == last and read
  last = ARGV[11]
end
local given = added_before(KEYS[2], '(' .. last)
if given and read and redis.call('HGET', KEYS[1], 'adopted') then missing = math.max(0, given - read) end
given = given or read
local count = added_before(KEYS[2], id(ARGV[7])) or tonumber(ARGV[10])
if not count and given then
  local rows = redis.call('XRANGE', KEYS[2], id(ARGV[7]), last, 'COUNT', counted)
  count = #rows < counted and given - #rows
end
count = count and string.format('%.0f', count) or ''
set_id(KEYS[2], ARGV[3], last, given and string.format('%.0f', given) or '')
redis.call('HSET', KEYS[1], 'watermark', ARGV[7], 'above', ARGV[8], 'tries', ARGV[9], 'count', count)
redis.call('HSET', KEYS[1], 'setid', last, 'adopted', '1', 'left', ARGV[12])
for _, consumer in ipairs(consumers) do
  redis.call('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[3], consumer['name'])
end
return {'ok', count, missing}
"""
)

# KEYS and ARGV as above. Removes consumers that are idle and hold nothing. Answers the names of
# those that are active, and of those that are idle and hold entries.
OTHERS = Script(
    _GROUP
    + """
local no = refused()
if no then return no end
if not last_delivered() then return {'group'} end
local active, idle = {}, {}
for _, consumer in ipairs(others()) do
  if consumer['idle'] < tonumber(ARGV[4]) then
    active[#active + 1] = consumer['name']
  elseif consumer['pending'] > 0 then
    idle[#idle + 1] = consumer['name']
  else
    redis.call('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[3], consumer['name'])
  end
end
return {'ok', active, idle}
"""
)
