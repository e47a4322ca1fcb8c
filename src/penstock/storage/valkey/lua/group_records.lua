-- Records of groups and of their limits: read once in a call, written by write(). groups.lua has the rules.
--
-- groups           key -> w:4 a:4 h:4 b:4 cost:6 parked:6 paused:1 starts:4 level:6 level_at:6 level_per:6 look:6 over:6
--   w a h b        members that wait, are active, hold a slot without being either, are blocked;  cost: of those waiting
--   parked         no member is admitted or started before that;  starts: the number in the window
--   level          of the bucket at level_at, in 1 / level_per of a token: whole numbers (0 0 0: it was never used)
--   look, over     its scores in parked and in fading (0: absent)
-- group:<key>      its blocked members: score priority, member as in waiting; those at the front: score FRONT
-- starts:<key>     at:6 count:4, the starts in the window, the oldest first
-- limits           key ('' the queue, '*' all groups without a limit of their own) -> {concurrency, count, per, capacity,
--                  refill, per}; 0: no bound

Groups.FORMAT = '>I4I4I4I4I6I6BI4I6I6I6I6I6'
Groups.FRONT = -2 ^ 53

function Groups.parse_limit(packed)
  local fields = decode(packed)
  return {
    concurrency = fields[1], count = fields[2], per = fields[3], capacity = fields[4], refill = fields[5],
    bucket_per = fields[6],
  }
end

Groups.NO_LIMIT = { concurrency = 0, count = 0, per = 0, capacity = 0, refill = 0, bucket_per = 0 }

-- Read the limits of many groups.
function Groups.read_limits(keys)
  local fields = { '*' }
  for i = 1, #keys do fields[i + 1] = keys[i] end
  local stored = read_many('HMGET', K.limits, fields)
  local every = stored[1] and Groups.parse_limit(stored[1]) or Groups.NO_LIMIT
  for i = 1, #keys do
    local packed, key = stored[i + 1], keys[i]
    Q.limits[key] = packed and Groups.parse_limit(packed) or key == '' and Groups.NO_LIMIT or every
  end
end

function Groups.limit_of(key)
  if not Q.limits[key] then Groups.read_limits({ key }) end
  return Q.limits[key]
end

-- Drop the starts that have left the window.
function Groups.slide(group)
  local limit, key = group.limit, Q.prefix .. ':starts:' .. group.key
  group.first_start = nil
  if limit.count == 0 then
    if group.starts > 0 then call('UNLINK', key) end
    group.starts = 0
    return
  end
  while group.starts > 0 do
    local first = call('LINDEX', key, 0)
    local at, count = Q.now, group.starts
    if first then at, count = unpack('>I6I4', first) end
    if first and at + limit.per > Q.now then
      group.first_start = at
      return
    end
    call('LPOP', key)
    group.starts, group.is_changed = max(0, group.starts - count), true
  end
end

function Groups.refill(group)
  local limit, level = group.limit, group.level
  if limit.capacity == 0 then return end
  local full = limit.capacity * limit.bucket_per
  if group.level_per == 0 then
    level = full
  elseif group.level_per ~= limit.bucket_per then
    level = floor(level / group.level_per) * limit.bucket_per
  end
  group.level = min(full, level + (Q.now - group.level_at) * limit.refill)
  group.level_at, group.level_per = Q.now, limit.bucket_per
end

function Groups.new(key)
  return {
    key = key, w = 0, a = 0, h = 0, b = 0, cost = 0, parked = 0, paused = false, starts = 0, level = 0, level_at = 0,
    level_per = 0, look = 0, over = 0, started = 0, heads = {}, at = 0, to_add = {}, limit = nil, first_start = nil,
    is_stored = false, is_changed = false, is_touched = false, next_look = nil, is_filling = false, popped = nil,
  }
end

function Groups.parse(key, packed)
  local group = Groups.new(key)
  if packed then
    local paused
    group.w, group.a, group.h, group.b, group.cost, group.parked, paused, group.starts, group.level, group.level_at,
      group.level_per, group.look, group.over = unpack(Groups.FORMAT, packed)
    group.paused, group.is_stored = paused == 1, true
  end
  return group
end

-- Read many groups, each once per call, and bring them up to date.
function Groups.read(keys)
  local records = read_many('HMGET', K.groups, keys)
  Groups.read_limits(keys)
  for i = 1, #keys do
    local group = Groups.parse(keys[i], records[i])
    group.limit = Q.limits[keys[i]]
    if group.b > 0 then call('ZCARD', Q.prefix .. ':group:' .. group.key) end -- check the type before the first write
    if group.limit.count > 0 and group.starts == 0 then call('LLEN', Q.prefix .. ':starts:' .. group.key) end
    Groups.slide(group)
    Groups.refill(group)
    Q.grouped[keys[i]] = group
  end
