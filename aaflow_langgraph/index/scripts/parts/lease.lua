-- Leases extents (ids without repetition, at most 2000) and counts the use. `used` holds "created last-use number-of-uses".
local function take_lease(lease, ids, deadline)
  redis.call('ZADD', leases, seconds(deadline), lease)
  redis.call('HSET', held, lease, table.concat(ids, ' '))
  local members, uses = {}, redis.call('HMGET', used, unpack(ids))
  for i, id in ipairs(ids) do
    members[2 * i - 1], members[2 * i] = '0', id .. ' ' .. lease
  end
  redis.call('ZADD', readers, unpack(members))
  for i, id in ipairs(ids) do
    local created, count = (uses[i] or ''):match('^(%d+) %d+ (%d+)$')
    members[2 * i - 1], members[2 * i] = id, (created or string.format('%.0f', tick)) .. string.format(' %.0f %d', tick, (count or 0) + 1)
  end
  redis.call('HSET', used, unpack(members))
end
