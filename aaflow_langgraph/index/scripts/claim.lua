#!lua
-- Takes or renews a claim (Index.claim).
-- Keys: below. Arguments: now or '', name, holder, lease seconds.
-- Reply: 1, or 0 while somebody else holds it.
local claims = KEYS[1]
-- include: clock
local deadline, holder = (redis.call('HGET', claims, ARGV[2]) or ''):match('^(%S+) (%S+)$')
if holder and holder ~= ARGV[3] and (tonumber(deadline) or 0) > now then return 0 end
redis.call('HSET', claims, ARGV[2], seconds(now + ARGV[4]) .. ' ' .. ARGV[3])
return 1
