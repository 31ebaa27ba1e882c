#!lua flags=allow-oom
-- Gives a lease back (Index.release).
-- Keys: below. Arguments: now or '', lease.
-- Reply: 1, or 0 when it was already gone.
local readers, held = unpack(KEYS)
-- include: drop_lease
return drop_lease(ARGV[2]) and 1 or 0
