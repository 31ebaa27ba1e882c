#!lua flags=allow-oom
-- Evicts an extent from its owner's pool (Index.remove).
-- Keys: below. Arguments: now or '', id, owner, 1 when the caller needs the record as well.
-- Reply: {state as it was, record, packed token ids}; nil when it may not be evicted.
local records, state, tokens, names, keys, children, readers, owned, held = unpack(KEYS)
-- include: drop_lease
-- include: state
-- include: names
-- include: forget
local id = ARGV[2]
local e = read_state(id)
if not e or e.owner ~= ARGV[3] or num_members(readers, id) > 0 then return false end
if e.on_disk == '0' and num_members(children, id) > 0 then return false end
local reply = {line_of(e)}
if ARGV[4] == '1' then
  reply[2] = redis.call('HGET', records, id)
  reply[3] = redis.call('HGET', tokens, id)
end
if e.on_disk == '0' then forget(e, true) else vacate(e) end
return reply
