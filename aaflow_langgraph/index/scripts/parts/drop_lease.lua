-- Ends one lease: what the index recorded counts, not what a receipt claims (I9). True when there was one.
local function drop_lease(lease)
  local ids = redis.call('HGET', held, lease)
  if not ids then return false end
  redis.call('HDEL', held, lease)
  redis.call('ZREM', leases, lease)
  local members = {}
  for id in ids:gmatch('%x+') do members[#members + 1] = id .. ' ' .. lease end
  if #members > 0 then redis.call('ZREM', readers, unpack(members)) end
  return true
end
