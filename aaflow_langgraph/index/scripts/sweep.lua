#!lua flags=allow-oom
-- Drops leases, owners with their places, claims and recipes past their deadline (Index.sweep).
-- Keys: below. Arguments: now or ''.
-- Reply: {leases, owners, extents that lost their place}.
local records, state, tokens, names, keys, children, readers, owned, held, owners, claims, recipes,
  recipe_deadlines = unpack(KEYS)
-- include: clock
-- include: drop_lease
-- include: state
-- include: names
-- include: forget
local num_leases = 0
local all = redis.call('HGETALL', held)
for i = 1, #all, 2 do
  local deadline = tonumber(all[i + 1]:match('^%S+'))
  if not deadline or deadline <= now then
    drop_lease(all[i])
    num_leases = num_leases + 1
  end
end
local num_owners, num_extents = 0, 0
all = redis.call('HGETALL', owners)
for i = 1, #all, 2 do
  local deadline = tonumber(all[i + 1]:match('^%d+ (%S+)$'))
  if not deadline or deadline <= now then
    redis.call('HDEL', owners, all[i])
    num_owners, num_extents = num_owners + 1, num_extents + vacate_all(all[i])
  end
end
all = redis.call('HGETALL', claims)
for i = 1, #all, 2 do
  local deadline = tonumber(all[i + 1]:match('^(%S+) '))
  if not deadline or deadline <= now then redis.call('HDEL', claims, all[i]) end
end
for _, kv_id in ipairs(redis.call('ZRANGEBYSCORE', recipe_deadlines, '-inf', seconds(now))) do
  redis.call('HDEL', recipes, kv_id)
  redis.call('ZREM', recipe_deadlines, kv_id)
end
return {num_leases, num_owners, num_extents}
