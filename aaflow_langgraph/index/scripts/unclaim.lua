#!lua flags=allow-oom
-- Gives a claim back (Index.unclaim).
-- Keys: below. Arguments: now or '', name, holder.
-- Reply: 1, or 0 when it was not the holder's.
local claims = KEYS[1]
if (redis.call('HGET', claims, ARGV[2]) or ''):match('^%S+ (%S+)$') ~= ARGV[3] then return 0 end
redis.call('HDEL', claims, ARGV[2])
return 1
