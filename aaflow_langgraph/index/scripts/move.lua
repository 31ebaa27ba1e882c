#!lua
-- Changes an extent's place if it is the one the caller knows (Index.move).
-- Keys: below. Arguments: now or '', id, old 'owner offset num_bytes generation' ('- 0 0 0' for none), new owner,
--   new 'offset num_bytes generation', epoch of the new owner.
-- Reply: 1, 0 when it was elsewhere or is unknown, -1 when the new owner is fenced.
local records, state, tokens, names, keys, children, readers, owned, held, owners = unpack(KEYS)
-- include: clock
-- include: owner
-- include: drop_lease
-- include: state
-- include: names
-- include: forget
local owner = ARGV[4]
if not is_current(owner, ARGV[6]) then return -1 end
local e = read_state(ARGV[2])
if not e or e.owner .. ' ' .. e.range ~= ARGV[3] then return 0 end
unbind(e)
if e.owner ~= '-' then redis.call('ZREM', owned, e.owner .. ' ' .. e.id) end
redis.call('ZADD', owned, 0, owner .. ' ' .. e.id)
e.owner, e.range = owner, ARGV[5]
write_state(e)
return 1
