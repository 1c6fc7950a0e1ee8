"""Scripts of the log and of settling: publish, trim, count, settle, move."""

from onward.brokers.redis.scripts import ASIDE, BEFORE, HEX, NOW, SPARE, STREAM, Script

_MARK_EVENTS = 256  # between two marks; a publish of many events has one mark

# KEYS stream meta producer marks [relays]; ARGV inc version number allowance shard fence event*. The number of a
# producer grows by one with each call that is stored: one that is asked again is stored once, and nothing is stored
# behind one that was refused. allowance: the bytes that may be unfinished in this partition, in the log and aside. A
# stream that was deleted begins again as another log, because its ids may lie below what its owners have read.
PUBLISH = Script(
    HEX
    + f"local every = {_MARK_EVENTS}\n"
    + """
local m = redis.call('HMGET', KEYS[2], 'inc', 'version', 'bytes', 'count', 'marked', 'done', 'aside', 'largest')
if m[2] ~= ARGV[2] then return {'version', m[2] or ''} end
if m[1] ~= ARGV[1] then return {'void'} end
local number, last, begun = tonumber(ARGV[3]), tonumber(redis.call('GET', KEYS[3]) or '0'), false
if number <= last then return {'ok'} end
if number ~= last + 1 then return {'gap', last} end
if KEYS[5] then
  local seen = redis.call('HGET', KEYS[5], ARGV[5])
  if seen and seen > ARGV[6] then return {'fenced', seen} end
end
if redis.call('EXISTS', KEYS[1]) == 0 then
  begun, m[3], m[4], m[5], m[6] = true, '0', '0', '0', '0'
end
local size, largest = 0, tonumber(m[8] or 0)
for i = 7, #ARGV do
  size = size + #ARGV[i]
  largest = math.max(largest, #ARGV[i])
end
local bytes, count, marked = tonumber(m[3]), tonumber(m[4]), tonumber(m[5])
if bytes - tonumber(m[6]) + tonumber(m[7] or 0) + size > tonumber(ARGV[4]) then return {'full'} end
if KEYS[5] then redis.call('HSET', KEYS[5], ARGV[5], ARGV[6]) end
if begun then
  redis.call('DEL', KEYS[4])
  redis.call('ZADD', KEYS[4], 0, '0000000000000000:0:0')
  redis.call('HSET', KEYS[2], 'log', redis.sha1hex(KEYS[3] .. ' ' .. ARGV[3]):sub(1, 32), 'done', '0')
end
local first, id
for i = 7, #ARGV do
  id = redis.call('XADD', KEYS[1], '*', 'e', ARGV[i])
  first = first or id
end
if count - marked >= every then
  marked = count
  redis.call('ZADD', KEYS[4], 0, string.format('%s:%.0f:%.0f', hex(first), bytes, count))
end
redis.call('HSET', KEYS[2], 'bytes', string.format('%.0f', bytes + size),
  'count', string.format('%.0f', count + #ARGV - 6), 'marked', string.format('%.0f', marked),
  'largest', largest)
redis.call('SET', KEYS[3], string.format('%.0f', number), 'EX', 3600)
local ms, seq = id:match('^(%d+)-(%d+)$')
if tonumber(seq) >= 1048576 then redis.call('XSETID', KEYS[1], string.format('%.0f-0', tonumber(ms) + 1)) end
return {'ok'}
"""
)

# KEYS producer. A late copy of one of its calls stores nothing any more.
SEAL = Script("return redis.call('SET', KEYS[1], '9007199254740991', 'EX', 3600)")

# KEYS relays; ARGV shard fence. Answers the highest fence seen.
SEE = Script("""
local seen = redis.call('HGET', KEYS[1], ARGV[1])
if seen and seen >= ARGV[2] then return seen end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return ARGV[2]
""")

# KEYS stream meta; ARGV inc, read again on this connection, and skew_ms. The server may have lost its last writes, and
# its clock may be behind the lost server's: lift the stream above every position that was given before. So it does if
# another program has removed the incarnation.
OPEN = Script(
    NOW
    + STREAM
    + """
local inc = redis.call('HGET', KEYS[2], 'inc')
if inc == ARGV[1] or redis.call('EXISTS', KEYS[2]) == 0 then return 'ok' end
if redis.call('EXISTS', KEYS[1]) == 0 then make(KEYS[1]) end
local last = tonumber(last_id(KEYS[1]):match('^(%d+)'))
redis.call('XSETID', KEYS[1], string.format('%.0f-0', math.max(now_ms() + tonumber(ARGV[2]), last + 1)))
redis.call('HSET', KEYS[2], 'inc', ARGV[1])
return 'ok'
"""
)

