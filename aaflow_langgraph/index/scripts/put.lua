#!lua
-- Publishes an extent under its writer's lease, or leases the one that has its key already (Index.put).
-- Keys: below. Arguments: now or '', lease, lease seconds, id, epoch, owner or '-', 'offset num_bytes generation',
--   parent or '-', on disk 1/0, 'start stop', canonical stop, key, record, packed token ids or '', names: end id, hashes...
-- Reply: {deadline, id, state}, or {'fenced'}, or {'taken'} when the id names another extent.
local records, state, tokens, names, keys, children, readers, owned, leases, held, used, owners = unpack(KEYS)
-- include: clock
-- include: owner
-- include: lease
-- include: state
local _, lease, lease_s, id, epoch, owner, range, parent, on_disk, span, canonical, key, record, packed = unpack(ARGV, 1, 14)
if owner ~= '-' and not is_current(owner, epoch) then return {'fenced'} end
local known = redis.call('HGET', keys, key)
local e = known and read_state(known)
if e then
  -- An entry that is not what its key says is lost: the new one takes its key.
  local of_span, of_canonical, end_id = (redis.call('HGET', records, known) or ''):match('^(%d+ %d+) (%d+) %x+ (%x+)')
  if of_span ~= span or of_canonical ~= canonical or end_id ~= ARGV[15] then e = nil end
end
local line
if e then
  id = known
  local has_place = e.owner ~= '-'
  if not has_place then e.owner, e.range = owner, range end
  if on_disk == '1' then e.on_disk = '1' end
  if not has_place and owner ~= '-' then redis.call('ZADD', owned, 0, owner .. ' ' .. id) end
  line = write_state(e)
else
  if redis.call('HEXISTS', state, id) == 1 then return {'taken'} end
  -- A parent that is gone, or lies in another pool, leads to nothing: the extent is whole without the bond.
  local above = parent ~= '-' and owner ~= '-' and read_state(parent)
  if above and above.owner == owner then
    redis.call('ZADD', children, 0, parent .. ' ' .. id)
  else
    parent = '-'
  end
  line = write_state({id = id, span = span, owner = owner, range = range, parent = parent, on_disk = on_disk})
  redis.call('HSET', records, id, record)
  if packed ~= '' then redis.call('HSET', tokens, id, packed) end
  redis.call('HSET', keys, key, id)
  if owner ~= '-' then redis.call('ZADD', owned, 0, owner .. ' ' .. id) end
  local entry = id .. ':' .. span:gsub(' ', ':') .. ':' .. canonical
  for first = 15, #ARGV, 1000 do
    local last = math.min(first + 999, #ARGV)
    local values, pairs_ = redis.call('HMGET', names, unpack(ARGV, first, last)), {}
    for i, value in ipairs(values) do
      pairs_[2 * i - 1] = ARGV[first + i - 1]
      pairs_[2 * i] = value and value .. ' ' .. entry or entry
    end
    redis.call('HSET', names, unpack(pairs_))
  end
end
take_lease(lease, {id}, now + lease_s)
return {seconds(now + lease_s), id, line}
