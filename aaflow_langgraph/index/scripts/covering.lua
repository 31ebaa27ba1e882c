#!lua flags=no-writes
-- Every extent that one of the names leads to (Index.covering).
-- Keys: below. Arguments: now or '', names...
-- Reply: 'id state' in the order of the ids.
local state, names = unpack(KEYS)
local seen, ids, reply = {}, {}, {}
for first = 2, #ARGV, 1000 do
  for _, value in ipairs(redis.call('HMGET', names, unpack(ARGV, first, math.min(first + 999, #ARGV)))) do
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