# KEYS stream meta marks; ARGV position. Answers how many events lie there or above, the ms of the first, now, and how
# many events were ever appended before the first.
LAG = Script(
    HEX
    + NOW
    + BEFORE
    + """
local _, count, first = upcoming(KEYS[1], KEYS[2], KEYS[3], ARGV[1])
if not count then return {-1, '', 0, 0} end
local ms = first and first:match('^(%d+)') or ''
return {tonumber(redis.call('HGET', KEYS[2], 'count')) - count, ms, string.format('%.0f', now_ms()), count}
"""
)

# KEYS stream meta marks groups g*. Answers the bytes that some group has not finished, in the log and aside, and which
# group has the most of them.
BACKLOG = Script(
    HEX
    + BEFORE
    + """
local low, at = lowest(4)
if low == 'again' then return {'again'} end
local done = upcoming(KEYS[1], KEYS[2], KEYS[3], low or '0000000000000000')
if not done then return {'ok', 0, 0} end
local unread, aside = tonumber(redis.call('HGET', KEYS[2], 'bytes')) - done, 0
local most = unread
for i = 5, #KEYS do
  local own = tonumber(redis.call('HGET', KEYS[i], 'aside') or 0)
  aside = aside + own
  if own > most then most, at = own, i - 4 end
end
redis.call('HSET', KEYS[2], 'done', string.format('%.0f', done), 'aside', string.format('%.0f', aside))
return {'ok', unread + aside, at or 0}
"""
)

# How many events stay beyond the retention because a group has not finished them. max_events may be math.huge.
_KEPT = """
local function split(mark)
  local h, bytes, count = mark:match('^(%x+):(%d+):(%d+)$')
  return h, tonumber(bytes), tonumber(count)
end
local function mark_at(rank) return split(redis.call('ZRANGE', KEYS[3], rank, rank)[1]) end
local function older(ms) return hex(string.format('%.0f-0', math.max(0, now_ms() - ms))) end
local function kept(total_bytes, total, bytes, count, old, max_bytes, max_events)
  local aged = redis.call('ZREVRANGEBYLEX', KEYS[3], '(' .. old .. ';', '-', 'LIMIT', 0, 1)[1]
  local _, _, due = split(aged or '0:0:0')
  due = math.max(due, total - max_events)
  local over = total_bytes - max_bytes
  if over > bytes then
    local first, last = 0, redis.call('ZCARD', KEYS[3]) - 1
    while first < last do
      local middle = math.ceil((first + last) / 2)
      local _, b = mark_at(middle)
      if b <= over then first = middle else last = middle - 1 end
    end
    local _, _, c = mark_at(first)
    due = math.max(due, c)
  end
  return math.max(0, due - count)
end
"""

# KEYS stream meta marks groups g*; ARGV retention_ms retention_bytes retention_events, which may be empty. Removes
# events before a mark, never above the lowest watermark. Answers how many, and how many are kept beyond the retention.
# -1: the list lacks a group, which may not have finished what would go.
TRIM = Script(
    HEX
    + NOW
    + BEFORE
    + _KEPT
    + """
if redis.call('SCARD', KEYS[4]) < tonumber(redis.call('HGET', KEYS[2], 'groups') or 0) then return {-1, 0} end
local low = lowest(4)
local m = redis.call('HMGET', KEYS[2], 'bytes', 'count')
local marks = redis.call('ZRANGE', KEYS[3], 0, 4)
if low == 'again' or not low or not m[2] or not marks[1] then return {0, 0} end
local old, max_bytes, max_events = older(tonumber(ARGV[1])), tonumber(ARGV[2]), tonumber(ARGV[3]) or math.huge
local bytes, count = before(KEYS[1], KEYS[2], KEYS[3], low)
local _, from_bytes = split(marks[1])
local cut, rank
for i = 2, #marks do
  local h, b, c = split(marks[i])
  if h > low or (h > old and bytes - from_bytes <= max_bytes and count - c < max_events) then break end
  cut, rank, from_bytes = h, i, b
end
local removed = 0
if cut then
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, rank - 2)
  removed = redis.call('XTRIM', KEYS[1], 'MINID', '=', id(cut))
end
return {removed, kept(tonumber(m[1]), tonumber(m[2]), bytes, count, old, max_bytes, max_events)}
"""
)

