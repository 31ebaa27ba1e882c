-- Is this the owner's epoch, and is its lease running?
local function is_current(owner, epoch)
  local known, deadline = (redis.call('HGET', owners, owner) or ''):match('^(%d+) (%S+)$')
  return known == epoch and tonumber(deadline) ~= nil and tonumber(deadline) > now
end
