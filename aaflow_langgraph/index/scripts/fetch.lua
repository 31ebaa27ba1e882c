#!lua flags=no-writes
-- The parts of extents that never change.
-- Keys: below. Arguments: now or '', ids (at most 1000).
-- Reply: {records, packed token ids}, each in the order of the ids, nil where there is none.
local records, tokens = unpack(KEYS)
return {redis.call('HMGET', records, unpack(ARGV, 2)), redis.call('HMGET', tokens, unpack(ARGV, 2))}
