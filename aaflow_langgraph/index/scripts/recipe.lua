#!lua
-- A shared recipe, whose time starts anew (Index.recipe).
-- Keys: below. Arguments: now or '', kv id.
-- Reply: its JSON, or nil.
local recipes, recipe_deadlines = unpack(KEYS)
-- include: clock
local lease_s, text = (redis.call('HGET', recipes, ARGV[2]) or ''):match('^[01] (%S+) (.*)$')
local deadline = tonumber(redis.call('ZSCORE', recipe_deadlines, ARGV[2]))
if not text or not tonumber(lease_s) or not deadline or deadline <= now then return false end
redis.call('ZADD', recipe_deadlines, seconds(now + lease_s), ARGV[2])
return text
