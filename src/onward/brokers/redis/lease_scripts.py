"""Scripts of topics, groups and leases. `inc` is the server's incarnation: a restart or a fail-over, which can lose the
last writes, changes it. A script with another incarnation than the stored one answers `void` and writes nothing."""

from onward.brokers.redis.scripts import BEFORE, HEX, NOW, SPARE, STREAM, Script

# KEYS stream meta marks; ARGV inc log version. Makes what is missing; answers the version and the log that are stored.
DECLARE = Script(
    STREAM
    + """
local m = redis.call('HMGET', KEYS[2], 'version', 'log')
if m[1] and m[2] then return m end
local count = 0
if redis.call('EXISTS', KEYS[1]) == 0 then make(KEYS[1]) else count = redis.call('XLEN', KEYS[1]) end
redis.call('DEL', KEYS[3])
redis.call('ZADD', KEYS[3], 0, '0000000000000000:0:0')
redis.call('HSET', KEYS[2], 'inc', ARGV[1], 'log', ARGV[2], 'version', ARGV[3])
redis.call('HSET', KEYS[2], 'bytes', '0', 'count', tostring(count), 'marked', '0', 'done', '0')
return {ARGV[3], ARGV[2]}
"""
)

# KEYS stream meta g, the set that it belongs to, marks; ARGV inc log start group ttl_ms. ttl_ms is empty unless the
# group is a passing one. Answers the position at which a new group starts. What was removed before is not missing. A
# group that is known may be missing in the set, if another program has deleted that; `groups` counts them for TRIM.
JOIN = Script(
    HEX
    + BEFORE
    + STREAM
    + """
if redis.call('HGET', KEYS[2], 'log') ~= ARGV[2] then return 'log' end
if redis.call('EXISTS', KEYS[3]) == 1 then
  redis.call('HDEL', KEYS[3], '') -- takes no memory, see SPARE
  redis.call('SADD', KEYS[4], ARGV[4])
  return 'known'
end
local w, ms, seq = ARGV[3], last_id(KEYS[1]):match('^(%d+)-(%d+)$')
local latest = hex(ms .. '-' .. string.format('%.0f', tonumber(seq) + 1))
if w == 'earliest' then w = '0000000000000000' elseif w == 'latest' or w > latest then w = latest end
local fence = redis.call('HGET', KEYS[2], 'fence') or '0'
redis.call('HSET', KEYS[3], 'inc', ARGV[1], 'owner', '', 'beat', '0', 'fence', fence, 'lease', '0', 'at', '0')
redis.call('HSET', KEYS[3], 'clean', '1', 'gone', '', 'waits', '0')
redis.call('HSET', KEYS[3], 'log', ARGV[2], 'watermark', w, 'above', '', 'tries', '')
local _, count = upcoming(KEYS[1], KEYS[2], KEYS[5], w)
redis.call('HSET', KEYS[3], 'count', count and string.format('%.0f', count) or '', 'aside', '0')
local added = redis.call('SADD', KEYS[4], ARGV[4])
if ARGV[5] ~= '' then redis.call('PEXPIRE', KEYS[3], ARGV[5])
elseif added == 1 then redis.call('HINCRBY', KEYS[2], 'groups', 1) end
redis.call('HSET', KEYS[2], 'done', '0')
return w
"""
)

# KEYS g meta stream moves; ARGV 1 if the stream belongs to others: then it also answers the last id that it has given.
VIEW = Script(
    STREAM
    + """
local h = redis.call('HMGET', KEYS[1], 'inc', 'owner', 'beat', 'lease', 'clean', 'fence', 'gone', 'log')
h[9] = redis.call('HGET', KEYS[2], 'log')
h[10] = redis.call('EXISTS', KEYS[3])
h[11] = redis.call('LLEN', KEYS[4])
if ARGV[1] == '1' and h[10] == 1 then h[12] = last_id(KEYS[3]) end
return h
"""
)

# KEYS g meta stream moves marks; ARGV inc, owner and beat as seen, me, highest fence ever seen here, lease_ms, waits,
# the id of a new log. A log that is shorter than the progress, or missing, is another log: the group begins again.
CLAIM = Script(
    HEX
    + NOW
    + SPARE
    + STREAM
    + """
local h = redis.call('HMGET', KEYS[1], 'inc', 'owner', 'beat', 'fence', 'clean', 'gone', 'log', 'watermark')
local log = redis.call('HGET', KEYS[2], 'log')
if not h[1] or not log then return {'gone'} end
if h[1] ~= ARGV[1] then return {'void'} end
if h[2] ~= ARGV[2] or h[3] ~= ARGV[3] then return {'changed'} end
local news = ''
spare()
if redis.call('EXISTS', KEYS[3]) == 0 then
  news = 'missing'
  make(KEYS[3])
elseif h[7] == log then
  local ms, seq = last_id(KEYS[3]):match('^(%d+)-(%d+)$')
  if h[8] > hex(ms .. '-' .. string.format('%.0f', tonumber(seq) + 1)) then news = 'shorter' end
end
if news ~= '' then
  log = ARGV[8]
  redis.call('HSET', KEYS[2], 'log', log)
end
if news == 'missing' then
  redis.call('DEL', KEYS[5])
  redis.call('ZADD', KEYS[5], 0, '0000000000000000:0:0')
  redis.call('HSET', KEYS[2], 'bytes', '0', 'count', '0', 'marked', '0', 'done', '0')
end
if h[7] ~= log then
  if news == '' then news = 'new' end
  redis.call('HSET', KEYS[1], 'log', log, 'watermark', '0000000000000000', 'above', '', 'tries', '', 'count', '')
end
local now = now_ms()
local fence = math.max(tonumber(h[4]), tonumber(ARGV[5]), now) + 1
local number = string.format('%.0f', fence)
local token = number .. ':' .. ARGV[4]
redis.call('HSET', KEYS[1], 'owner', token, 'fence', number, 'clean', '0', 'lease', ARGV[6], 'waits', ARGV[7])
redis.call('HSET', KEYS[1], 'at', string.format('%.0f', now))
redis.call('HINCRBY', KEYS[1], 'beat', 1)
redis.call('DEL', KEYS[4])
return {'ok', token, log, news, redis.call('HMGET', KEYS[1], 'watermark', 'above', 'tries', 'count')}
"""
)

