-- Groups: jobs that share a limit or an order; and the limits of the queue itself, which is the group of the empty key.
--
-- The group_role of a job says how its group counts it: w waiting, a active, b blocked, h holding, k holding and blocked,
-- nil not at all.
-- Its slot_hold says what it keeps while it is blocked or scheduled: 1 a place at the front, 2 the slot itself.
-- settle() writes what changed about groups in this call, or earlier if their blocked members are to be read again.

function Groups.key_of(job)
  if job.group_key == nil then job.group_key = extras_of(job).group or false end
  return job.group_key
end

function Groups.cost_of(job)
  return job.cost or extras_of(job).cost or 1
end

-- Return why a job with these extras can never start: it costs more than the bucket of its group can hold.
function Groups.cost_refused(id, extras)
  local capacity = extras and extras.group and extras.cost and Groups.limit_of(extras.group).capacity or 0
  if capacity == 0 or extras.cost <= capacity then return nil end
  return format('job %s costs %d; the bucket of its group %s holds %d', id, extras.cost, extras.group, capacity)
end

function Groups.add_blocked(job, group)
  local front, to_add = job.slot_hold ~= nil, group.to_add
  job.group_member = front and '\0' .. pack('>I6', job.number) .. '1' .. job.id or member_of(job)
  to_add[#to_add + 1] = front and Groups.FRONT or job.priority
  to_add[#to_add + 1] = job.group_member
end

-- Move the job from its role in the group's counts to another.
function Groups.move(job, role)
  if not Groups.key_of(job) then
    job.group_role = nil -- it has links, but no group
    return
  end
  local group, old = Groups.of(job.group_key), job.group_role
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
  job.group_role = role
  if role == 'w' then
    group.w, group.cost = group.w + 1, group.cost + Groups.cost_of(job)
  elseif role == 'a' then
    group.a = group.a + 1
  end
  if role == 'b' or role == 'k' then
    group.b = group.b + 1
    Groups.add_blocked(job, group)
  end
  if role == 'h' or role == 'k' then group.h = group.h + 1 end
  Groups.use(2)
  Groups.touch(group)
end

-- Block the job. slot_hold nil: it is new in the group's line.
function Groups.block(job, slot_hold)
  job.state, job.by, job.slot_hold = 'b', 'g', slot_hold
  changed(job)
  Groups.move(job, slot_hold == 2 and 'k' or 'b')
end

-- Return why the group has no room for the first of its blocked members, and when it may have (nil: not a matter of time).
-- job is that member, if known; without it, return only reasons that hold for any of them.
function Groups.why(group, job)
  local limit, busy = group.limit, group.w + group.a
  if group.paused then return 'paused' end
  if group.parked > Q.now then return 'asked', group.parked end
  if job and job.slot_hold ~= 2 then busy = busy + group.h end
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

function Groups.can_start(group, cost)
  local limit = group.limit
  if group.paused or group.parked > Q.now then return false end
  if limit.concurrency > 0 and group.a >= limit.concurrency then return false end
  if limit.count > 0 and group.starts >= limit.count then return false end
  return limit.capacity == 0 or group.level >= min(cost, limit.capacity) * limit.bucket_per
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

-- Start a waiting job that is to be leased. Return false if it went back to its group instead.
function Groups.start(job)
  if not Groups.key_of(job) then return true end
  local group, cost = Groups.of(job.group_key), Groups.cost_of(job)
  if Groups.can_start(group, cost) then
    Groups.move(job, 'a')
    Groups.charge(group, 1, cost)
    return true
  end
  Groups.block(job, 1)
  emit('blocked', job)
  return false
end

-- A job is to enter waiting. Return true if its group blocks it.
function Groups.maybe_block(job, keeps_number)
  if not Groups.key_of(job) then return false end
  local group, old = Groups.of(job.group_key), job.group_role
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
    job.slot_hold = nil
    if group.b > 0 or Groups.why(group, job) then
      Groups.block(job, nil)
      return true
    end
  end
  job.slot_hold = nil
  Groups.move(job, 'w')
  return false
end

-- A member waits for a time or a signal. In a strict group, the others wait with it.
function Groups.scheduled(job)
  local is_held = job.group_role == 'a' and Groups.key_of(job) and Groups.of(job.group_key).limit.concurrency == 1
  if is_held then
    job.slot_hold = 2
    Groups.move(job, 'h')
  elseif job.group_role == 'a' or job.group_role == 'w' then
    Groups.move(job, nil)
  end
end

-- A member waits for its dependencies, outside its group's line; otherwise as for a time.
function Groups.wait_elsewhere(job)
  if job.group_role == 'k' then
    Groups.move(job, 'h')
  elseif job.group_role == 'b' then
    Groups.leave(job)
  else
    Groups.scheduled(job)
  end
end

-- Reposition a blocked member whose priority has changed.
function Groups.reposition(job)
  if job.group_role ~= 'b' and job.group_role ~= 'k' then return end
  local group = Groups.of(Groups.key_of(job))
  call('ZREM', Groups.set_of(group), job.group_member)
  Groups.add_blocked(job, group)
  Groups.touch(group)
end

-- End the membership of a job.
function Groups.leave(job)
  if job.group_role then Groups.move(job, nil) end
  job.slot_hold = nil
end
