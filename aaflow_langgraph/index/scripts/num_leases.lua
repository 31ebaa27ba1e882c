#!lua flags=no-writes
-- How many leases there are (Index.num_leases).
-- Keys: below. Arguments: now or ''.
-- Reply: the number.
local held = KEYS[1]
return redis.call('HLEN', held)
