"""The Redis inbox's scripts. An event's state is `D` (done) or `P:token` (a run holds it, for as long as its lease).

Both keys of an event have one hash tag, so they live in one slot of a cluster. A token is the fence and the run's own
name: after a failover that forgot the counter a fence may come twice, a token does not.
"""

# KEYS state, fence; ARGV name, lease and horizon in ms. Answers {'RUN', fence}, {'BUSY', ms left} or {'DONE', 0}.
CLAIM = """
local state = redis.call('GET', KEYS[1])
if state == 'D' then return {'DONE', 0} end
if state then return {'BUSY', redis.call('PTTL', KEYS[1])} end
local fence = redis.call('INCR', KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('SET', KEYS[1], 'P:' .. fence .. ':' .. ARGV[1], 'PX', ARGV[2])
return {'RUN', fence}
"""

# KEYS state; ARGV token, lease in ms. 1: it is ours for another lease. 0: it is not ours any more.
RENEW = """
if redis.call('GET', KEYS[1]) ~= 'P:' .. ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS state; ARGV token, horizon in ms. Done, also a second time: the answer to the first may have been lost.
DONE = """
local state = redis.call('GET', KEYS[1])
if state == 'D' then return 1 end
if state ~= 'P:' .. ARGV[1] then return 0 end
redis.call('SET', KEYS[1], 'D', 'PX', ARGV[2])
return 1
"""

# KEYS state; ARGV token. The next run need not wait for the lease.
FAIL = """
if redis.call('GET', KEYS[1]) ~= 'P:' .. ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
