"""The scripts of the Redis inbox. The state of an event is `D` (done) or `P:token` (claimed by a run, until its lease
ends).

Both keys of an event have the same hash tag, so they are in one slot of a cluster. A token is the fence and the name of
the run: after a failover that lost the counter a fence may repeat, but a token does not.
"""

# KEYS state, fence; ARGV name, lease and horizon in ms. Returns {'RUN', fence}, {'BUSY', ms left} or {'DONE', 0}.
CLAIM = """
local state = redis.call('GET', KEYS[1])
if state == 'D' then return {'DONE', 0} end
if state then return {'BUSY', redis.call('PTTL', KEYS[1])} end
local fence = redis.call('INCR', KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('SET', KEYS[1], 'P:' .. fence .. ':' .. ARGV[1], 'PX', ARGV[2])
return {'RUN', fence}
"""

# KEYS state; ARGV token, lease in ms. Returns 1 if the claim is ours for another lease, 0 if it is no longer ours.
RENEW = """
if redis.call('GET', KEYS[1]) ~= 'P:' .. ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS state; ARGV token, horizon in ms. Returns 1 if the event is done, also on a second call: the answer to the first
# may have been lost. Returns 0 if the claim is no longer ours.
DONE = """
local state = redis.call('GET', KEYS[1])
if state == 'D' then return 1 end
if state ~= 'P:' .. ARGV[1] then return 0 end
redis.call('SET', KEYS[1], 'D', 'PX', ARGV[2])
return 1
"""

# KEYS state; ARGV token. Gives the claim back, so that the next run need not wait for the lease.
FAIL = """
if redis.call('GET', KEYS[1]) ~= 'P:' .. ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
