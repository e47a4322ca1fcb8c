-- Groups: jobs that share a limit or an order; and the limits of the queue itself, which is the group of the empty key.
--
-- groups           key -> w:4 a:4 h:4 b:4 cost:6 parked:6 paused:1 starts:4 level:6 level_at:6 level_per:6 look:6 over:6
--   w a h b        members waiting, active, holding a slot without being either, blocked;  cost: of those waiting
--   parked         nothing is admitted or started before that;  starts: how many are in the window
--   level          of the bucket at level_at, in 1 / level_per of a token: whole numbers (0 0 0: it was never used)
--   look, over     its scores in parked and in fading (0: it is not there)
-- group:<key>      its blocked members: score priority, member as in waiting; those at the front: score FRONT
-- starts:<key>     at:6 count:4, the starts in the window, the oldest first
-- limits           key ('' the queue, '*' all groups without their own) -> {concurrency, count, per, capacity, refill,
--                  per}; 0: no bound
--
-- The part of a job says as what its group counts it: w, a, b as above, h holding, k holding and blocked, nil not at all.
-- Its grip is what it keeps of a slot while it is blocked or scheduled: 1 it stands at the front, 2 it holds the slot.
-- What a group needs in this call is written at once (its blocked members, which may be read again) or by settle().

Groups.FORMAT = '>I4I4I4I4I6I6BI4I6I6I6I6I6'
Groups.FRONT = -2 ^ 53
Groups.AT_ONCE = 1000
Groups.PER_CLAIM = 100

function Groups.parse_limit(packed)
  local said = decode(packed)
  return {
    concurrency = said[1], count = said[2], per = said[3], capacity = said[4], refill = said[5], bucket_per = said[6],
  }
end

Groups.NO_LIMIT = { concurrency = 0, count = 0, per = 0, capacity = 0, refill = 0, bucket_per = 0 }

-- Reads the limits of many groups at once.
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

-- The starts that have left the window go.
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
    level_per = 0, look = 0, over = 0, started = 0, heads = {}, at = 0,
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

-- Reads many groups at once, each once per call: as they are now.
function Groups.read(keys)
  local records = read_many('HMGET', K.groups, keys)
  Groups.read_limits(keys)
  for i = 1, #keys do
    local group = Groups.parse(keys[i], records[i])
    group.limit = Q.limits[keys[i]]
    Groups.slide(group)
    Groups.refill(group)
    Q.grouped[keys[i]] = group
  end
end

function Groups.of(key)
  if not Q.grouped[key] then Groups.read({ key }) end
  return Q.grouped[key]
end

