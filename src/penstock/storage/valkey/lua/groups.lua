-- Groups: jobs that share a limit or an order; and the limits of the queue itself, which is the group of the empty key.
--
-- The part of a job says as what its group counts it: w, a, b as above, h holding, k holding and blocked, nil not at all.
-- Its grip is what it keeps of a slot while it is blocked or scheduled: 1 it stands at the front, 2 it holds the slot.
-- What a group needs in this call is written by settle(), or when its blocked members are to be read again.

function Groups.key_of(job)
  if job.group_key == nil then job.group_key = annex_of(job).g or false end
  return job.group_key
end

function Groups.cost_of(job)
  return job.cost or annex_of(job).c or 1
end

-- Why a job of this annex can never start, if it costs more than the bucket of its group can hold.
function Groups.cost_refused(id, annex)
  local capacity = annex and annex.g and annex.c and Groups.limit_of(annex.g).capacity or 0
  if capacity == 0 or annex.c <= capacity then return nil end
  return format('job %s costs %d; the bucket of its group %s holds %d', id, annex.c, annex.g, capacity)
end

function Groups.line_up(job, group)
  local front, lining = job.grip ~= nil, group.lining
  job.group_member = front and '\0' .. pack('>I6', job.number) .. '1' .. job.id or member_of(job)
  lining[#lining + 1] = front and Groups.FRONT or job.priority
  lining[#lining + 1] = job.group_member
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

-- A waiting job is to be leased. False: it went back to its group instead.
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
