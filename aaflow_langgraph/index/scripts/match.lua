#!lua
-- Leases the extents that cover the longest prefix (Index.match): greedy interval cover, as cover() in base.py does it.
-- Keys: below. Arguments: now or '', lease, lease seconds, 'limit canonical-1/0 new-1/0 num_blocks', names of that many blocks,
--   last first, and of the positions that follow, joined; positions inside blocks where an extent or one merged into it may
--   end, in falling order; ids to leave out. `new` asks for the parts of the extents that never change as well, as fetch.lua
--   gives them.
-- Reply: {deadline, 'id start stop state', ...[, {records, packed token ids}]}; empty when nothing is found, and then nothing
--   was written.
local state, names, readers, held, records, tokens = unpack(KEYS)
-- include: clock
-- include: lease
local limit, canonical, new, num_blocks = ARGV[4]:match('^(%d+) ([01]) ([01]) (%d+)$')
limit, canonical, num_blocks = tonumber(limit), canonical == '1', tonumber(num_blocks)
local asked_names = ARGV[5]
local function name_of(block)
  local at = 64 * (num_blocks - block)
  return asked_names:sub(at + 1, at + 64)
end

-- Not every block has a name (names.lua): up to where does an extent that is met at `position` agree?
local function reaches(id, start, position, last)
  local block = math.floor(position / BLOCK_TOKENS)
  if block >= last then return position end
  local record = redis.call('HGET', records, id) or ''
  local at = record:match('^%d+ %d+ %d+ %x+ ()') or 1
  local first = math.floor(start / BLOCK_TOKENS)
  while block < last do
    local from = at + 65 * (block + 1 - first)
    if record:sub(from, from + 63) ~= name_of(block + 1) then break end
    block = block + 1
    position = BLOCK_TOKENS * block
  end
  return position
end

local seen, spans, reached = {}, {}, -1
for id in ARGV[7]:gmatch('%x+') do seen[id] = true end
local function meet(value, position, is_end)
  for id, start, stop, whole in value:gmatch('(%x+):(%d+):(%d+):(%d+)') do
    start, stop, whole = tonumber(start), tonumber(stop), tonumber(whole)
    local fits
    if is_end then fits = stop >= position else fits = not canonical or whole >= position end
    if fits and not seen[id] then
      seen[id] = true
      local last = math.min(num_blocks, math.floor((canonical and whole or stop) / BLOCK_TOKENS))
      local at = math.min(reaches(id, start, position, last), limit)
      if start < at then
        spans[#spans + 1] = {id, start, at, stop - start}
        if start == 0 then reached = math.max(reached, at) end
      end
    end
  end
end

-- Names are looked up a few at a time, the last ones first: most often they lead to all there is. Once an extent that starts
-- at 0 is known, only what reaches as far matters; such a one is met at the last NAMED_BLOCKS-th block before, or behind it.
local ends, at_end, block, size = {}, 1, num_blocks, 2
local step, enough = NAMED_BLOCKS * BLOCK_TOKENS, 0
for position in ARGV[6]:gmatch('%d+') do ends[#ends + 1] = tonumber(position) end
while block > 0 or ends[at_end] do
  local asked, positions, is_end = {}, {}, {}
  while #asked < size and (block > 0 or ends[at_end]) do
    local i = #asked + 1
    if (ends[at_end] or 0) >= BLOCK_TOKENS * block then
      asked[i], positions[i], is_end[i] = name_of(1 - at_end), ends[at_end], true
      at_end = at_end + 1
    else
      asked[i], positions[i] = name_of(block), BLOCK_TOKENS * block
      block = block - 1
    end
  end
  for i, value in ipairs(redis.call('HMGET', names, unpack(asked))) do
    if value and positions[i] >= enough then
      meet(value, positions[i], is_end[i])
      enough = step * math.floor(reached / step)
    end
  end
  if positions[#positions] < enough then break end
  size = math.min(size * 4, 1000)
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
if new == '1' then
  parts[#parts + 1] = {redis.call('HMGET', records, unpack(ids)), redis.call('HMGET', tokens, unpack(ids))}
end
return parts
