"""Scripts for streams of other programs. They do what the scripts of our own topics do, and keep a real consumer group
beside our progress: its last-delivered id is what was handed out, its pending list what is open.

In the hash of a group, `setid` is the last-delivered id that we wrote. If the group has another one, another consumer
reads it.
"""

from onward.brokers.redis.lease_scripts import CLAIM, JOIN
from onward.brokers.redis.log_scripts import SETTLE
from onward.brokers.redis.scripts import BEFORE, HEX, NOW, STREAM, Script

CONSUMER = "onward"  # the one consumer of ours in every group
_MOST_IDS = 1_000  # in one command of a script
_COUNTED = 200  # entries that are counted one by one

# The last-delivered id of a group, nil if there is none; and the id before a position.
_GROUP = """
local function delivered(stream, group)
  for _, row in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local f = {}
    for i = 1, #row, 2 do f[row[i]] = row[i + 1] end
    if f['name'] == group then return f['last-delivered-id'] end
  end
end
local function below(h)
  local ms, seq = id(h):match('^(%d+)-(%d+)$')
  if seq ~= '0' then return ms .. '-' .. string.format('%.0f', tonumber(seq) - 1) end
  if ms == '0' then return '0-0' end
  return string.format('%.0f-2097151', tonumber(ms) - 1)
end
"""
# An anchor is the id of an entry that was read, and a hash of its fields. Whether the entry is still there, or was
# removed on purpose, and not lost by a server that was replaced. `anchors` are pairs, the newest first, a second apart.
# A 6.2 server does not say what was removed. A stored anchor was written after its entry, so the entry was not lost.
_ANCHOR = """
local function hash(entry) return redis.sha1hex(table.concat(entry[2], '\\0')) end
local function fits(stream, at, sum, stored)
  if redis.call('EXISTS', stream) == 0 then return false end
  local entry = redis.call('XRANGE', stream, at, at)[1]
  if entry then return hash(entry) == sum end
  local info, x = {}, redis.call('XINFO', 'STREAM', stream)
  for i = 1, #x, 2 do info[x[i]] = x[i + 1] end
  if hex(info['last-generated-id']) < hex(at) then return false end
  local first, deleted = info['first-entry'], info['max-deleted-entry-id']
  if not first or hex(first[1]) > hex(at) then return true end
  if not deleted then return stored end
  return hex(deleted) >= hex(at)
end
local function anchored(anchors, entry)
  local found = {}
  for word in anchors:gmatch('%S+') do found[#found + 1] = word end
  local function ms(word) return tonumber(word:match('^(%d+)')) end
  if found[3] and ms(found[1]) - ms(found[3]) < 1000 then
    found[1], found[2] = entry[1], hash(entry)
  elseif found[1] ~= entry[1] then
    table.insert(found, 1, hash(entry))
    table.insert(found, 1, entry[1])
  end
  return table.concat(found, ' ', 1, math.min(#found, 8))
end
-- The newest anchor that fits, as a position, or the beginning; whether it is the newest of all; it and the older ones.
local function last_fit(stream, anchors)
  local newest = true
  while anchors ~= '' do
    local at, sum, older = anchors:match('^(%S+) (%S+) ?(.*)$')
    if fits(stream, at, sum, true) then return hex(at), newest, anchors end
    newest, anchors = false, older
  end
  return '0000000000000000', newest, ''
end
"""
# How many entries were ever added before an id, as XRANGE takes it. It is exact near either end of the stream, and nil
# elsewhere, and on a 6.2 server, which does not count. Also the entries from there on, `counted` at most, and what the
# server says of the stream. And: set a group's last-delivered id and what it has read, which
# may be empty: unknown. A 6.2 server does not take that.
ADDED = (
    f"local counted = {_COUNTED}"
    """
local function added_before(stream, from)
  local info, x = {}, redis.call('XINFO', 'STREAM', stream)
  for i = 1, #x, 2 do info[x[i]] = x[i + 1] end
  local added = info['entries-added']
  local rows = redis.call('XRANGE', stream, from, '+', 'COUNT', counted)
  if added and rows[1] and rows[1][1] == info['first-entry'][1] then
    added = added - info['length']
  else
    added = added and #rows < counted and added - #rows or nil
  end
  return added, rows, info
end
local function set_id(stream, group, at, read)
  local done = read ~= '' and redis.pcall('XGROUP', 'SETID', stream, group, at, 'ENTRIESREAD', read)
  if not done or done['err'] then redis.call('XGROUP', 'SETID', stream, group, at) end
end
"""
)


