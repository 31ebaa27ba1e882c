-- Names by which an extent is found: its end, the ends of what was merged into it, and of its blocks the first, the last and
-- every NAMED_BLOCKS-th of the sequence. Who shares a block with it shares all before; match.lua looks on from a name that
-- leads to it.
-- A record is 'start stop canonical checksum end hash hash ... border border ... @positions': what starts with the end is
-- 65 characters a name.
local function fields_of(record)
  local start, stop, canonical, at = record:match('^(%d+) (%d+) (%d+) %x+ ()')
  if not start then return nil end
  local borders = record:find('@', at, true)
  local key = record:sub(at, at + 63) .. ':' .. start .. ':' .. canonical
  if borders then key = key .. ':' .. record:sub(borders + 1) end
  return start, stop, canonical, at, borders and borders - 1 or #record + 1, key
end
local function names_of(record, start, stop, at, behind)
  local first, num_names = math.floor(start / BLOCK_TOKENS), math.floor((behind - at + 1) / 65)
  local num_blocks = math.floor(stop / BLOCK_TOKENS) - first
  local found = {record:sub(at, at + 63)}
  for i = 1, math.min(num_blocks, num_names - 1) do
    if i == 1 or i == num_blocks or (first + i) % NAMED_BLOCKS == 0 then
      found[#found + 1] = record:sub(at + 65 * i, at + 65 * i + 63)
    end
  end
  for i = num_blocks + 1, num_names - 1 do found[#found + 1] = record:sub(at + 65 * i, at + 65 * i + 63) end
  return found
end
-- Calls `each` with at most 1000 names at a time: more do not fit a call.
local function in_batches(all, each)
  if #all <= 1000 then return each(all) end
  for from = 1, #all, 1000 do
    local batch = {}
    for i = from, math.min(from + 999, #all) do batch[#batch + 1] = all[i] end
    each(batch)
  end
end
