-- Ends one lease: what the index recorded counts, not what a receipt claims (I9). True when there was one.
local function drop_lease(lease)
  local line = redis.call('HGET', held, lease)
  if not line then return false end
  redis.call('HDEL', held, lease)
  local members = {}
  for id in line:gmatch(' (%x+)') do members[#members + 1] = id .. ' ' .. lease end
  if #members > 0 then redis.call('ZREM', readers, unpack(members)) end
  return true
end
