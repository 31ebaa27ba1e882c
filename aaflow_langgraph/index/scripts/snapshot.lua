#!lua flags=no-writes
-- Everything, at one moment, for Index.check.
-- Keys: below. Arguments: now or ''.
-- Reply: one list per key, in the order below: field and value in turn, the members of a set, or fields.
local records, state, tokens, names, keys, children, readers, owned, held, owners, claims, recipes,
  recipe_deadlines = unpack(KEYS)
local reply = {}
for i, key in ipairs({records, state, names, keys, held, owners, claims}) do reply[i] = redis.call('HGETALL', key) end
for i, key in ipairs({children, readers, owned, recipe_deadlines}) do reply[7 + i] = redis.call('ZRANGE', key, 0, -1) end
for i, key in ipairs({tokens, recipes}) do reply[11 + i] = redis.call('HKEYS', key) end
return reply