def _inside(name: str, script: Script) -> str:
    """A script as a function within another one."""
    return f"local function {name}(KEYS, ARGV)\n{script.text}\nend\n"


# KEYS stream meta; ARGV inc log version. Makes what is missing; answers the version and the log that are stored.
DECLARE_STREAM = Script(
    STREAM
    + """
local m = redis.call('HMGET', KEYS[2], 'version', 'log')
if m[1] and m[2] then return m end
if redis.call('EXISTS', KEYS[1]) == 0 then make(KEYS[1]) end
redis.call('HSET', KEYS[2], 'inc', ARGV[1], 'log', ARGV[2], 'version', ARGV[3])
return {ARGV[3], ARGV[2]}
"""
)

# As JOIN. ARGV[6]: 1 for a real group, which starts where its consumers were, if there were any.
JOIN_STREAM = Script(
    HEX
    + STREAM
    + _GROUP
    + _inside("join", JOIN)
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then make(KEYS[1]) end
if ARGV[6] == '' or redis.call('EXISTS', KEYS[3]) == 1 then return join(KEYS, ARGV) end
local at = delivered(KEYS[1], ARGV[4])
if at then
  local ms, seq = at:match('^(%d+)-(%d+)$')
  ARGV[3] = hex(ms .. '-' .. string.format('%.0f', tonumber(seq) + 1))
end
local answer = join(KEYS, ARGV)
if answer == 'log' or answer == 'known' then return answer end
if not at then
  at = below(answer)
  redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[4], at)
end
redis.call('HSET', KEYS[3], 'setid', at)
return answer
"""
)

# As CLAIM. ARGV[9]: the real group, or empty. A group that is missing is created where our progress is. If what was
# read is lost, the log is another one, and the progress goes back to the last anchor that fits. If another group has
# found that out, the progress stays as far as it fits.
CLAIM_STREAM = Script(
    HEX
    + _GROUP
    + _ANCHOR
    + _inside("claim", CLAIM)
    + """
local names = {'watermark', 'above', 'tries', 'count'}
local old, anchors = redis.call('HMGET', KEYS[1], unpack(names)), redis.call('HGET', KEYS[1], 'anchors') or ''
local answer = claim(KEYS, ARGV)
if answer[1] ~= 'ok' or ARGV[9] == '' then return answer end
local back, whole, fitting = last_fit(KEYS[3], anchors)
if anchors ~= '' and answer[4] ~= 'missing' and not (whole and answer[4] == '') then
  if answer[4] == '' then
    answer[3], answer[4] = ARGV[8], 'shorter'
    redis.call('HSET', KEYS[2], 'log', ARGV[8])
    redis.call('HSET', KEYS[1], 'log', ARGV[8])
  end
  if not whole then old = {back < old[1] and back or old[1], '', '', ''} end
  answer[5] = old
  for i, name in ipairs(names) do redis.call('HSET', KEYS[1], name, old[i] or '') end
  redis.call('HSET', KEYS[1], 'anchors', fitting)
end
local at = delivered(KEYS[3], ARGV[9])
if not at then
  at = below(answer[5][1])
  redis.call('XGROUP', 'CREATE', KEYS[3], ARGV[9], at)
  redis.call('HSET', KEYS[1], 'setid', at)
elseif answer[4] ~= '' then
  redis.call('HSET', KEYS[1], 'setid', at, 'left', '')
