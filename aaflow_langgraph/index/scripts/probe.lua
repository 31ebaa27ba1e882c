#!lua flags=no-writes
-- May this user run what the other scripts run?
-- Keys: below. Arguments: now or ''.
-- Reply: the commands that it may not run on our keys.
local records, state, tokens, names, keys, children, readers, owned, held, owners, claims, recipes,
  recipe_deadlines = unpack(KEYS)
local refused = {}
local function try(...)
  if not redis.acl_check_cmd(...) then refused[#refused + 1] = (...) end
end
try('TIME')
try('HGET', state, 'f')
try('HMGET', state, 'f')
try('HGETALL', owners)
try('HKEYS', state)
try('HVALS', owners)
try('HEXISTS', state, 'f')
try('HSET', records, 'f', 'v')
try('HDEL', records, 'f')
try('HLEN', held)
try('ZADD', readers, '0', 'm')
try('ZREM', readers, 'm')
try('ZSCORE', recipe_deadlines, 'm')
try('ZRANGE', readers, '0', '-1')
try('ZRANGEBYSCORE', recipe_deadlines, '-inf', '0')
try('ZRANGEBYLEX', readers, '-', '+')
try('ZLEXCOUNT', readers, '-', '+')
return refused
