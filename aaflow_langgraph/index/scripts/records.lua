#!lua flags=no-writes
-- Every extent, or those at a place of an owner (Index.records).
-- Keys: below. Arguments: now or '', owner or ''.
-- Reply: 'id state' in the order of the ids.
local state, owned = unpack(KEYS)
-- include: state
local ids, reply = {}, {}
if ARGV[2] == '' then
  ids = redis.call('HKEYS', state)
  table.sort(ids)
else
  for i, bond in ipairs(members_of(owned, ARGV[2])) do ids[i] = bond:sub(#ARGV[2] + 2) end
end
for _, id in ipairs(ids) do
  local line = redis.call('HGET', state, id)
  if line then reply[#reply + 1] = id .. ' ' .. line end
end
return reply
