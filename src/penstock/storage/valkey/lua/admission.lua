-- Admission: blocked members of groups with room enter waiting; and how many leases the queue's own limits allow.

-- Return the most members that could be admitted, whatever they cost.
function Groups.room(group)
  local limit, room = group.limit, min(group.b, BOUNDS.ADMITTED_AT_ONCE)
  if room == 0 or Groups.why(group) then return 0 end
  if limit.concurrency > 0 then room = min(room, max(1, limit.concurrency - group.w - group.a - group.h)) end
  if limit.count > 0 then room = min(room, limit.count - group.starts - group.w) end
  return room
end

-- Pop the first blocked members of a group whose limit says exactly how many will be admitted.
function Groups.pop_heads(group, room)
  local rows, heads = call('ZPOPMIN', Groups.set_of(group), room), {}
  for i = 1, #rows, 2 do heads[#heads + 1] = rows[i] end
  group.popped = rows
  return heads
end

-- Read the first blocked members of groups: as many as there may be room for. popping: to admit them.
function Groups.read_heads(groups, popping)
  local ids = {}
  for i = 1, #groups do
    local group, room = groups[i], Groups.room(groups[i])
    group.heads, group.at = {}, 0
    if room > 0 and popping and group.h == 0 and group.limit.capacity == 0 then
      group.heads = Groups.pop_heads(group, room)
    elseif room > 0 then
      group.heads = call('ZRANGE', Groups.set_of(group), 0, room - 1)
    end
    for n = 1, #group.heads do ids[#ids + 1] = sub(group.heads[n], 9) end
  end
  if ids[1] then Shortcut.load_blocked(ids) end
end

-- Return the first blocked member that was not admitted, or nil.
function Groups.head(group)
  if group.at == #group.heads then
    Groups.forget_admitted(group)
    Groups.read_heads({ group }, group.is_filling)
  end
  local member = group.heads[group.at + 1]
  if not member then return nil end
  local id = sub(member, 9)
  local job = Q.fresh and Q.fresh[id] or job_for(id)
  return job and job.group_member == member and job or nil
end

-- Remove admitted members from the group's line; put back those that were popped for nothing.
function Groups.forget_admitted(group)
  if group.popped then
    local to_add = group.to_add
    for i = 2 * group.at + 1, #group.popped, 2 do
      to_add[#to_add + 1] = group.popped[i + 1]
      to_add[#to_add + 1] = group.popped[i]
    end
  elseif group.at > 0 then
    send('ZREM', Groups.set_of(group), { spread(group.heads, 1, group.at) })
  end
  group.heads, group.at, group.popped = {}, 0, nil
end

function Groups.admit(group, job)
  if job.is_fresh then return Shortcut.admit(group, job) end
  if not job.slot_hold then job.number = draw() end
  Groups.move(job, 'w')
  job.state, job.by, job.slot_hold, job.ready_at = 'w', nil, nil, Q.now
  changed(job)
  emit('unblocked', job)
end

-- Admit blocked members while there is room; note when to look again.
function Groups.fill(group)
  local admitted = 0
  group.next_look, group.is_filling = 0, true
  while group.b > 0 do
    local why, at = Groups.why(group)
    local job = not why and Groups.head(group)
    if job then why, at = Groups.why(group, job) end
    if why or not job or admitted == BOUNDS.ADMITTED_AT_ONCE then
      group.next_look = why and (at or 0) or job and Q.now or 0
      break
    end
    Groups.admit(group, job)
    admitted, group.at = admitted + 1, group.at + 1
  end
  Groups.forget_admitted(group)
  group.is_filling = false
end

-- Fill the touched groups, in order. Return true if one of them is due again immediately.
function Groups.fill_touched()
  local touched, is_due = Q.touched, false
  if not touched then return false end
  Q.touched = false
  Groups.read_heads(touched, true)
  for i = 1, #touched do
    local group = touched[i]
    Groups.fill(group)
    group.is_touched = false -- only now, because filling touches too
    is_due = is_due or group.next_look > 0 and group.next_look <= Q.now
  end
  Q.fresh = false
  return is_due
end

-- Fill the touched groups, and write them.
function Groups.settle()
  Groups.fill_touched()
  Groups.write()
end

function Groups.touch_all(keys)
  local unread = {}
  for i = 1, #keys do
    if not Q.grouped[keys[i]] then unread[#unread + 1] = keys[i] end
  end
  if unread[1] then Groups.read(unread) end
  for i = 1, #keys do Groups.touch(Q.grouped[keys[i]]) end
end

-- Fill up to limit groups that are due. Return how many there were.
function Groups.look_again(limit)
  local keys = call('ZRANGEBYSCORE', K.parked, '-inf', digits(Q.now), 'LIMIT', 0, limit)
  if keys[1] then
    Groups.touch_all(keys)
    Groups.settle()
    flush()
  end
  return #keys
end

-- Fill up to limit groups after a key ('': from the first), because a limit they share has changed. sweep does the rest.
function Groups.fill_from(key, limit)
  local keys = call('ZRANGEBYLEX', K.group_keys, key == '' and '-' or '(' .. key, '+', 'LIMIT', 0, limit)
  Groups.touch_all(keys)
  if #keys == limit then
    call('HSET', K.meta, 'regroup', keys[limit])
  elseif key ~= '' then
    call('HDEL', K.meta, 'regroup')
  end
end

-- Run the time-based maintenance of groups. Return the largest number of groups of one kind.
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

-- Stop checking the queue's own limits when it has none, and is not parked.
function Groups.sweep_queue()
  if Groups.of('').parked > Q.now or call('HEXISTS', K.limits, '') == 1 then return end
  call('HDEL', K.groups, '')
  Q.grouped[''], Q.uses = nil, Q.uses - 1
end

-- Return how many leases the queue's own limits allow; if none, how long until they do (-1: not a matter of time).
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

-- Let no member of the group start before a time; with the empty key, no job of the queue. A time in the past (0) ends
-- that.
function Groups.park(key, until_ms)
  local group = Groups.of(key)
  group.parked = until_ms
  Groups.use(key == '' and 1 or 2)
  if key == '' then group.is_changed = true else Groups.touch(group) end
end

-- Park the group of a job, or its queue. A longer time stays in force.
function Groups.park_of(job, is_queue, until_ms)
  local key = not is_queue and job.has_links and Groups.key_of(job) or ''
  Groups.park(key, max(Groups.of(key).parked, until_ms))
end
