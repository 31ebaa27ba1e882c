-- Ends an extent's bonds to parent and children: they order eviction inside one pool.
local function unbind(e)
  if e.parent ~= '-' then redis.call('ZREM', children, e.parent .. ' ' .. e.id) end
  e.parent = '-'
  local bonds = members_of(children, e.id)
  for _, bond in ipairs(bonds) do
    local child = read_state(bond:sub(18))
    if child then
      child.parent = '-'
      write_state(child)
    end
    redis.call('ZREM', children, bond)
  end
end

-- Takes an extent out of what its names lead to.
local function drop_names(entry, batch)
  local values = redis.call('HMGET', names, unpack(batch))
  local empty, changed = {}, {}
  for i, value in ipairs(values) do
    if value == entry then
      empty[#empty + 1] = batch[i]
    elseif value then
      local kept = {}
      for other in value:gmatch('%S+') do
        if other ~= entry then kept[#kept + 1] = other end
      end
      changed[#changed + 1], changed[#changed + 2] = batch[i], table.concat(kept, ' ')
    end
  end
  if #empty > 0 then redis.call('HDEL', names, unpack(empty)) end
  if #changed > 0 then redis.call('HSET', names, unpack(changed)) end
end

-- Forgets an extent, every lease on it, every name of it. `is_free`: it is known to have neither leases nor children.
local function forget(e, is_free)
  if is_free then
    if e.parent ~= '-' then redis.call('ZREM', children, e.parent .. ' ' .. e.id) end
  else
    for _, bond in ipairs(members_of(readers, e.id)) do drop_lease(bond:sub(18)) end
    unbind(e)
  end
  if e.owner ~= '-' then redis.call('ZREM', owned, e.owner .. ' ' .. e.id) end
  local record = redis.call('HGET', records, e.id) or ''
  local start, stop, canonical, at, behind, key = fields_of(record)
  if start then
    if redis.call('HGET', keys, key) == e.id then redis.call('HDEL', keys, key) end
    local entry = table.concat({e.id, start, stop, canonical}, ':')
    in_batches(names_of(record, start, stop, at, behind), function(batch) drop_names(entry, batch) end)
  end
  redis.call('HDEL', records, e.id)
  redis.call('HDEL', tokens, e.id)
  redis.call('HDEL', state, e.id)
end

-- Takes an extent from its place; one that is nowhere then is forgotten.
local function vacate(e)
  if e.on_disk == '0' then return forget(e) end
  redis.call('ZREM', owned, e.owner .. ' ' .. e.id)
  if e.parent ~= '-' then redis.call('ZREM', children, e.parent .. ' ' .. e.id) end
  e.owner, e.range, e.parent = '-', '0 0 0', '-'
  write_state(e)
end

-- Takes every place of an owner; how many.
local function vacate_all(owner)
  local places = members_of(owned, owner)
  for _, bond in ipairs(places) do
    local e = read_state(bond:sub(#owner + 2))
    if e and e.owner == owner then vacate(e) else redis.call('ZREM', owned, bond) end
  end
  return #places
end
