#!lua
-- Shares a recipe; one that knows chat turns wins over one that does not (Index.put_recipe).
-- Keys: below. Arguments: now or '', kv id, lease seconds, knows chat turns 1/0, JSON.
-- Reply: 1. Kept as 'chat lease-seconds JSON'.
local recipes, recipe_deadlines = unpack(KEYS)
-- include: clock
local chat, text = ARGV[4], ARGV[5]
local known_chat, known_text = (redis.call('HGET', recipes, ARGV[2]) or ''):match('^([01]) %S+ (.*)$')
if known_chat and (known_chat == '1' or chat == '0') then chat, text = known_chat, known_text end
redis.call('HSET', recipes, ARGV[2], chat .. ' ' .. ARGV[3] .. ' ' .. text)
redis.call('ZADD', recipe_deadlines, seconds(now + ARGV[3]), ARGV[2])
return 1