# KEYS and ARGV as of TRIM. Answers how many events are kept beyond the retention, which group has finished the fewest,
# and for each group how many events were removed before it had read them. Writes nothing.
RETAINED = Script(
    HEX
    + NOW
    + BEFORE
    + _KEPT
    + """
local low, at = lowest(4)
local m = redis.call('HMGET', KEYS[2], 'bytes', 'count')
if low == 'again' or not low or not m[2] or redis.call('ZCARD', KEYS[3]) == 0 then return {0, 0} end
local old, max_bytes, max_events = older(tonumber(ARGV[1])), tonumber(ARGV[2]), tonumber(ARGV[3]) or math.huge
local bytes, count = before(KEYS[1], KEYS[2], KEYS[3], low)
local answer = {kept(tonumber(m[1]), tonumber(m[2]), bytes, count, old, max_bytes, max_events), at}
for i = 5, #KEYS do
  local g = redis.call('HMGET', KEYS[i], 'watermark', 'count')
  local _, appended = upcoming(KEYS[1], KEYS[2], KEYS[3], g[1])
  answer[#answer + 1] = math.max(0, appended - (tonumber(g[2]) or appended))
end
return answer
"""
)

# KEYS g [rows bodies index meta]; ARGV inc token watermark above tries count, number of records, (place row body)*,
# place*. The last ones are of records to remove. watermark may be empty. count: events before it, empty if unknown.
SETTLE = Script(
    SPARE
    + ASIDE
    + """
local h = redis.call('HMGET', KEYS[1], 'inc', 'owner', 'watermark')
if h[2] ~= ARGV[2] then return 'lost' end
if h[1] ~= ARGV[1] then return 'void' end
local i, change = 8, 0
if ARGV[7] == '0' then spare() end
for _ = 1, tonumber(ARGV[7]) do
  change = change - weight(KEYS[2], KEYS[3], ARGV[i])
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 2])
  redis.call('ZADD', KEYS[4], 0, ARGV[i])
  change = change + weight(KEYS[2], KEYS[3], ARGV[i])
  i = i + 3
end
if ARGV[3] ~= '' and ARGV[3] >= h[3] then
  redis.call('HSET', KEYS[1], 'watermark', ARGV[3], 'above', ARGV[4], 'tries', ARGV[5], 'count', ARGV[6])
end
for j = i, #ARGV do
  change = change - weight(KEYS[2], KEYS[3], ARGV[j])
  redis.call('HDEL', KEYS[2], ARGV[j])
  redis.call('HDEL', KEYS[3], ARGV[j])
  redis.call('ZREM', KEYS[4], ARGV[j])
end
weighed(KEYS[1], KEYS[5], change)
return 'ok'
"""
)

# KEYS g rows bodies index meta moves; ARGV (place, row as read, new row or empty to remove, notice)*. Answers 1 for
# each that was still as it was read.
MOVE = Script(
    ASIDE
    + """
local owner, answers, change = redis.call('HGET', KEYS[1], 'owner'), {}, 0
for i = 1, #ARGV, 4 do
  local same = redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[i + 1]
  if same then
    change = change - weight(KEYS[2], KEYS[3], ARGV[i])
    if ARGV[i + 2] == '' then
      redis.call('HDEL', KEYS[2], ARGV[i])
      redis.call('HDEL', KEYS[3], ARGV[i])
      redis.call('ZREM', KEYS[4], ARGV[i])
    else
      redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2])
    end
    if owner and owner ~= '' and ARGV[i + 3] ~= '' then redis.call('RPUSH', KEYS[6], ARGV[i + 3]) end
    change = change + weight(KEYS[2], KEYS[3], ARGV[i])
  end
  answers[#answers + 1] = same and 1 or 0
end
weighed(KEYS[1], KEYS[5], change)
return answers
"""
)

# KEYS news; ARGV ttl_ms. The first write takes no memory, so that it is not refused; see SPARE.
NEWS = Script("""
redis.call('XTRIM', KEYS[1], 'MAXLEN', 1)
redis.call('XADD', KEYS[1], 'MAXLEN', 1, '*', 'n', '1')
if ARGV[1] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
""")

# KEYS g rows bodies index meta; ARGV (place, row as read, new row, new body)*
BURY = Script(
    ASIDE
    + """
local change = 0
for i = 1, #ARGV, 4 do
  if redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[i + 1] then
    change = change - weight(KEYS[2], KEYS[3], ARGV[i])
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2])
    redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 3])
    change = change + weight(KEYS[2], KEYS[3], ARGV[i])
  end
end
weighed(KEYS[1], KEYS[5], change)
"""
)

# KEYS g moves; ARGV token count. The owner has reported so many notices.
HEARD = Script("""
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 'lost' end
redis.call('LTRIM', KEYS[2], ARGV[2], -1)
return 'ok'
""")
