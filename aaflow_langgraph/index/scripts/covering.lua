#!lua flags=no-writes
-- Every extent that one of the names leads to (Index.covering).
-- Keys: below. Arguments: now or '', the names, joined.
-- Reply: 'id state' in the order of the ids.
local state, names = unpack(KEYS)
local joined, seen, ids, reply = ARGV[2], {}, {}, {}
for first = 1, #joined, 64000 do
  local batch = {}
  for at = first, math.min(first + 63999, #joined), 64 do batch[#batch + 1] = joined:sub(at, at + 63) end
  for _, value in ipairs(redis.call('HMGET', names, unpack(batch))) do
    for id in (value or ''):gmatch('(%x+):%d+:%d+:%d+') do
      if not seen[id] then
        seen[id] = true
        ids[#ids + 1] = id
      end
    end
  end
end
table.sort(ids)
for _, id in ipairs(ids) do
  local line = redis.call('HGET', state, id)
  if line then reply[#reply + 1] = id .. ' ' .. line end
end
return reply
