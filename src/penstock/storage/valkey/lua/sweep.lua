-- sweep: runs time-based maintenance, up to limit of each kind.
-- arguments: limit
-- returns:   {promoted, unblocked, rescued, expired, pruned, trimmed, more, wait_ms (-1: none), slot_wait_ms (-1: none),
--   awaiting, the clock (Clock.wall), due schedulers: name, slot, spec, and so on, 1 if the outbox is not empty}
-- events:    promoted, unblocked, stalled, failed, expired, cancelled, enqueued

local ENTRIES_LOOKED_AT = 1000
local HELD_LOOKED_AT = 40000
local HELD = { 'held_completed', 'held_failed', 'held_cancelled' }

local function rescue(job)
  local worker = job.worker
  job.stalls, job.token, job.worker = job.stalls + 1, 0, ''
  changed(job)
  if job.cancelling then return finish(job, 'x', 'cancelled') end
  if is_expired(job) then return expire(job) end
  local cause = Flows.is_parent(job) and Flows.cause(job)
  if cause then return Flows.fail(job, cause) end
  if job.stalls > options_of(job.header).max_stalls then
    local step = Steps.under_way(job)
    local message = message_of(step and 'StalledInStep' or 'Stalled', job.stalls, worker, step)
    set_failure(job, failure_of('Stalled', message))
    local group, row = finish(job, 'f', 'failed')
    put(group, row, 'et', 'Stalled')
    put(group, row, 'em', message)
    return
  end
  local step = Steps.under_way(job)
  enter_waiting(job, true)
  absorb_slot(job)
  local group, row = emit('stalled', job)
  if step then put(group, row, 'data', cjson.encode({ step = step })) end
end

-- Renew leases after a gap, in which their holders could not extend them. A lease that ran out in the gap gets the time it
-- had left, and at least TERM.
local function renew_leases()
  local c = Clock.record()
  if c.gap_from == c.gap_to then return end
  local rows, renewed = call('ZRANGEBYSCORE', K.active, '-inf', digits(c.gap_to), 'WITHSCORES'), {}
  for i = 1, #rows, 2 do
    local left = max(tonumber(rows[i + 1]) - c.gap_from, 0)
    renewed[i], renewed[i + 1] = digits(max(c.gap_to + left, Q.now + Clock.TERM)), rows[i]
  end
  if renewed[1] then send('ZADD', K.active, renewed) end
  c.gap_from, c.changed = c.gap_to, true
end

-- Apply each to the first limit jobs of an index with a score in a range: up to now, by default.
local function each_due(part, limit, each, first, last)
  local ids = call('ZRANGEBYSCORE', K[part], first or '-inf', digits(last or Q.now), 'LIMIT', 0, limit)
  load(ids)
  for i = 1, #ids do
    local job = job_for(ids[i])
    if job then each(job) end
  end
  flush()
  return #ids
end

-- Expire a job, unless the expiry of a dependency has already ended it.
local function expire_pending(job)
  if expiring(job) then expire(job) end
end

