-- Jobs: read many, change them in memory, write all at once.

-- Links of jobs to others (links.lua), for jobs that have links.
local maybe_block, ended
local Signals = {} -- stages and suspensions (signals.lua)
local Steps = {} -- durable steps (steps.lua)
local Usage = {} -- usage.lua

-- Read jobs into J by id (false: no record). with_static: payload, ttl and write_id are needed too.
local function load(ids, with_static)
  local unread, n = {}, 0
  for i = 1, #ids do
    local id = ids[i]
    if J[id] == nil then
      n = n + 1
      unread[n] = id
      J[id] = false
    end
  end
  if n == 0 then return end
  local states = read_many('HMGET', K.state, unread)
  local static_ids, statics = {}, {}
  for i = 1, n do
    if with_static or not states[i] then static_ids[#static_ids + 1] = unread[i] end
  end
  local records = read_many('HMGET', K.jobs, static_ids)
  for i = 1, #static_ids do statics[static_ids[i]] = records[i] end
  for i = 1, n do
    local id = unread[i]
    if statics[id] or not (with_static or not states[i]) then
      J[id] = job_of(id, states[i], statics[id]) or false
    end
  end
  read_waiters(unread)
end

-- Read the payload, and other fields that only the static record has, of a job loaded without it.
local function need_static(job)
  if job.body or job.payload then return end
  local static = call('HGET', K.jobs, job.id)
  local fields = read_body({}, sub(static, 13))
  job.body, job.payload_at, job.ttl, job.write_id = fields.body, fields.payload_at, fields.ttl, fields.write_id
  job.packed_extras = fields.packed_extras
end

-- Return the extras as a table. After changing it, call extras_changed().
local function extras_of(job)
  if not job.extras then
    local packed
    if job.extras_moved then
      packed = call('HGET', K.annex, job.id)
    else
      need_static(job)
      packed = job.packed_extras
    end
    job.extras = packed and decode(packed) or {}
  end
  return job.extras
end

-- Return the packed extras: never an empty list, which is what cmsgpack makes of an empty table.
local function packed_extras(job)
  return next(extras_of(job)) and encode(job.extras) or '\128'
end

local function need_result(job)
  if job.big_result and not job.result then job.result = call('HGET', K.results, job.id) end
end

-- Return the loaded job of an id, if it has a record.
local function job_for(id)
  local job = J[id]
  return job and not job.gone and job or nil
end

-- Drop the outcome of earlier runs: with the record, at a retry, or when the id is queued afresh.
local function drop_outcome(job)
  if job.big_result then hdel('results', job.id) end
  if job.has_failure then hdel('failures', job.id) end
  if job.error_type == 'Damaged' then
    hdel('damaged', job.id)
    zrem('damaged_at', job.id)
  end
  job.big_result, job.has_failure, job.result, job.failure = false, false, nil, nil
  job.save_result, job.save_failure, job.error_type = false, false, nil
end

-- Drop the values stored beside the two records: with the record, or when its id is queued afresh.
local function drop_side_values(job)
  drop_outcome(job)
  if job.has_progress then hdel('progress', job.id) end
  if job.rerun then hdel('rerun', job.id) end
  if job.has_log then
    call('SREM', K.logged, job.id)
    call('HDEL', K.unkept, job.id)
    call('UNLINK', Q.prefix .. ':log:' .. job.id)
  end
  if job.extras_moved then
    Signals.drop(job)
    Steps.drop(job)
    hdel('annex', job.id)
  end
  job.has_progress, job.rerun, job.has_log, job.slot, job.save_slot = false, false, false, nil, false
  job.extras_moved, job.save_extras = false, false
end

local function score_of(job)
  local state = job.state
  if state == 'w' then return job.priority end
  if state == 's' then return job.run_at end
  if state == 'a' then return job.lease_until end
  if state == 'b' then return job.lifo and -job.number or job.number end
  return kept_until(job)
end

local function touch(job)
  if not job.touched then
    job.touched = true
    local list = list_in(J, 1) -- ids are strings: the number 1 is free for the list of what is to be saved
    list[#list + 1] = job
  end
end

-- Mark the job as changed: from now on it has a state record.
local function changed(job)
  job.pristine = false
  job.save_state = true
  touch(job)
end

local function extras_changed(job)
  job.extras_moved, job.save_extras = true, true
  changed(job)
end

local function rewritten(job)
  job.save_static = true
  touch(job)
end

local function gone(job)
  job.gone = true
  touch(job)
end

-- Remove the job from where the indexes had it.
local function leave(job)
  if not job.was or job.is_popped then return end
  if job.was_in_line then
    Q.stale = Q.stale + 1
  else
    zrem(STATES[job.was], job.was_member)
  end
end

-- Index failed jobs by error class.
local function save_error(job)
  local was, now = job.was_error, job.state == 'f' and not job.gone and job.error_type or nil
  if was and was ~= now then zrem(Parts.named('error:' .. was), job.id) end
  if now then
    zadd(Parts.named('error:' .. now), job.finished, job.id)
    hset('errors', now, '1')
  end
end

-- Index jobs that are due at an instant of the wall clock by that instant. job.wall_at is the instant, if the call named
-- one, and job.wall_run_at the queue time it stood for.
function Clock.save_instant(job)
  local is_timed = job.state == 's' or job.state == 'b' and job.by == 'h'
  if is_timed and job.wall_at and job.run_at == job.wall_run_at then
    zadd('instants', job.wall_at, job.id)
  elseif job.was_run_at and (not is_timed or job.run_at ~= job.was_run_at) then
    zrem('instants', job.id)
  end
end

local function save_gone(job)
  if job.was then
    leave(job)
    if job.was_error then save_error(job) end
    if job.was_suspended then zrem('suspended', job.id) end
    if job.was_expiring then zrem('expiring', job.id) end
    if job.was_run_at then zrem('instants', job.id) end
    hdel('jobs', job.id)
    hdel('state', job.id)
  end
  if job.has_links then
    Holds.drop(job)
    Flows.drop_links(job)
  end
  drop_side_values(job)
end

local function save_places(job)
  local member = job.state == 'w' and member_of(job) or job.id
  local score = score_of(job)
  if job.was ~= job.state or job.was_member ~= member then leave(job) end
  if score then zadd(STATES[job.state], score, member) end
  if expiring(job) then
    zadd('expiring', job.expires, job.id)
  elseif job.was_expiring then
    zrem('expiring', job.id)
  end
  if job.suspended_until then
    zadd('suspended', job.suspended_until, job.id)
  elseif job.was_suspended and not (job.state == 'b' and job.by == 'i') then
    zrem('suspended', job.id)
  end
  if job.was_run_at or job.wall_at then Clock.save_instant(job) end
  if job.was_error or job.state == 'f' then save_error(job) end
  if job.has_links then Holds.save(job) end
  if job.state == 'w' then Q.wake = true end
  if job.state == 's' and job.run_at < STAGED_FROM then Q.due = min(Q.due or job.run_at, job.run_at) end
end

local function save(job)
  if job.gone then return save_gone(job) end
  if job.save_state then
    save_places(job)
    hset('state', job.id, state_of(job))
  end
  if job.save_static then hset('jobs', job.id, static_of(job)) end
  if job.save_result then hset('results', job.id, job.result) end
  if job.save_failure then hset('failures', job.id, job.failure) end
  if job.save_slot then hset('rerun', job.id, encode(job.slot)) end
  if job.save_extras then hset('annex', job.id, packed_extras(job)) end
end

-- Send the collected writes; later reads see them.
local function flush()
  if Q.deps then Flows.write_deps() end
  local touched = J[1]
  if touched then
    for i = 1, #touched do save(touched[i]) end
  end
  send_all('ZREM', removed_members)
  send_all('HDEL', removed_fields)
  send_all('HSET', set_fields)
  send_all('ZADD', added_members)
  forget_buffers()
  -- guard.lua returns to this state.
  local groups = Q.groups
  local last = groups[#groups]
  Q.flushed, Q.marked_groups, Q.marked_rows = true, #groups, last and last.n or 0
  Q.marked_outbox, Q.popped_entries, Q.popped_rows = Q.outbox and #Q.outbox or 0, false, false
end

-- A token too many wakes a worker for nothing; a token too few leaves a job waiting until some worker's wait is over.
local function wake_one()
  local most_tokens = 16
  if (Q.wake_tokens or call('LLEN', K.wake)) < most_tokens then call('RPUSH', K.wake, '1') end
end

-- Return whether a job or group will be due before all others: waiting workers know only the earliest due time so far.
local function is_due_sooner()
  if not Q.due or Q.due > tonumber(call('ZRANGE', K.scheduled, 0, 0, 'WITHSCORES')[2] or Q.due) then return false end
  return not bit_of(Q.uses, 2) or Q.due <= tonumber(call('ZRANGE', K.parked, 0, 0, 'WITHSCORES')[2] or Q.due)
end

-- End a verb that writes.
local function close()
  if next(Q.grouped) then Groups.settle() end
  if Q.deps then Flows.write_deps() end
  if Q.spent then Usage.write() end
  write_waiters()
  flush()
  Q.wake = Q.wake or is_due_sooner()
  send_news()
  write_events()
  if Q.wake then wake_one() end
  if Q.outbox then Outbox.write() end
  write_meta()
end

local function enter_waiting(job, keeps_number)
  if not keeps_number then job.number = draw() end
  if job.has_links and maybe_block(job, keeps_number) then return end
  job.state, job.ready_at = 'w', Q.now
  changed(job)
end

local function schedule(job, run_at)
  job.state, job.run_at = 's', run_at
  if job.group_role then Groups.scheduled(job) end
  changed(job)
end

-- Return class, message and traceback of the packed failure.
local function set_failure(job, failure)
  local fields = decode(failure)
  job.failure, job.has_failure, job.save_failure, job.error_type = failure, true, true, fields[1]
  return fields
end

local function set_result(job, result)
  job.result, job.big_result = result, #result > INLINE_RESULT
  job.save_result = job.big_result
end

-- Return the message of a failure that the store creates. string.format would cut a value at its first zero byte.
local function message_of(kind, ...)
  local values, i = { ... }, 0
  local message = string.gsub(FAILURE_TEXTS[kind], '%%[ds]', function()
    i = i + 1
    return tostring(values[i])
  end)
  return message
end

local function failure_of(kind, message)
  return encode({ kind, message, '' })
end

local function is_expired(job)
  return job.expires > 0 and job.expires <= Q.now
end

-- Return whether a finished record is past its time, and so counts as absent.
local function is_over(job)
  return ENDED[job.state] and Clock.is_past(kept_until(job))
end

-- Return the next instants whose jobs have yet to follow a correction of the clock, with those jobs: at least limit, if
-- there are as many; all jobs of an instant, or none.
function Clock.instants_to_follow(c, limit)
  local rows = call('ZRANGEBYSCORE', K.instants, digits(c.follow), '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  local last, n = rows[#rows], #rows
  if n < 2 * limit then
    c.follow = 0
  elseif rows[2] == last then
    rows, c.follow = call('ZRANGEBYSCORE', K.instants, last, last, 'WITHSCORES'), tonumber(last) + 1
  else
    while rows[n] == last do
      rows[n], rows[n - 1] = nil, nil
      n = n - 2
    end
    c.follow = tonumber(last)
  end
  c.changed = true
  return rows
end

-- After a correction of the clock, a job due at an instant of the wall clock must be due when the clock shows it. Compute
-- the queue time again for about limit jobs, and write it.
function Clock.follow(limit)
  local instants, ids = Clock.instants_to_follow(Q.clock, limit), {}
  for i = 1, #instants, 2 do ids[#ids + 1] = instants[i] end
  load(ids)
  for i = 1, #ids do
    local job, wall = job_for(ids[i]), tonumber(instants[2 * i])
    local run_at = Clock.when(wall)
    if job and job.was_run_at and job.run_at ~= run_at then
      job.run_at, job.wall_at, job.wall_run_at = run_at, wall, run_at
      changed(job)
    end
  end
  flush()
end
