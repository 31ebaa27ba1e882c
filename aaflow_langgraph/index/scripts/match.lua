#!lua
-- Leases the extents that cover the longest prefix (Index.match): greedy interval cover, as cover() in base.py does it.
-- Keys: below. Arguments: now or '', lease, lease seconds, limit, canonical 1/0, ids to leave out, positions of the names
--   in falling order ('300t' where an extent must end, else the end of a block), the names in the same order.
-- Reply: {deadline, 'id start stop state', ...}; empty when nothing is found, and then nothing was written.
local state, names, readers, leases, held, used = unpack(KEYS)
-- include: clock
-- include: lease
local limit, canonical = tonumber(ARGV[4]), ARGV[5] == '1'
local seen, spans, reached = {}, {}, -1
for id in ARGV[6]:gmatch('%x+') do seen[id] = true end
local number, fetched, values = 7, 7, {}
-- An extent counts up to the first, that is the last, of its positions that is met. Once one that starts at 0 is known,
-- positions below its end cannot matter any more.
for position, tail in ARGV[7]:gmatch('(%d+)(t?)') do
  position = tonumber(position)
  local stop = math.min(position, limit)
  if stop < reached then break end
  number = number + 1
  if number > fetched then
    local last = math.min(fetched + 16, #ARGV)
    values = redis.call('HMGET', names, unpack(ARGV, fetched + 1, last))
    values.base, fetched = fetched, last
  end
  for id, start, last, whole in (values[number - values.base] or ''):gmatch('(%x+):(%d+):(%d+):(%d+)') do
    local fits
    if tail == 't' then fits = tonumber(last) == position else fits = not canonical or tonumber(whole) >= position end
    if fits and not seen[id] then
      seen[id], start = true, tonumber(start)
      if start < stop then
        spans[#spans + 1] = {id, start, stop}
        if start == 0 then reached = math.max(reached, stop) end
      end
    end
  end
end
if reached < 0 then return {} end

local at, ids, parts = 0, {}, {}
while #ids < 2000 do
  local best
  for _, span in ipairs(spans) do
    if span[2] <= at and at < span[3] and
        (not best or span[3] > best[3] or span[3] == best[3] and span[1] < best[1]) then
      best = span
    end
  end
  if not best then break end
  ids[#ids + 1], parts[#parts + 1] = best[1], best[1] .. ' ' .. at .. ' ' .. best[3] .. ' '
  at = best[3]
end
local states = redis.call('HMGET', state, unpack(ids))
for i = 1, #ids do
  -- A name that leads to no extent: somebody else wrote here. Cover ends before it.
  if not states[i] then
    for j = #ids, i, -1 do ids[j], parts[j] = nil, nil end
    break
  end
  parts[i] = parts[i] .. states[i]
end
if #ids == 0 then return {} end
take_lease(ARGV[2], ids, now + ARGV[3])
table.insert(parts, 1, seconds(now + ARGV[3]))
return parts
