#!lua flags=no-writes
-- Extents that their owner may evict (Index.candidates).
-- Keys: below. Arguments: now or '', owner.
-- Reply: 'id state'.
local state, children, readers, owned = unpack(KEYS)
-- include: state
local reply = {}
for _, bond in ipairs(members_of(owned, ARGV[2])) do
  local id = bond:sub(#ARGV[2] + 2)
  local e = num_members(readers, id) == 0 and read_state(id)
  if e and (e.on_disk == '1' or num_members(children, id) == 0) then
    reply[#reply + 1] = id .. ' ' .. line_of(e) .. ' ' .. e.used
  end
end
return reply