end

function Groups.of(key)
  if not Q.grouped[key] then Groups.read({ key }) end
  return Q.grouped[key]
end

-- Read those groups that the call does not have yet; without it, of() would ask for each.
function Groups.read_for(keys)
  local unknown, is_listed = {}, {}
  for _, key in pairs(keys) do
    if not is_listed[key] and not Q.grouped[key] then
      unknown[#unknown + 1] = key
      is_listed[key] = true
    end
  end
  if unknown[1] then Groups.read(unknown) end
end

-- After a limit was set, read it again. Return the group under it.
function Groups.reread(key)
  Q.limits = {}
  local group = Groups.of(key)
  group.limit = Groups.limit_of(key)
  Groups.slide(group)
  Groups.refill(group)
  return group
end

-- Mark the group, so that settle() fills it.
function Groups.touch(group)
  group.is_changed = true
  if not group.is_touched then
    group.is_touched = true
    local list = Q.touched or {}
    list[#list + 1] = group
    Q.touched = list
  end
end

function Groups.use(bit)
  if not bit_of(Q.uses, bit) then Q.uses = Q.uses + bit end
end

-- Return the key of the blocked members, after adding those that are still buffered.
function Groups.set_of(group)
  local key, to_add = Q.prefix .. ':group:' .. group.key, group.to_add
  if to_add[1] then
    group.to_add = {}
    send('ZADD', key, to_add)
  end
  return key
end

-- Return when nothing of a group without members is left (0: it has members, or is paused).
function Groups.over_at(group)
  if group.w + group.a + group.h + group.b > 0 or group.paused or group.key == '' then return 0 end
  local limit, at = group.limit, max(group.parked, Q.now)
  if group.started > 0 then
    at = max(at, Q.now + limit.per)
  elseif group.starts > 0 then
    at = max(at, unpack('>I6', call('LINDEX', Q.prefix .. ':starts:' .. group.key, -1)) + limit.per)
  end
  if limit.capacity > 0 then
    local missing = limit.capacity * limit.bucket_per - group.level
    at = max(at, Q.now + math.ceil(missing / limit.refill))
  end
  return at
end

function Groups.place(lists, part, group, field, at)
  if group[field] == at then return end
  local list = list_in(lists, at > 0 and part or part .. '-')
  if at > 0 then list[#list + 1] = digits(at) end
  list[#list + 1] = group.key
  group[field] = at
end

function Groups.drop(group, lists)
  if group.is_stored then
    list_in(lists, 'groups-')[#list_in(lists, 'groups-') + 1] = group.key
    list_in(lists, 'group_keys-')[#list_in(lists, 'group_keys-') + 1] = group.key
  end
  group.is_stored, group.is_changed = false, false
end

function Groups.store(group, lists)
  if not group.is_stored and group.key ~= '' then
    local keys = list_in(lists, 'group_keys')
    keys[#keys + 1], keys[#keys + 2] = '0', group.key
  end
  local records = list_in(lists, 'groups')
  records[#records + 1] = group.key
  records[#records + 1] = pack(Groups.FORMAT, group.w, group.a, group.h, group.b, group.cost, group.parked,
    group.paused and 1 or 0, group.starts, group.level, group.level_at, group.level_per, group.look, group.over)
  if group.started > 0 then
    call('RPUSH', Q.prefix .. ':starts:' .. group.key, pack('>I6I4', Q.now, group.started))
    group.started = 0
  end
  group.is_stored, group.is_changed = true, false
end

function Groups.write()
  local lists = {}
  for _, group in pairs(Q.grouped) do
    if group.is_changed then
      if group.to_add[1] then Groups.set_of(group) end
      local look, over = group.next_look or group.look, group.next_look and Groups.over_at(group) or group.over
      local is_over = group.next_look and over > 0 and over <= Q.now
      Groups.place(lists, 'parked', group, 'look', is_over and 0 or look)
      Groups.place(lists, 'fading', group, 'over', is_over and 0 or over)
      if is_over then Groups.drop(group, lists) else Groups.store(group, lists) end
      if group.look > 0 then Q.due = min(Q.due or group.look, group.look) end
      group.next_look = nil
    end
  end
  for part, list in pairs(lists) do
    local name = string.match(part, '^([%a_]+)')
    if part == 'groups' then
      send('HSET', K.groups, list)
    elseif part == 'groups-' then
      send('HDEL', K.groups, list)
    elseif name == part then
      send('ZADD', K[name], list)
    else
      send('ZREM', K[name], list)
    end
  end
end
