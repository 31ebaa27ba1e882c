#!lua
-- Leases the extents that cover the longest prefix (Index.match): greedy interval cover, as cover() in base.py does it.
-- Keys: below. Arguments: now or '', lease, lease seconds, limit, canonical 1/0, ids to leave out, positions of the names
--   in falling order ('300t' where an extent or one merged into it must end, else the end of a block), the names in the same order, joined,
--   1 to get the parts of the extents that never change as well, as fetch.lua gives them.
-- Reply: {deadline, 'id start stop state', ...[, {records, packed token ids}]}; empty when nothing is found, and then nothing
--   was written.
local state, names, readers, held, records, tokens = unpack(KEYS)
-- include: clock
-- include: lease
local limit, canonical, joined = tonumber(ARGV[4]), ARGV[5] == '1', ARGV[8]
local seen, spans, reached = {}, {}, -1
for id in ARGV[6]:gmatch('%x+') do seen[id] = true end
-- Names are looked up a few at a time: most often the first ones lead to all there is.
local number, fetched, values, size = 0, 0, nil, 2
local function next_value()
  if number == fetched then
    local batch = {}
    for i = number, math.min(number + size, #joined / 64) - 1 do batch[#batch + 1] = joined:sub(64 * i + 1, 64 * i + 64) end
    values, fetched, size = redis.call('HMGET', names, unpack(batch)), number + #batch, math.min(size * 4, 1000)
    values.base = number
  end
  number = number + 1
  return values[number - values.base]
end
-- An extent counts up to the first, that is the last, of its positions that is met. Once one that starts at 0 is known,
-- positions below its end cannot matter any more.
for position, tail in ARGV[7]:gmatch('(%d+)(t?)') do
  position = tonumber(position)
  local stop = math.min(position, limit)
  if stop < reached then break end
  local value = next_value()
  if value then
    for id, start, last, whole in value:gmatch('(%x+):(%d+):(%d+):(%d+)') do
      local fits
      if tail == 't' then fits = tonumber(last) >= position else fits = not canonical or tonumber(whole) >= position end
      if fits and not seen[id] then
        seen[id], start = true, tonumber(start)
        if start < stop then
          spans[#spans + 1] = {id, start, stop, last - start}
          if start == 0 then reached = math.max(reached, stop) end
        end
      end
    end
  end
end
if reached < 0 then return {} end

local function greedy()
  local at, ids, parts = 0, {}, {}
  while #ids < 2000 do
    local best
    for _, span in ipairs(spans) do
      if span[2] <= at and at < span[3] and
          (not best or span[3] > best[3] or span[3] == best[3] and
            (span[4] > best[4] or span[4] == best[4] and span[1] < best[1])) then
        best = span
      end
    end
    if not best then break end
    ids[#ids + 1], parts[#parts + 1] = best[1], best[1] .. ' ' .. at .. ' ' .. best[3] .. ' '
    at = best[3]
  end
  return ids, parts
end
local last, ids, parts, uses, lost = string.format('%.0f', tick), nil, nil, nil, nil
repeat
  ids, parts = greedy()
  if #ids == 0 then return {} end
  uses, lost = {}, nil
  for i, line in ipairs(redis.call('HMGET', state, unpack(ids))) do
    local known, created, count = (line or ''):match('^(.- [01]) (%d+) %d+ (%d+)$')
    if not known then
      lost = ids[i]
      break
    end
    parts[i] = parts[i] .. known
    uses[2 * i - 1], uses[2 * i] = ids[i], table.concat({known, created, last, count + 1}, ' ')
  end
  -- A name that leads to no extent: somebody else wrote here. Cover without it.
  for i = #spans, 1, -1 do
    if spans[i][1] == lost then table.remove(spans, i) end
  end
until not lost
redis.call('HSET', state, unpack(uses))
local deadline = seconds(now + ARGV[3])
take_lease(ARGV[2], deadline, ids)
table.insert(parts, 1, deadline)
if ARGV[9] == '1' then
  parts[#parts + 1] = {redis.call('HMGET', records, unpack(ids)), redis.call('HMGET', tokens, unpack(ids))}
end
return parts
