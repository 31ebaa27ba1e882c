#!lua flags=allow-oom
-- Forgets an owner and its places (Index.leave).
-- Keys: below. Arguments: now or '', owner.
-- Reply: how many places.
local records, state, tokens, names, keys, children, readers, owned, held, owners = unpack(KEYS)
-- include: drop_lease
-- include: state
-- include: names
-- include: forget
redis.call('HDEL', owners, ARGV[2])
return vacate_all(ARGV[2])
