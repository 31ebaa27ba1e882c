-- What changes about an extent: "start stop owner offset num_bytes generation parent on_disk"; "-" for no owner, no parent.
local function read_state(id)
  local span, owner, range, parent, on_disk =
    (redis.call('HGET', state, id) or ''):match('^(%d+ %d+) (%S+) (%d+ %d+ %d+) (%S+) ([01])$')
  return span and {id = id, span = span, owner = owner, range = range, parent = parent, on_disk = on_disk}
end
local function write_state(e)
  local line = table.concat({e.span, e.owner, e.range, e.parent, e.on_disk}, ' ')
  redis.call('HSET', state, e.id, line)
  return line
end
local function members_of(set, name) return redis.call('ZRANGEBYLEX', set, '[' .. name .. ' ', '(' .. name .. '!') end
local function num_members(set, name) return redis.call('ZLEXCOUNT', set, '[' .. name .. ' ', '(' .. name .. '!') end
