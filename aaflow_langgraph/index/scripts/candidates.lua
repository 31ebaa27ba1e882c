#!lua flags=no-writes
-- Extents that their owner may evict (Index.candidates).
-- Keys: below. Arguments: now or '', owner.
-- Reply: 'id state created last-use uses'.
local state, children, readers, owned, used = unpack(KEYS)
-- include: state
local reply = {}
for _, bond in ipairs(members_of(owned, ARGV[2])) do
  local id = bond:sub(#ARGV[2] + 2)
  local line = redis.call('HGET', state, id)
  if line and num_members(readers, id) == 0 and (line:sub(-1) == '1' or num_members(children, id) == 0) then
    reply[#reply + 1] = id .. ' ' .. line .. ' ' .. (redis.call('HGET', used, id) or '0 0 0')
  end
end
return reply
