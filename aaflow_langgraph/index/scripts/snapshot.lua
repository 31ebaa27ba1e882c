#!lua flags=no-writes
-- Everything, at one moment, for Index.check.
-- Keys: below. Arguments: now or ''.
-- Reply: one list per key, in their order: field and value in turn, or the members of a set.
local records, state, tokens, names, keys, children, readers, owned, leases, held, used, owners, claims, recipes,
  recipe_deadlines = unpack(KEYS)
local reply = {}
for i, key in ipairs({records, state, tokens, names, keys, held, used, owners, claims}) do
  reply[i] = redis.call(key == tokens and 'HKEYS' or 'HGETALL', key)
end
for i, key in ipairs({children, readers, owned, leases, recipe_deadlines}) do
  reply[9 + i] = redis.call('ZRANGE', key, 0, -1)
end
reply[15] = redis.call('HKEYS', recipes)
return reply