# KEYS g, one key only, so that it works in the middle of a slot migration; ARGV inc token waits ttl_ms
RENEW = Script(
    NOW
    + SPARE
    + """
local h = redis.call('HMGET', KEYS[1], 'inc', 'owner', 'waits')
if not h[1] then return 'gone' end
if h[2] ~= ARGV[2] then return 'lost' end
if h[1] ~= ARGV[1] then return 'void' end
spare()
redis.call('HSET', KEYS[1], 'at', string.format('%.0f', now_ms()), 'waits', ARGV[3])
redis.call('HINCRBY', KEYS[1], 'beat', 1)
if ARGV[4] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[4]) end
return 'ok'
"""
)

# KEYS g; ARGV inc, read again on this very connection. A claim of a free partition may be among the lost writes, so it
# has an unknown owner now, and every member waits for a lease.
VOID = Script(
    SPARE
    + """
local h = redis.call('HMGET', KEYS[1], 'inc', 'owner')
if not h[1] then return 'gone' end
if h[1] == ARGV[1] then return 'ok' end
spare()
redis.call('HSET', KEYS[1], 'inc', ARGV[1], 'clean', '0', 'owner', h[2] == '' and '?' or h[2])
redis.call('HINCRBY', KEYS[1], 'beat', 1)
return 'ok'
"""
)

# KEYS g; ARGV inc token clean gone. gone: 1 if no process of the owner before is left
RELEASE = Script(
    SPARE
    + """
local h = redis.call('HMGET', KEYS[1], 'inc', 'owner', 'fence')
if h[2] ~= ARGV[2] then return 'lost' end
if h[1] ~= ARGV[1] then return 'void' end
spare()
redis.call('HSET', KEYS[1], 'owner', '', 'clean', ARGV[3])
if ARGV[4] == '1' then redis.call('HSET', KEYS[1], 'gone', h[3]) end
redis.call('HINCRBY', KEYS[1], 'beat', 1)
return 'ok'
"""
)

# KEYS g; ARGV inc token. The owner has no process left. One that still waited has not begun, because the owner before
# it may still run: the next owner waits again.
FREE = Script(
    SPARE
    + """
local h = redis.call('HMGET', KEYS[1], 'inc', 'owner', 'fence', 'waits')
if h[2] ~= ARGV[2] then return 'lost' end
if h[1] ~= ARGV[1] then return 'void' end
spare()
redis.call('HSET', KEYS[1], 'owner', '')
if h[4] ~= '1' then redis.call('HSET', KEYS[1], 'gone', h[3]) end
redis.call('HINCRBY', KEYS[1], 'beat', 1)
return 'ok'
"""
)

# KEYS members; ARGV member, beat, lease_ms, ttl_ms
ENLIST = Script(
    NOW
    + SPARE
    + """
spare()
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. string.format('%.0f', now_ms()))
if ARGV[4] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[4]) end
"""
)

# KEYS g meta groups rows bodies index moves; ARGV group, 1 if it is a passing one. Fences never go back, should the
# group come again.
DROP = Script(
    NOW
    + """
local h = redis.call('HMGET', KEYS[1], 'owner', 'at', 'lease', 'fence', 'aside')
if h[1] and h[1] ~= '' and h[1] ~= '?' and now_ms() < tonumber(h[2]) + tonumber(h[3]) then return h[1] end
local fence = redis.call('HGET', KEYS[2], 'fence') or '0'
if h[4] and redis.call('EXISTS', KEYS[2]) == 1 and tonumber(h[4]) > tonumber(fence) then
  redis.call('HSET', KEYS[2], 'fence', h[4])
end
if h[5] and redis.call('HEXISTS', KEYS[2], 'aside') == 1 then redis.call('HINCRBY', KEYS[2], 'aside', '-' .. h[5]) end
local listed, groups = redis.call('SREM', KEYS[3], ARGV[1]), tonumber(redis.call('HGET', KEYS[2], 'groups') or 0)
if ARGV[2] == '0' and groups > 0 and (h[4] or listed == 1) then redis.call('HINCRBY', KEYS[2], 'groups', -1) end
redis.call('DEL', KEYS[1], KEYS[4], KEYS[5], KEYS[6], KEYS[7])
return ''
"""
)

# KEYS g stream. Also answers the id of the last entry, if it lies above the watermark: the last id that the stream has
# given may belong to no entry.
STANDING = Script(
    HEX
    + """
local h = redis.call('HMGET', KEYS[1], 'watermark', 'owner', 'fence', 'at', 'lease')
if not h[1] or redis.call('EXISTS', KEYS[2]) == 0 then return h end
h[6] = ''
if redis.call('XRANGE', KEYS[2], id(h[1]), '+', 'COUNT', 1)[1] then
  h[6] = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1][1]
end
return h
"""
)