-- Return the first count ids of an index that are not held, as far as they are among its first entries.
local function first_unheld(part, count)
  local held = 'held_' .. part
  if not bit_of(Q.uses, 64) or call('ZCARD', K[held]) == 0 then return call('ZRANGE', K[part], 0, count - 1) end
  local free, total = {}, call('ZCARD', K[part])
  for first = 0, min(total, HELD_LOOKED_AT) - 1, CHUNK do
    local ids = call('ZRANGE', K[part], first, first + CHUNK - 1)
    local scores = read_many('ZMSCORE', K[held], ids)
    for i = 1, #ids do
      if not scores[i] then free[#free + 1] = ids[i] end
      if #free == count then return free end
    end
  end
  return free
end

local function prune_surplus(part, keep, limit)
  local surplus = keep and call('ZCARD', K[part]) - keep or 0
  if surplus <= 0 or call('ZCARD', K[part]) == call('ZCARD', K['held_' .. part]) then return 0 end
  local ids = first_unheld(part, min(surplus, limit))
  load(ids)
  for i = 1, #ids do
    if job_for(ids[i]) then forget(J[ids[i]]) end
  end
  flush()
  return #ids
end

-- Apply each to jobs that are due for deletion, but not because of a single jump of the clock (Clock.lag).
local function each_past(part, limit, each)
  local lag, edge = Clock.lag()
  local count = each_due(part, limit, each, nil, Q.now - lag)
  if lag > 0 and edge > Q.now - lag then count = count + each_due(part, limit, each, digits(edge)) end
  return count
end

local function prune_all(limit, settings)
  local pruned = 0
  for _, part in ipairs({ 'completed', 'failed', 'cancelled' }) do
    pruned = pruned + each_past(part, limit, forget)
  end
  if bit_of(Q.uses, 64) then
    for _, part in ipairs(HELD) do each_past(part, limit, Holds.lapse) end
  end
  return pruned + prune_surplus('completed', settings.keep_completed, limit)
    + prune_surplus('failed', settings.keep_failed, limit)
end

-- Return the end of the first entries, if the log is longer than bytes. The size is estimated from those entries; a log that
-- is far too long is cut over several sweeps.
local function cut_by_bytes(bytes)
  local first = call('XRANGE', K.events, '-', '+', 'COUNT', 100)
  local size, last_seq, length = 0, 0, call('XLEN', K.events)
  for i = 1, #first do
    size = size + #first[i][2][2] + 16
    last_seq = tonumber((string.match(first[i][1], '^%d+')))
  end
  if #first == 0 or size / #first * length <= bytes then return 0 end
  return last_seq
end

local function cut_by_age(age_ms)
  local entries, cut = call('XRANGE', K.events, '-', '+', 'COUNT', ENTRIES_LOOKED_AT), 0
  for i = 1, #entries do
    local is_read, groups = pcall(decode, entries[i][2][2])
    -- A damaged entry goes with those before it.
    local at = is_read and type(groups) == 'table' and type(groups[1]) == 'table' and tonumber(groups[1].at)
    if at and not Clock.is_past(at + age_ms) then break end
    cut = tonumber((string.match(entries[i][1], '^%d+')))
  end
  return cut
end

-- Return the lowest offset of the consumers that have not expired. Forget expired ones.
local function lowest_held_offset()
  local held, stored = nil, call('HGETALL', K.consumers)
  for i = 1, #stored, 2 do
    local offset, expires_at = unpack('>I6I6', stored[i + 1])
    if Clock.is_past(expires_at) then
      call('HDEL', K.consumers, stored[i])
    else
      held = min(held or offset, offset)
    end
  end
  return held
end

-- Return the sequence up to which events may go: entries that end at or before it are dropped.
local function cut_of(settings)
  local cut = settings.events_count and Q.events - settings.events_count or 0
  if settings.events_age_ms then cut = max(cut, cut_by_age(settings.events_age_ms)) end
  if settings.events_bytes then cut = max(cut, cut_by_bytes(settings.events_bytes)) end
  local held = lowest_held_offset()
  if held then cut = min(cut, held) end
  return max(cut, Q.events - settings.events_hard_cap)
end

-- Trim the log. Return how many events went. Entries are whole: the first that reaches beyond the cut stays.
local function trim(settings)
  local cut = cut_of(settings)
  local first = call('XRANGE', K.events, '-', '+', 'COUNT', 1)[1]
  if not first or cut <= 0 or tonumber((string.match(first[1], '^%d+'))) > cut then return 0 end
  local before = tonumber(call('HGET', K.meta, 'trimmed') or 0) or 0
  call('XTRIM', K.events, 'MINID', digits(cut + 1) .. '-0')
  local after = Parts.trimmed_to()
  call('HSET', K.meta, 'trimmed', digits(after))
  return after - before
end

local function forget_workers()
  local stored = call('HGETALL', K.workers)
  for i = 1, #stored, 2 do
    if Clock.is_past(unpack('>I6', stored[i + 1]) + BOUNDS.WORKERS_KEPT_MS) then
      call('HDEL', K.workers, stored[i])
      call('HDEL', K.lives, stored[i])
    end
  end
end

local function next_thing(slot_wait)
  local wait = slot_wait >= 0 and slot_wait or nil
  local parts = { 'scheduled', 'suspended', 'active', 'expiring', 'parked', 'fading', 'completed', 'failed', 'cancelled' }
  local is_lagging = Clock.lag() > 0 -- deletions are put off, so no sweep need come for them
  for i = 1, is_lagging and 6 or 9 do
    local part_wait = until_next(K[parts[i]], nil)
    if part_wait and (not wait or part_wait < wait) then wait = part_wait end
  end
  if bit_of(Q.uses, 64) and not is_lagging then
    for _, part in ipairs(HELD) do
      local part_wait = until_next(K[part], wait)
      wait = wait and min(wait, part_wait) or part_wait
    end
  end
  return wait or -1
end

register('sweep', function(keys, args)
  open(keys)
  local limit, settings = tonumber(args[1]), read_settings()
  Clock.record()
  local promoted = promote_due(limit)
  local unblocked = bit_of(Q.uses, 16) and each_due('suspended', limit, Signals.time_out) or 0
  renew_leases()
  local rescued = each_due('active', limit, rescue)
  local expired = each_due('expiring', limit, expire_pending)
  local regrouped = bit_of(Q.uses, 2) and Groups.sweep(limit) or 0
  if bit_of(Q.uses, 1) then
    Groups.sweep_queue()
    Q.wake = Q.wake or rescued > 0 and waiting_count() > 0
  end
  local pruned = prune_all(limit, settings)
  local trimmed = trim(settings)
  local forgotten = Dedup.forget(limit)
  tidy_line(limit)
  forget_workers()
  if bit_of(Q.uses, Usage.BIT) then Usage.forget() end
  forget_answers()
  close()
  local more = promoted >= limit or unblocked >= limit or rescued >= limit or expired >= limit or pruned >= limit
    or forgotten >= limit or regrouped >= limit or Q.clock.follow > 0
  local slot_wait, awaiting = Schedulers.wait()
  return {
    promoted, unblocked, rescued, expired, pruned, trimmed, more and 1 or 0, next_thing(slot_wait), slot_wait,
    awaiting, Clock.wall(), Schedulers.due(limit), Outbox.is_full() and 1 or 0,
  }
end)
