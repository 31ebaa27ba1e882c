#!lua
-- Registers an owner under a new epoch and drops what it announced before (Index.join).
-- Keys: below. Arguments: now or '', owner, lease seconds, the largest epoch that the caller has seen.
-- Reply: the epoch, microseconds of the server's clock or more: larger than any before, by no key that must survive.
local records, state, tokens, names, keys, children, readers, owned, held, owners = unpack(KEYS)
-- include: clock
-- include: drop_lease
-- include: state
-- include: names
-- include: forget
vacate_all(ARGV[2])
local epoch = math.max(tick, ARGV[4] + 1)
for _, known in ipairs(redis.call('HVALS', owners)) do
  epoch = math.max(epoch, (tonumber(known:match('^%d+')) or 0) + 1)
end
epoch = string.format('%.0f', epoch)
redis.call('HSET', owners, ARGV[2], epoch .. ' ' .. seconds(now + ARGV[3]))
return epoch
