#!lua flags=allow-oom
-- Lets an extent stand for those that were merged into it (Index.take_over).
-- Keys: below. Arguments: now or '', id, ids of the parts.
-- Reply: 1, or 0 when the extent is unknown.
local state, children = unpack(KEYS)
-- include: state
local heir = read_state(ARGV[2])
if not heir then return 0 end
local function uses(e)
  local created, last, count = e.used:match('^(%d+) (%d+) (%d+)$')
  return tonumber(created), tonumber(last), tonumber(count)
end
local created, last, count = uses(heir)
for i = 3, #ARGV do
  local part = read_state(ARGV[i])
  if part then
    local since, lately, often = uses(part)
    created, last, count = math.min(created, since), math.max(last, lately), math.max(count, often)
    if part.parent ~= '-' then
      redis.call('ZREM', children, part.parent .. ' ' .. part.id)
      part.parent = '-'
      write_state(part)
    end
    for _, bond in ipairs(members_of(children, part.id)) do
      local id = bond:sub(18)
      local child = id == heir.id and heir or read_state(id)
      redis.call('ZREM', children, bond)
      if child then
        child.parent = '-'
        if id ~= heir.id and heir.owner ~= '-' and child.owner == heir.owner then
          child.parent = heir.id
          redis.call('ZADD', children, '0', heir.id .. ' ' .. id)
        end
        write_state(child)
      end
    end
  end
end
heir.used = string.format('%.0f %.0f %.0f', created, last, count)
write_state(heir)
return 1
