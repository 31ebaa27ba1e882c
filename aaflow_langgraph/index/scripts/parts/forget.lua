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
local function drop_names(entry, names_of)
  local values = redis.call('HMGET', names, unpack(names_of))
  local empty, changed = {}, {}
  for i, value in ipairs(values) do
    if value == entry then
      empty[#empty + 1] = names_of[i]
    elseif value then
      local kept = {}
      for other in value:gmatch('%S+') do
        if other ~= entry then kept[#kept + 1] = other end
      end
      changed[#changed + 1], changed[#changed + 2] = names_of[i], table.concat(kept, ' ')
    end
  end
  if #empty > 0 then redis.call('HDEL', names, unpack(empty)) end
  if #changed > 0 then redis.call('HSET', names, unpack(changed)) end
end

-- Forgets an extent, every lease on it, every name of it.
local function forget(e)
  for _, bond in ipairs(members_of(readers, e.id)) do drop_lease(bond:sub(18)) end
  unbind(e)
  if e.owner ~= '-' then redis.call('ZREM', owned, e.owner .. ' ' .. e.id) end
  local start, stop, canonical, rest, borders =
    (redis.call('HGET', records, e.id) or ''):match('^(%d+) (%d+) (%d+) %S+ ([^@]+)@?(.*)$')
  if start then
    local key = rest:match('^%S+') .. ':' .. start .. ':' .. canonical
    if borders ~= '' then key = key .. ':' .. borders end
    if redis.call('HGET', keys, key) == e.id then redis.call('HDEL', keys, key) end
    local entry, batch = table.concat({e.id, start, stop, canonical}, ':'), {}
    for name in rest:gmatch('%S+') do
      batch[#batch + 1] = name
      if #batch == 1000 then
        drop_names(entry, batch)
        batch = {}
      end
    end
    if #batch > 0 then drop_names(entry, batch) end
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
