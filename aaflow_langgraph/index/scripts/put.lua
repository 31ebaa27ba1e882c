#!lua
-- Publishes an extent under its writer's lease, or leases the one that has its key already (Index.put).
-- Keys: below. Arguments: now or '', lease, lease seconds, id, epoch, owner or '-', 'offset num_bytes generation',
--   parent or '-', on disk 1/0, record, packed token ids or ''.
-- Reply: {deadline, id, state, and the record of an extent that was there}, or {'fenced'}, or {'taken'} when the id names another extent.
local records, state, tokens, names, keys, children, readers, owned, held, owners = unpack(KEYS)
-- include: clock
-- include: owner
-- include: lease
-- include: state
-- include: names
local _, lease, lease_s, id, epoch, owner, range, parent, on_disk, record, packed = unpack(ARGV)
if owner ~= '-' and not is_current(owner, epoch) then return {'fenced'} end
local start, stop, canonical, at, behind, key = fields_of(record)
local known = redis.call('HGET', keys, key)
local e, there = known and read_state(known), nil
if e then
  -- An entry that is not what its key says is lost: the new one takes its key.
  there = redis.call('HGET', records, known) or ''
  local _, last, _, _, _, theirs = fields_of(there)
  if theirs ~= key or last ~= stop then e, there = nil, nil end
end
if e then
  if e.owner == '-' and owner ~= '-' then
    e.owner, e.range = owner, range
    redis.call('ZADD', owned, '0', owner .. ' ' .. known)
  end
  if on_disk == '1' then e.on_disk = '1' end
  local created, count = e.used:match('^(%d+) %d+ (%d+)$')
  e.used = string.format('%s %.0f %d', created, tick, count + 1)
else
  if redis.call('HEXISTS', state, id) == 1 then return {'taken'} end
  -- A parent that is gone, or lies in another pool, leads to nothing: the extent is whole without the bond.
  local above = parent ~= '-' and owner ~= '-' and read_state(parent)
  if above and above.owner == owner then
    redis.call('ZADD', children, '0', parent .. ' ' .. id)
  else
    parent = '-'
  end
  e = {id = id, span = start .. ' ' .. stop, owner = owner, range = range, parent = parent, on_disk = on_disk}
  e.used = string.format('%.0f %.0f 1', tick, tick)
  redis.call('HSET', records, id, record)
  if packed ~= '' then redis.call('HSET', tokens, id, packed) end
  redis.call('HSET', keys, key, id)
  if owner ~= '-' then redis.call('ZADD', owned, '0', owner .. ' ' .. id) end
  local entry = table.concat({id, start, stop, canonical}, ':')
  in_batches(names_of(record, start, stop, at, behind), function(batch)
    local changes = {}
    for i, value in ipairs(redis.call('HMGET', names, unpack(batch))) do
      changes[2 * i - 1], changes[2 * i] = batch[i], value and value .. ' ' .. entry or entry
    end
    redis.call('HSET', names, unpack(changes))
  end)
end
write_state(e)
local deadline = seconds(now + lease_s)
take_lease(lease, deadline, {e.id})
return {deadline, e.id, line_of(e), there}