end
return answer
"""
)

# KEYS stream, then those of SETTLE, with rows if there are ids to acknowledge; ARGV group, id handed out last, how many
# entries were added up to it (empty: unknown; a 6.2 server does not take it), number of runs, (delivery count, number
# of ids, id*)*, number of ids to acknowledge, id*, then those of SETTLE. First it settles. An entry whose record is
# waiting or held is open: it stays pending, and its id is in the answer.
SETTLE_STREAM = Script(
    HEX
    + _GROUP
    + _ANCHOR
    + ADDED
    + _inside("settle", SETTLE)
    + f"local most, consumer = {_MOST_IDS}, '{CONSUMER}'\n"
    + """
local runs, i = {}, 5
for r = 1, tonumber(ARGV[4]) do
  local n = tonumber(ARGV[i + 1])
  runs[r] = {ARGV[i], i + 2, i + 1 + n}
  i = i + 2 + n
end
local first, last = i + 1, i + tonumber(ARGV[i])
local names, rest = {}, {}
for j = 2, #KEYS do names[j - 1] = KEYS[j] end
for j = last + 1, #ARGV do rest[#rest + 1] = ARGV[j] end

local answer = settle(names, rest)
if answer ~= 'ok' or redis.call('EXISTS', KEYS[1]) == 0 then return {answer} end
local at, state = delivered(KEYS[1], ARGV[1]), 'ok'
local h = redis.call('HMGET', KEYS[2], 'setid', 'watermark', 'log')
if not at then
  state, at = 'created', below(h[2])
  redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], at)
elseif at ~= h[1] then
  local others = {'foreign'}
  for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    for j = 1, #row, 2 do if row[j] == 'name' and row[j + 1] ~= consumer then others[#others + 1] = row[j + 1] end end
  end
  return others
end
if hex(ARGV[2]) > hex(at) or (ARGV[2] == at and ARGV[3] ~= '') then
  at = ARGV[2]
  set_id(KEYS[1], ARGV[1], at, ARGV[3])
