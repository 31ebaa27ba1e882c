-- What changes about an extent: "start stop owner offset num_bytes generation parent on_disk created last_use num_uses";
-- "-" for no owner, no parent.
local function read_state(id)
  local e = {id = id}
  e.span, e.owner, e.range, e.parent, e.on_disk, e.used =
    (redis.call('HGET', state, id) or ''):match('^(%d+ %d+) (%S+) (%d+ %d+ %d+) (%S+) ([01]) (%d+ %d+ %d+)$')
  return e.span and e
end
local function line_of(e) return table.concat({e.span, e.owner, e.range, e.parent, e.on_disk}, ' ') end
local function write_state(e) redis.call('HSET', state, e.id, line_of(e) .. ' ' .. e.used) end
local function members_of(set, name) return redis.call('ZRANGEBYLEX', set, '[' .. name .. ' ', '(' .. name .. '!') end
local function num_members(set, name) return redis.call('ZLEXCOUNT', set, '[' .. name .. ' ', '(' .. name .. '!') end
