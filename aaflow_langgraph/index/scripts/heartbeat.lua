#!lua flags=allow-oom
-- Renews an owner's lease (Index.heartbeat).
-- Keys: below. Arguments: now or '', owner, epoch, lease seconds.
-- Reply: 1, or 0 when the owner is fenced.
local owners = KEYS[1]
-- include: clock
-- include: owner
if not is_current(ARGV[2], ARGV[3]) then return 0 end
redis.call('HSET', owners, ARGV[2], ARGV[3] .. ' ' .. seconds(now + ARGV[4]))
return 1
