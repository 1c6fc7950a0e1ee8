"""Scripts of the log and of settling: publish, trim, count, settle, move."""

from onward.brokers.redis.scripts import BEFORE, HEX, NOW, SPARE, STREAM, Script

_MARK_EVENTS = 256  # between two marks; a publish of many events has one mark

# KEYS stream meta producer marks [relays]; ARGV inc version number allowance shard fence event*. The number of a
# producer grows by one with each call that is stored: one that is asked again is stored once, and nothing is stored
# behind one that was refused. allowance: the bytes that may be unfinished in this partition.
PUBLISH = Script(
    HEX
    + f"local every = {_MARK_EVENTS}\n"
    + """
local m = redis.call('HMGET', KEYS[2], 'inc', 'version', 'bytes', 'count', 'marked', 'done')
if m[2] ~= ARGV[2] then return {'version', m[2] or ''} end
if m[1] ~= ARGV[1] then return {'void'} end
local number, last = tonumber(ARGV[3]), tonumber(redis.call('GET', KEYS[3]) or '0')
if number <= last then return {'ok'} end
if number ~= last + 1 then return {'gap', last} end
if KEYS[5] then
  local seen = redis.call('HGET', KEYS[5], ARGV[5])
  if seen and seen > ARGV[6] then return {'fenced', seen} end
end
local size = 0
for i = 7, #ARGV do size = size + #ARGV[i] end
local bytes, count, marked = tonumber(m[3]), tonumber(m[4]), tonumber(m[5])
if bytes - tonumber(m[6]) + size > tonumber(ARGV[4]) then return {'full'} end
if KEYS[5] then redis.call('HSET', KEYS[5], ARGV[5], ARGV[6]) end
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
  'count', string.format('%.0f', count + #ARGV - 6), 'marked', string.format('%.0f', marked))
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
# its clock may be behind the lost server's: lift the stream above every position that was given before.
OPEN = Script(
    NOW
    + STREAM
    + """
local inc = redis.call('HGET', KEYS[2], 'inc')
if not inc or inc == ARGV[1] then return 'ok' end
if redis.call('EXISTS', KEYS[1]) == 0 then make(KEYS[1]) end
local last = tonumber(last_id(KEYS[1]):match('^(%d+)'))
redis.call('XSETID', KEYS[1], string.format('%.0f-0', math.max(now_ms() + tonumber(ARGV[2]), last + 1)))
redis.call('HSET', KEYS[2], 'inc', ARGV[1])
return 'ok'
"""
)

# KEYS stream meta marks; ARGV position. Answers how many events lie there or above, the ms of the first, and now.
LAG = Script(
    HEX
    + NOW
    + BEFORE
    + """
local total = tonumber(redis.call('HGET', KEYS[2], 'count'))
if not total then return {-1, '', 0} end
local first = redis.call('XRANGE', KEYS[1], id(ARGV[1]), '+', 'COUNT', 1)[1]
if not first then return {0, '', 0} end
local _, count = before(KEYS[1], KEYS[3], hex(first[1]))
return {total - count, first[1]:match('^(%d+)'), string.format('%.0f', now_ms())}
"""
)

# KEYS stream meta marks groups g*. Answers the bytes that some group has not finished, and which group is the slowest.
BACKLOG = Script(
    HEX
    + BEFORE
    + """
local low, at = lowest(4)
if low == 'again' then return {'again'} end
local total, done = tonumber(redis.call('HGET', KEYS[2], 'bytes') or '0'), nil
local first = redis.call('XRANGE', KEYS[1], low and id(low) or '-', '+', 'COUNT', 1)[1]
done = total
if first then done = before(KEYS[1], KEYS[3], hex(first[1])) end
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], 'done', string.format('%.0f', done)) end
return {'ok', total - done, at or 0}
"""
)

# KEYS stream meta marks groups g*; ARGV retention_ms retention_bytes. Removes events before a mark, never above the
# lowest watermark. Answers how many.
TRIM = Script(
    HEX
    + NOW
    + BEFORE
    + """
local low = lowest(4)
if low == 'again' or not low then return 0 end
local marks = redis.call('ZRANGE', KEYS[3], 0, 4)
local finished = before(KEYS[1], KEYS[3], low)
local old = hex(string.format('%.0f-0', math.max(0, now_ms() - tonumber(ARGV[1]))))
local cut, rank
local kept = tonumber(marks[1]:match('^%x+:(%d+)'))
for i = 2, #marks do
  local h, bytes = marks[i]:match('^(%x+):(%d+)')
  if h > low or (h > old and finished - kept <= tonumber(ARGV[2])) then break end
  cut, rank, kept = h, i, tonumber(bytes)
end
if not cut then return 0 end
redis.call('ZREMRANGEBYRANK', KEYS[3], 0, rank - 2)
return redis.call('XTRIM', KEYS[1], 'MINID', '=', id(cut))
"""
)

# KEYS g [rows bodies index]; ARGV inc token watermark above tries, number of records, (place row body)*, place*. The
# last ones are of records to remove. watermark may be empty.
SETTLE = Script(
    SPARE
    + """
local h = redis.call('HMGET', KEYS[1], 'inc', 'owner', 'watermark')
if h[2] ~= ARGV[2] then return 'lost' end
if h[1] ~= ARGV[1] then return 'void' end
local i = 7
if ARGV[6] == '0' then spare() end
for _ = 1, tonumber(ARGV[6]) do
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 2])
  redis.call('ZADD', KEYS[4], 0, ARGV[i])
  i = i + 3
end
if ARGV[3] ~= '' and ARGV[3] >= h[3] then
  redis.call('HSET', KEYS[1], 'watermark', ARGV[3], 'above', ARGV[4], 'tries', ARGV[5])
end
for j = i, #ARGV do
  redis.call('HDEL', KEYS[2], ARGV[j])
  redis.call('HDEL', KEYS[3], ARGV[j])
  redis.call('ZREM', KEYS[4], ARGV[j])
end
return 'ok'
"""
)

# KEYS g rows bodies index moves; ARGV (place, row as read, new row or empty to remove, notice)*. Answers 1 for each
# that was still as it was read.
MOVE = Script("""
local owner, answers = redis.call('HGET', KEYS[1], 'owner'), {}
for i = 1, #ARGV, 4 do
  local same = redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[i + 1]
  if same then
    if ARGV[i + 2] == '' then
      redis.call('HDEL', KEYS[2], ARGV[i])
      redis.call('HDEL', KEYS[3], ARGV[i])
      redis.call('ZREM', KEYS[4], ARGV[i])
    else
      redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2])
    end
    if owner and owner ~= '' and ARGV[i + 3] ~= '' then redis.call('RPUSH', KEYS[5], ARGV[i + 3]) end
  end
  answers[#answers + 1] = same and 1 or 0
end
return answers
""")

# KEYS news; ARGV ttl_ms. The first write takes no memory, so that it is not refused; see SPARE.
NEWS = Script("""
redis.call('XTRIM', KEYS[1], 'MAXLEN', 1)
redis.call('XADD', KEYS[1], 'MAXLEN', 1, '*', 'n', '1')
if ARGV[1] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
""")

# KEYS rows bodies; ARGV (place, row as read, new row, new body)*
BURY = Script("""
for i = 1, #ARGV, 4 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 3])
  end
end
""")

# KEYS g moves; ARGV token count. The owner has reported so many notices.
HEARD = Script("""
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 'lost' end
redis.call('LTRIM', KEYS[2], ARGV[2], -1)
return 'ok'
""")