-- Reads the groups of many jobs: without it of() would ask for each.
function Groups.read_for(jobs)
  local keys, is_listed = {}, {}
  for _, job in pairs(jobs) do
    local key = job.binds and Groups.key_of(job)
    if key and not is_listed[key] and not Q.grouped[key] then
      keys[#keys + 1] = key
      is_listed[key] = true
    end
  end
  if keys[1] then Groups.read(keys) end
end

-- A limit was set: what was read before is no longer true. Returns the group under it.
function Groups.reread(key)
  Q.limits = {}
  local group = Groups.of(key)
  group.limit = Groups.limit_of(key)
  Groups.slide(group)
  Groups.refill(group)
  return group
end

-- settle() will look at it.
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

function Groups.key_of(job)
  if job.group_key == nil then job.group_key = annex_of(job).g or false end
  return job.group_key
end

function Groups.cost_of(job)
  return annex_of(job).c or 1
end

-- Why a job of this annex can never start, if it costs more than the bucket of its group can hold.
function Groups.cost_refused(id, packed_annex)
  local annex = packed_annex and decode(packed_annex)
  local capacity = annex and annex.g and annex.c and Groups.limit_of(annex.g).capacity or 0
  if capacity == 0 or annex.c <= capacity then return nil end
  return format('job %s costs %d; the bucket of its group %s holds %d', id, annex.c, annex.g, capacity)
end

function Groups.set_of(group)
  return Q.prefix .. ':group:' .. group.key
end

function Groups.line_up(job, group)
  local front = job.grip ~= nil
  job.group_member = front and '\0' .. pack('>I6', job.number) .. '1' .. job.id or member_of(job)
  call('ZADD', Groups.set_of(group), front and Groups.FRONT or job.priority, job.group_member)
end

-- Counts the job over from its part to another.
function Groups.move(job, part)
  if not Groups.key_of(job) then
    job.part = nil -- it binds, but not to a group
    return
  end
  local group, old = Groups.of(job.group_key), job.part
  if old == 'w' then
    group.w, group.cost = group.w - 1, group.cost - Groups.cost_of(job)
  elseif old == 'a' then
    group.a = group.a - 1
  end
  if old == 'b' or old == 'k' then
    group.b = group.b - 1
    if not group.is_filling then call('ZREM', Groups.set_of(group), job.group_member) end
  end
  if old == 'h' or old == 'k' then group.h = group.h - 1 end
  job.part = part
  if part == 'w' then
    group.w, group.cost = group.w + 1, group.cost + Groups.cost_of(job)
  elseif part == 'a' then
    group.a = group.a + 1
  end
  if part == 'b' or part == 'k' then
    group.b = group.b + 1
    Groups.line_up(job, group)
  end
  if part == 'h' or part == 'k' then group.h = group.h + 1 end
  Groups.use(2)
  Groups.touch(group)
end

-- grip as above; nil: it is a new one in the group's line.
function Groups.block(job, grip)
  job.state, job.by, job.grip = 'b', 'g', grip
  changed(job)
  Groups.move(job, grip == 2 and 'k' or 'b')
end

-- Why the group has no room for the first of its blocked members, and when it may have (nil: time does not tell). job is
-- that member, if it is known: without it only what holds for any of them is said.
function Groups.why(group, job)
  local limit, busy = group.limit, group.w + group.a
  if group.paused then return 'paused' end
  if group.parked > Q.now then return 'asked', group.parked end
  if job and job.grip ~= 2 then busy = busy + group.h end
  if limit.concurrency > 0 and busy >= limit.concurrency then return 'concurrency' end
  if limit.count > 0 and group.starts + group.w >= limit.count then
    return 'rate', group.first_start and group.first_start + limit.per
  end
  if job and limit.capacity > 0 then
    local needed = group.cost + min(Groups.cost_of(job), limit.capacity)
    local missing = needed * limit.bucket_per - group.level
    if missing > 0 then
      return 'bucket', needed <= limit.capacity and Q.now + math.ceil(missing / limit.refill) or nil
    end
  end
end

function Groups.can_start(group, job)
  local limit = group.limit
  if group.paused or group.parked > Q.now then return false end
  if limit.concurrency > 0 and group.a >= limit.concurrency then return false end
  if limit.count > 0 and group.starts >= limit.count then return false end
  return limit.capacity == 0 or group.level >= min(Groups.cost_of(job), limit.capacity) * limit.bucket_per
end

function Groups.charge(group, starts, cost)
  local limit = group.limit
  if limit.count > 0 then
    group.starts, group.started = group.starts + starts, group.started + starts
    group.first_start = group.first_start or Q.now
  end
  if limit.capacity > 0 then group.level = group.level - min(cost, limit.capacity) * limit.bucket_per end
  group.is_changed = true
end

-- A waiting job is to be leased. False: it went back to its group instead.
function Groups.start(job)
  if not Groups.key_of(job) then return true end
  local group = Groups.of(job.group_key)
  if Groups.can_start(group, job) then
    Groups.move(job, 'a')
    Groups.charge(group, 1, Groups.cost_of(job))
    return true
  end
  Groups.block(job, 1)
  emit('blocked', job)
  return false
end

-- A job is to enter waiting. True: its group blocks it.
function Groups.hold_back(job, keeps_number)
  if not Groups.key_of(job) then return false end
  local group, old = Groups.of(job.group_key), job.part
  local limit = group.limit
  local is_strict = limit.concurrency == 1
  if old == 'h' or (old == 'a' and (keeps_number or is_strict)) then
    local is_full = old == 'h' and limit.concurrency > 0 and group.w + group.a >= limit.concurrency
    if is_full or group.paused or group.parked > Q.now then
      Groups.block(job, (old == 'h' or is_strict) and 2 or 1)
      return true
    end
  else
    if old then Groups.move(job, nil) end
    job.grip = nil
    if group.b > 0 or Groups.why(group, job) then
      Groups.block(job, nil)
      return true
    end
  end
  job.grip = nil
  Groups.move(job, 'w')
  return false
end

-- A member waits for a time to come, or for a signal: with it, in a strict group, the others.
function Groups.scheduled(job)
  local is_held = job.part == 'a' and Groups.key_of(job) and Groups.of(job.group_key).limit.concurrency == 1
  if is_held then
    job.grip = 2
    Groups.move(job, 'h')
  elseif job.part == 'a' or job.part == 'w' then
    Groups.move(job, nil)
  end
end

-- A member waits for jobs it depends on: as for a time to come, and not in its group's line.
function Groups.wait_elsewhere(job)
  if job.part == 'k' then
    Groups.move(job, 'h')
  elseif job.part == 'b' then
    Groups.leave(job)
  else
    Groups.scheduled(job)
  end
end

-- Its priority has changed.
function Groups.line_up_again(job)
  if job.part ~= 'b' and job.part ~= 'k' then return end
  local group = Groups.of(Groups.key_of(job))
  call('ZREM', Groups.set_of(group), job.group_member)
  Groups.line_up(job, group)
  Groups.touch(group)
end

-- It is a member no longer.
function Groups.leave(job)
  if job.part then Groups.move(job, nil) end
  job.grip = nil
end

-- How many could be admitted at most, whatever they cost.
function Groups.room(group)
  local limit, room = group.limit, min(group.b, Groups.AT_ONCE)
  if room == 0 or Groups.why(group) then return 0 end
  if limit.concurrency > 0 then room = min(room, max(1, limit.concurrency - group.w - group.a - group.h)) end
  if limit.count > 0 then room = min(room, limit.count - group.starts - group.w) end
  return room
end

-- Reads the first blocked members of groups: as many as there may be room for.
function Groups.read_heads(groups)
  local ids = {}
  for i = 1, #groups do
    local group, room = groups[i], Groups.room(groups[i])
    group.heads, group.at = room > 0 and call('ZRANGE', Groups.set_of(group), 0, room - 1) or {}, 0
    for n = 1, #group.heads do ids[#ids + 1] = sub(group.heads[n], 9) end
  end
  if ids[1] then load(ids, true) end
end

-- The first of those of the blocked members that were not admitted, or nil.
function Groups.head(group)
  if group.at == #group.heads then
    Groups.forget_admitted(group)
    Groups.read_heads({ group })
  end
  local member = group.heads[group.at + 1]
  local job = member and found(sub(member, 9))
  return job and job.group_member == member and job or nil
end

function Groups.forget_admitted(group)
  if group.at > 0 then send('ZREM', Groups.set_of(group), { spread(group.heads, 1, group.at) }) end
  group.heads, group.at = {}, 0
end

function Groups.admit(job)
  if not job.grip then job.number = draw() end
  Groups.move(job, 'w')
  job.state, job.by, job.grip, job.ready_at = 'w', nil, nil, Q.now
  changed(job)
  emit('unblocked', job)
end

-- Admits blocked members while there is room; says when to look again.
function Groups.fill(group)
  local admitted = 0
  group.next_look, group.is_filling = 0, true
  while group.b > 0 do
    local why, at = Groups.why(group)
    local job = not why and Groups.head(group)
    if job then why, at = Groups.why(group, job) end
    if why or not job or admitted == Groups.AT_ONCE then
      group.next_look = why and (at or 0) or job and Q.now or 0
      break
    end
    Groups.admit(job)
    admitted, group.at = admitted + 1, group.at + 1
  end
  Groups.forget_admitted(group)
  group.is_filling = false
end

-- When nothing of the group is left, if it has no members (0: it has, or is paused).
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

-- Fills the groups that were touched, in that order, and writes what has become of them.
function Groups.settle()
  local touched = Q.touched
  if touched then
    Q.touched = false
    Groups.read_heads(touched)
    for i = 1, #touched do
      Groups.fill(touched[i])
      touched[i].is_touched = false -- only now: filling touches, too
    end
  end
  Groups.write()
end

function Groups.write()
  local lists = {}
  for _, group in pairs(Q.grouped) do
    if group.is_changed then
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

function Groups.touch_all(keys)
  local unknown = {}
  for i = 1, #keys do
    if not Q.grouped[keys[i]] then unknown[#unknown + 1] = keys[i] end
  end
  if unknown[1] then Groups.read(unknown) end
  for i = 1, #keys do Groups.touch(Q.grouped[keys[i]]) end
end

-- Fills up to limit groups whose time has come. How many there were.
function Groups.look_again(limit)
  local keys = call('ZRANGEBYSCORE', K.parked, '-inf', digits(Q.now), 'LIMIT', 0, limit)
  if keys[1] then
    Groups.touch_all(keys)
    Groups.settle()
    flush()
  end
  return #keys
end

-- Fills up to limit groups from a key on ('' from the first): a limit they share has changed. The rest is sweep's.
function Groups.fill_from(key, limit)
  local keys = call('ZRANGEBYLEX', K.group_keys, key == '' and '-' or '(' .. key, '+', 'LIMIT', 0, limit)
  Groups.touch_all(keys)
  if #keys == limit then
    call('HSET', K.meta, 'regroup', keys[limit])
  elseif key ~= '' then
    call('HDEL', K.meta, 'regroup')
  end
end

-- What time brings to groups. Returns how many of one kind there were at most.
function Groups.sweep(limit)
  local looked_at = Groups.look_again(limit)
  local from = call('HGET', K.meta, 'regroup')
  if from then Groups.fill_from(from, limit) end
  local over = call('ZRANGEBYSCORE', K.fading, '-inf', digits(Q.now), 'LIMIT', 0, limit)
  Groups.touch_all(over)
  Groups.settle()
  flush()
  if call('ZCARD', K.group_keys) == 0 and call('HLEN', K.limits) == 0 then Q.uses = Q.uses - 2 end
  return max(looked_at, #over, from and call('HEXISTS', K.meta, 'regroup') == 1 and limit or 0)
end

-- What was parked is no longer; without limits there is nothing to look for.
function Groups.sweep_queue()
  if Groups.of('').parked > Q.now or call('HEXISTS', K.limits, '') == 1 then return end
  call('HDEL', K.groups, '')
  Q.grouped[''], Q.uses = nil, Q.uses - 1
end

-- How many leases the queue's own limits allow, and if that is none, how long until they do (-1: time does not tell).
function Groups.allowance(count)
  local queue = Groups.of('')
  local limit = queue.limit
  if queue.parked > Q.now then return 0, queue.parked - Q.now end
  if limit.concurrency > 0 then
    count = min(count, limit.concurrency - call('ZCARD', K.active))
    if count <= 0 then return 0, -1 end
  end
  if limit.count > 0 then
    count = min(count, limit.count - queue.starts)
    if count <= 0 then return 0, queue.first_start and queue.first_start + limit.per - Q.now or -1 end
  end
  return count
end

-- Nothing is started before that: in the group, or, if the key is empty, in the queue. A time that has passed (0) lets
-- it go on.
function Groups.park(key, until_ms)
  local group = Groups.of(key)
  group.parked = until_ms
  Groups.use(key == '' and 1 or 2)
  if key == '' then group.is_changed = true else Groups.touch(group) end
end

-- The same for the group of a job, or its queue. What is parked for longer stays so.
function Groups.park_of(job, is_queue, until_ms)
  local key = not is_queue and job.binds and Groups.key_of(job) or ''
  Groups.park(key, max(Groups.of(key).parked, until_ms))
end
