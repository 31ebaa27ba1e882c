-- Leases extents (ids without repetition, at most 2000).
local function take_lease(lease, deadline, ids)
  redis.call('HSET', held, lease, deadline .. ' ' .. table.concat(ids, ' '))
  local members = {}
  for i, id in ipairs(ids) do members[2 * i - 1], members[2 * i] = '0', id .. ' ' .. lease end
  redis.call('ZADD', readers, unpack(members))
end
