#!lua flags=allow-oom
-- Says that a copy on disk exists or is gone (Index.set_on_disk).
-- Keys: below. Arguments: now or '', id, 1 or 0.
-- Reply: 1, or 0 when the extent is unknown.
local records, state, tokens, names, keys, children, readers, owned, held = unpack(KEYS)
-- include: drop_lease
-- include: state
-- include: names
-- include: forget
local e = read_state(ARGV[2])
if not e then return 0 end
e.on_disk = ARGV[3]
if e.owner == '-' and e.on_disk == '0' then forget(e) else write_state(e) end
return 1
