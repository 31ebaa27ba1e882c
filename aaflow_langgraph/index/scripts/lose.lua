#!lua flags=allow-oom
-- Says that the bytes at a place are gone (Index.lose).
-- Keys: below. Arguments: now or '', id, 'owner offset num_bytes generation'.
-- Reply: 1, or 0 when they were not there.
local records, state, tokens, names, keys, children, readers, owned, held = unpack(KEYS)
-- include: drop_lease
-- include: state
-- include: names
-- include: forget
local e = read_state(ARGV[2])
if not e or e.owner .. ' ' .. e.range ~= ARGV[3] then return 0 end
vacate(e)
return 1
