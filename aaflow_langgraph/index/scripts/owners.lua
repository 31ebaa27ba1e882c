#!lua flags=no-writes
-- Every owner (Index.owners).
-- Keys: below. Arguments: now or ''.
-- Reply: now, then owner and deadline in turn.
local owners = KEYS[1]
-- include: clock
local reply, all = {seconds(now)}, redis.call('HGETALL', owners)
for i = 1, #all, 2 do
  reply[#reply + 1] = all[i]
  reply[#reply + 1] = all[i + 1]:match('^%d+ (%S+)$') or '0'
end
return reply
