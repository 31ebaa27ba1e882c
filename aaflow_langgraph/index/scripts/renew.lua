#!lua flags=allow-oom
-- Moves a lease's deadline (Index.renew).
-- Keys: below. Arguments: now or '', lease, lease seconds.
-- Reply: 'deadline id id ...'; nil when the lease is gone.
local held = KEYS[1]
-- include: clock
local line = redis.call('HGET', held, ARGV[2])
if not line then return false end
line = seconds(now + ARGV[3]) .. (line:match(' .*') or '')
redis.call('HSET', held, ARGV[2], line)
return line