end
redis.call('HSET', KEYS[2], 'setid', at)
local entry = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])[1]
if entry then redis.call('HSET', KEYS[2], 'anchors', anchored(redis.call('HGET', KEYS[2], 'anchors') or '', entry)) end
for _, run in ipairs(runs) do
  for from = run[2], run[3], most do
    local c = {'XCLAIM', KEYS[1], ARGV[1], consumer, 0, unpack(ARGV, from, math.min(from + most - 1, run[3]))}
    for _, word in ipairs({'RETRYCOUNT', run[1], 'FORCE', 'JUSTID'}) do c[#c + 1] = word end
    redis.call(unpack(c))
  end
end
local reply, acks = {state}, {}
local has_rows = first <= last and redis.call('EXISTS', KEYS[3]) == 1
for j = first, last do
  local row = has_rows and redis.call('HGET', KEYS[3], hex(ARGV[j]) .. ':' .. h[3])
  local out = row and row:sub(3, 6) ~= 'dead' and reply or acks
  out[#out + 1] = ARGV[j]
end
for from = 1, #acks, most do
  redis.call('XACK', KEYS[1], ARGV[1], unpack(acks, from, math.min(from + most - 1, #acks)))
end
return reply
"""
)

# KEYS g stream meta; ARGV inc, token, id and hash of the entry that was read last, the id of a new log. After a restart
# or a fail-over: what was read may be lost, and its position may come back with another entry. Then the log is another
# one, and the progress goes back to the last anchor that fits.
VERIFY = Script(
    HEX
    + _ANCHOR
    + """
local h = redis.call('HMGET', KEYS[1], 'inc', 'owner', 'watermark', 'anchors')
if h[2] ~= ARGV[2] then return 'lost' end
if h[1] ~= ARGV[1] then return 'void' end
if fits(KEYS[2], ARGV[3], ARGV[4], false) then return 'ok' end
redis.call('HSET', KEYS[3], 'log', ARGV[5])
redis.call('HSET', KEYS[1], 'log', ARGV[5])
local back, whole, fitting = last_fit(KEYS[2], h[4] or '')
if not whole then
  redis.call('HSET', KEYS[1], 'watermark', back < h[3] and back or h[3], 'above', '', 'tries', '', 'count', '')
  redis.call('HSET', KEYS[1], 'anchors', fitting)
end
return 'moved'
"""
)

# As PUBLISH. KEYS stream meta producer [relays]; ARGV version number shard fence event*. An event is field names and
# values, each behind its length. Other programs write here too: there are no marks, no limit, and ids are left alone.
PUBLISH_STREAM = Script("""
local function fields(data)
  local found, at = {}, 1
  while at <= #data do found[#found + 1], at = struct.unpack('>I4c0', data, at) end
  return unpack(found)
end
local version = redis.call('HGET', KEYS[2], 'version')
if version ~= ARGV[1] then return {'version', version or ''} end
local number, last = tonumber(ARGV[2]), tonumber(redis.call('GET', KEYS[3]) or '0')
if number <= last then return {'ok'} end
if number ~= last + 1 then return {'gap', last} end
if KEYS[4] then
  local seen = redis.call('HGET', KEYS[4], ARGV[3])
  if seen and seen > ARGV[4] then return {'fenced', seen} end
  redis.call('HSET', KEYS[4], ARGV[3], ARGV[4])
end
for i = 5, #ARGV do redis.call('XADD', KEYS[1], '*', fields(ARGV[i])) end
redis.call('SET', KEYS[3], string.format('%.0f', number), 'EX', 3600)
return {'ok'}
""")

# As LAG. KEYS stream; ARGV position, events before it as the owner has counted them, or empty. Near either end of the
# stream the count is exact. In between the owner's own count decides, and a 6.2 server, which counts nothing, knows
# none. Then what was appended before the position is empty, too.
LAG_STREAM = Script(
    HEX
    + NOW
    + ADDED
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return {-1, '', 0, ''} end
local appended, rows, info = added_before(KEYS[1], id(ARGV[1]))
local first, unread, added = rows[1] and rows[1][1], #rows, info['entries-added']
if first and first == info['first-entry'][1] then
  unread = info['length']
elseif #rows == counted then
  unread = added and ARGV[2] ~= '' and math.max(counted, added - tonumber(ARGV[2])) or -1
end
return {unread, first and first:match('^(%d+)') or '', string.format('%.0f', now_ms()), appended or ''}
"""
)

# As TRIM. KEYS stream groups g*; ARGV retention_ms retention_bytes retention_events, which may be empty. Removes
# entries below the watermarks, and below the lowest pending and the last-delivered id of every group, also of others.
TRIM_STREAM = Script(
    HEX
    + NOW
    + BEFORE
    + f"local most = {_MOST_IDS}\n"
    + """
local low, length = lowest(2), redis.call('XLEN', KEYS[1])
if low == 'again' or not low or length == 0 then return {0, 0} end
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local f = {}
  for i = 1, #row, 2 do f[row[i]] = row[i + 1] end
  local pending = redis.call('XPENDING', KEYS[1], f['name'])[2]
  for _, each in ipairs({f['last-delivered-id'], pending or nil}) do
    if hex(each) < low then low = hex(each) end
  end
end
local cut = hex(string.format('%.0f-0', math.max(0, now_ms() - tonumber(ARGV[1]))))
local size = redis.call('MEMORY', 'USAGE', KEYS[1])
local spare = math.max(length - (tonumber(ARGV[3]) or length), math.floor(length * (1 - tonumber(ARGV[2]) / size)))
if spare > 0 then
  local rows = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', math.min(spare, most) + 1)
  local h = hex(rows[#rows][1])
  if h > cut then cut = h end
end
if low < cut then cut = low end
return {redis.call('XTRIM', KEYS[1], 'MINID', '~', id(cut), 'LIMIT', most), 0}
"""
)
