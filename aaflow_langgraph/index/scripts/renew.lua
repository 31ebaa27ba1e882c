#!lua flags=allow-oom
-- Moves a lease's deadline (Index.renew).
-- Keys: below. Arguments: now or '', lease, lease seconds.
-- Reply: {deadline, 'id id ...'}; nil when the lease is gone.
local leases, held = unpack(KEYS)
-- include: clock
local ids = redis.call('HGET', held, ARGV[2])
if not ids then return false end
local deadline = seconds(now + ARGV[3])
redis.call('ZADD', leases, deadline, ARGV[2])
return {deadline, ids}
